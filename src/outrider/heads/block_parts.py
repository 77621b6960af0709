"""Base of the networks of block-parallel heads for training, in float32.

For every anchor a of a text: the positions, what the block attends to, and its predictions (block = 4):

    position       0    1    …   a-1 │  a     a+1    a+2    a+3
    taps           g_0  g_1  …  g_a-1│  ·      ·      ·      ·       g_t: target's states at t, known before a
    the block                        │ x_a    mask   mask   mask     the pending token, and three unknown ones
    predicts                         │  –    x_a+1  x_a+2  x_a+3

Every row of the block attends to g_0 … g_a-1 and to the whole block; no row attends to another block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.device import to_device
from outrider.core.ragged import Ragged
from outrider.drafting.base import Target
from outrider.heads.block_layouts import DEFAULT_THETA, INPUT_TAPS
from outrider.heads.layer import Sizes
from outrider.heads.layouts import speculators
from outrider.heads.parts import Layer, register_vocabulary, rotary_angles, sizes_config
from outrider.heads.sample import Sample, TargetWeights

ANCHORS = 64  # of a text, at most, in one loss
DECAY = 4.0  # of the weights of a block's tokens, in tokens: a wrong one makes all after it worthless


@dataclass(frozen=True)
class Blocks:
    """The blocks behind A anchors in texts that follow one another.

    offsets: int64 [T], the number of every place within its text.  positions: int64 [A * block], of the
    rows.  texts, rows: the places and the rows of the texts.  seen: bool [B, 1, M, L + M], what a row attends
    to: places of its text, then rows of its text.
    """

    offsets: Tensor
    positions: Tensor
    texts: Ragged
    rows: Ragged
    seen: Tensor

    @staticmethod
    def of(anchors: Tensor, lengths: Sequence[int], block: int, device: torch.device) -> Blocks:
        """anchors: places [A] on the host, ascending by text; the last may be behind the last text.
        lengths: places of each text.
        """
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        text = torch.searchsorted(ends, anchors, right=True).clamp_max(len(lengths) - 1)
        counts, begins = torch.bincount(text, minlength=len(lengths)), anchors - (ends - sizes)[text]
        offsets = torch.cat([torch.arange(length) for length in lengths])
        positions = (begins[:, None] + torch.arange(block)).flatten()
        owners = torch.arange(len(anchors)).repeat_interleave(block)
        owners, starts = to_device(owners, device), to_device(begins.repeat_interleave(block), device)
        texts, rows = Ragged.of(lengths, device), Ragged.of((block * counts).tolist(), device)
        owner = rows.entries(owners).masked_fill(~rows.valid, -1)
        before = torch.arange(max(lengths), device=device) < rows.entries(starts)[..., None]
        seen = torch.cat([before, owner[:, :, None] == owner[:, None]], dim=-1)[:, None]
        return Blocks(to_device(offsets, device), to_device(positions, device), texts, rows, seen)


class BlockLayer(Layer):
    """A layer whose rows attend to the context before their block, and to their block."""

    def read(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """x [A * block, hidden] of all blocks, context [T, hidden] -> [A * block, hidden]."""
        return self.feed_forward(x + self.attend(self.input_layernorm(x), context, blocks))

    def attend(self, u: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """The attention's output for its input u, both [A * block, hidden]."""
        attention, pad, own = self.self_attn, blocks.texts.pad, blocks.rows.pad
        before = rotary_angles(blocks.offsets, attention.head_dim, DEFAULT_THETA)
        within = rotary_angles(blocks.positions, attention.head_dim, DEFAULT_THETA)
        k = torch.cat([pad(self.context_keys(context, before)), own(attention.keys(u, within))], dim=-2)
        v = torch.cat([pad(self.context_values(context)), own(attention.values(u))], dim=-2)
        q = own(attention.queries(u, within))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=blocks.seen, enable_gqa=True)
        projected: Tensor = attention.o_proj(blocks.rows.join(out))
        return projected

    def context_keys(self, context: Tensor, angles: Tensor) -> Tensor:
        return self.self_attn.keys(context, angles)

    def context_values(self, context: Tensor) -> Tensor:
        return self.self_attn.values(context)


