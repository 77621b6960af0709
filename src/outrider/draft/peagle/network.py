"""P-EAGLE's network for training, with the names of speculators' files.

A row has an anchor a and a depth d.  Row (a, 0) is EAGLE-3's pair (f_a, x_a+1); deeper ones have neither
state nor token:

    place             0      1      2      3            anchors 0 and 2, depths up to 2
    depth 0         (0,0)  (1,0)  (2,0)  (3,0)          at position a, predicts x_a+2
    depth 1         (0,1)         (2,1)                 at position a + 1, predicts x_a+3
    depth 2         (0,2)                               at position a + 2, predicts x_a+4

Row (a, d) attends to the rows of depth 0 up to its anchor, and to those of its anchor up to itself.  Deeper
levels have fewer rows, as in the publication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.layouts import speculators_config
from outrider.heads.parts import Layer, rotary_angles, small_sizes, soft_cross_entropy
from outrider.heads.sample import Sample, TargetWeights, mean_loss
from outrider.heads.tapped import default_taps
from outrider.heads.tapped_parts import PathLayer, TapNetwork, small_vocabulary

ANCHORS = 128  # of a text, at most, in one loss
KEPT, LEAST = 0.7, 0.2  # share of the anchors that go on with every further depth; of all, at least


class Network(TapNetwork):
    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        taps: Sequence[int],
        mask: int,
        drafted: Sequence[int] | None = None,
        layers: int = 1,
        depths: int = 8,
        positions: int = 2048,
    ) -> None:
        """mask: token id of positions without a token.  depths: levels in the loss."""
        super().__init__(sizes, vocabulary, taps, drafted, positions)
        self.mask, self.depths = mask, depths
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(taps) * sizes.hidden))
        self.layers = nn.ModuleList([PathLayer(sizes), *(Layer(sizes) for _ in range(layers - 1))])

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """A small one for this target, with random weights and two tokens of three."""
        spec, vocabulary = target.decoder.spec, target.vocabulary
        usual = {"mask": vocabulary - 1, "drafted": small_vocabulary(vocabulary), "depths": 4}
        return cls(small_sizes(spec), vocabulary, default_taps(spec.layers), **{**usual, **options})

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "speculators_version": "0.3.0",
            "mask_token_id": self.mask,
            **self.head_config(),
            "norm_before_residual": False,
            "transformer_layer_config": self.layer_config(len(self.layers)),
            "speculators_config": speculators_config("peagle", self.depths),
        }

    def forward(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, anchors: Tensor, depth: Tensor
    ) -> Tensor:
        """Logits [n, Vd] of the rows (anchors [n], depth [n]), those of depth 0 first and for all places.

        states [T, taps * hidden]; tokens [T + 1].
        """
        known = (depth == 0)[:, None]
        places = anchors.clamp_max(len(states) - 1)
        g = self.fc(torch.where(known, states[places], self.mask_hidden[0]))
        ids = torch.where(known[:, 0], tokens[places + 1], self.mask)
        first: Any = self.layers[0]
        angles = rotary_angles(anchors + depth, first.self_attn.head_dim)
        text = (depth == 0) & (anchors <= anchors[:, None])
        own = (anchors == anchors[:, None]) & (depth <= depth[:, None])
        u = torch.cat([first.input_layernorm(embedding[ids]), first.hidden_norm(g)], dim=-1)
        x = first.feed_forward(g + first.self_attn(u, angles, text | own))
        for layer in self.layers[1:]:
            x = layer(x, angles, text | own)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def rows(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Anchors and depths of the rows of one loss: all places, then a random part of those that count."""
        count, device = len(sample.tokens) - 1, sample.tokens.device
        anchors, found = torch.arange(count, device=device), sample.places(1, count - 1)
        chosen = found[torch.randperm(len(found), device=device)[:ANCHORS]]
        parts = [chosen[: int(len(chosen) * max(KEPT**d, LEAST))] for d in range(1, self.depths)]
        parts = [part[part + d < count] for d, part in enumerate(parts, 1)]
        depths = [torch.full_like(part, d) for d, part in enumerate([anchors, *parts])]
        return torch.cat([anchors, *parts]), torch.cat(depths)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Mean cross entropy with the target's distribution over the head's tokens, over all rows.

        Counts the rows where the target's likeliest token is one of them.
        """
        states = torch.cat([sample.states[tap] for tap in self.taps], dim=-1)[:-1]
        anchors, depth = self.rows(sample)
        logits = self(states, sample.tokens, outer.embedding, anchors, depth)
        places = anchors + depth + 1
        counted = torch.ones_like(places, dtype=torch.bool) if sample.mask is None else sample.mask[places]
        theirs = sample.logits[places, : self.vocabulary]
        counted = counted & self.known(theirs)
        return mean_loss(soft_cross_entropy(logits[counted], theirs[counted][:, self.ids]))