class BlockNetwork(nn.Module):
    """Network of a block-parallel head, with the published names.

    taps: as `Needs.states` numbers them.  block: tokens of a block, the pending one included.
    mask: id of the others.  ids: the head's tokens, ascending; empty for all.
    """

    t2d: Tensor  # bool [V], with `ids`

    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        taps: Sequence[int],
        mask: int,
        layers: int = 2,
        block: int = 8,
        ids: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.sizes, self.vocabulary, self.taps, self.ids = sizes, vocabulary, tuple(taps), tuple(ids)
        self.block, self.mask, hidden = block, mask, sizes.hidden
        self.fc = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, sizes.eps), nn.RMSNorm(hidden, sizes.eps)
        self.layers = nn.ModuleList(BlockLayer(sizes, qk_norm=True) for _ in range(layers))
        if ids:
            self.lm_head = nn.Linear(hidden, len(ids), bias=False)
            register_vocabulary(self, torch.tensor(ids), vocabulary)

    @property
    def outputs(self) -> int:
        """Tokens of its vocabulary."""
        return len(self.ids) or self.vocabulary

    @classmethod
    def like(cls, target: Target, inner: int | None = None, **options: Any) -> Self:
        """A small one for this target, with random weights and three taps, spread as the published ones are.

        Attention copies values at first (o_proj = v_proj^T, orthogonal): a mask needs the anchor unchanged,
        and learns that slowly from noise.
        """
        spec = target.decoder.spec
        first, last = min(2, spec.layers), max(1, spec.layers - 2)
        width = 64 if spec.hidden >= 256 else 16
        heads = max(1, spec.hidden // width)
        sizes = Sizes(spec.hidden, inner or 2 * spec.hidden, heads, heads, width)
        usual = {"taps": sorted({first, (first + last) // 2, last}), "mask": target.vocabulary - 1}
        network = cls(sizes, target.vocabulary, **{**usual, **options})
        for layer in network.layers:
            attention: Any = layer.self_attn
            nn.init.orthogonal_(attention.v_proj.weight)
            if attention.o_proj.weight.shape == attention.v_proj.weight.T.shape:
                attention.o_proj.weight.data.copy_(attention.v_proj.weight.data.T)
        return network

    def speculators(self, kind: str, architecture: str, **own: Any) -> dict[str, Any]:
        """The config in the format of speculators.  own: further keys of the method."""
        own |= {"block_size": self.block, "mask_token_id": self.mask, INPUT_TAPS: list(self.taps)}
        own |= {"sliding_window_non_causal": False, "sample_from_anchor": False}
        own["draft_vocab_size"] = self.outputs
        return speculators(kind, architecture, self.block - 1, self.layer_config(), own)

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Corrected logits [A, block, Vd], and the logit of the acceptance [A, block], if it is predicted.

        x [A, block, h]; before [A, block]: the token before each place, of the first the anchor itself.
        """
        return logits, None

    def contexts(self, taps: Tensor) -> Sequence[Tensor]:
        """What each layer reads of the text, [T, hidden], from taps [T, len(taps) * hidden]."""
        return [self.hidden_norm(self.fc(taps))] * len(self.layers)

    def layer_config(self) -> dict[str, Any]:
        """The keys of a transformers config."""
        return {
            **sizes_config(self.sizes),
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_act": "silu",
            "num_hidden_layers": len(self.layers),
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "rope_theta": DEFAULT_THETA,
            "sliding_window": None,
            "layer_types": ["full_attention"] * len(self.layers),
        }

    def forward(
        self,
        taps: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        outer: TargetWeights,
        lengths: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [A, block, Vd] of each row, given the text before it, and the logit of its acceptance,
        [A, block], if the network predicts it.

        taps [T, len(taps) * hidden], tokens [T], anchors [A]: places on the host, ascending by text.
        lengths: of the texts, where there are several.
        """
        device = tokens.device
        blocks = Blocks.of(anchors, lengths or [len(taps)], self.block, device)
        anchors = to_device(anchors, device)
        ids = torch.full((len(anchors), self.block), self.mask, device=device)
        ids[:, 0] = tokens[anchors]
        x = outer.embedding[ids.flatten()]
        for layer, context in zip(self.layers, self.contexts(taps)):
            assert isinstance(layer, BlockLayer)
            x = layer.read(x, context, blocks)
        x = self.norm(x)
        logits = (self.lm_head(x) if self.ids else outer.logits(x)).unflatten(0, ids.shape)
        x = x.unflatten(0, ids.shape)
        place = anchors[:, None] + (torch.arange(self.block, device=device) - 1).clamp_min(0)
        before = tokens[place.clamp_max(len(tokens) - 1)]  # of the anchor's row, the anchor itself
        return self.correct(logits, x, before, outer.embedding)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the text over the rows that predict, weighted by exp(-depth / DECAY), plus that
        of the predicted acceptance with sum(min(p, q)).
        """
        tokens, last, device = sample.tokens, len(sample.tokens) - 1, sample.tokens.device
        mask = torch.ones(len(tokens), dtype=torch.bool) if sample.mask is None else sample.mask
        anchors = self._anchors(sample, mask)
        taps = torch.cat([sample.states[tap] for tap in self.taps], dim=-1)
        logits, confidence = self(taps, tokens, anchors, outer, sample.lengths)
        depth = torch.arange(self.block) - 1  # -1 for the anchor's row
        places = anchors[:, None] + 1 + depth  # of the tokens that the rows predict, [A, block]
        before = (places - 1).clamp_max(last)
        in_text = sample.offsets[before] - sample.offsets[anchors][:, None] == depth  # the anchor's
        counted = to_device((places <= last) & (depth >= 0) & mask[before] & in_text, device)
        expected = tokens[to_device(places.clamp_max(last), device)]
        if self.ids:
            counted = counted & self.t2d[expected]
            known = self.t2d.nonzero().flatten()
            expected = torch.searchsorted(known, expected).clamp_max(len(known) - 1)
        weight = counted * torch.exp(-to_device(depth, device) / DECAY)
        rows = logits.flatten(0, 1).float()
        losses = F.cross_entropy(rows, expected.flatten(), reduction="none").view_as(weight)
        if confidence is not None:
            target_logits = sample.logits[to_device(before, device)]
            losses = losses + self._acceptance_loss(confidence, logits, target_logits)
        return (losses * weight).sum() / weight.sum().clamp_min(1e-6)

    def _acceptance_loss(self, predicted: Tensor, logits: Tensor, target_logits: Tensor) -> Tensor:
        """[A, block]: cross entropy of the predicted logit with the expected acceptance, sum(min(p, q))."""
        p = target_logits.softmax(-1)[..., list(self.ids) or slice(self.vocabulary)]  # of the head's tokens
        q = logits.detach().float().softmax(-1)
        acceptance = torch.minimum(p, q).sum(-1)
        return F.binary_cross_entropy_with_logits(predicted, acceptance, reduction="none")

    def _anchors(self, sample: Sample, mask: Tensor) -> Tensor:
        """int64, on the host: places that count, at most ANCHORS of each text, chosen at random."""
        lengths = sample.lengths or [len(mask)]
        chosen, first = list[Tensor](), 0
        for i, length in enumerate(lengths):
            places = first + mask[first : first + length - 1].nonzero().flatten()
            generator = torch.Generator().manual_seed(sample.seeds[i]) if sample.seeds else None
            chosen.append(places[torch.randperm(len(places), generator=generator)[:ANCHORS]])
            first += length
        return torch.cat(chosen)
