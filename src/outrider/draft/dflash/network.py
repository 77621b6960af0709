"""The network of a block-parallel head for training, in float32.

For every anchor a of a text: the positions, what the block attends to, and its predictions (block = 4):

    position       0    1    …   a-1 │  a     a+1    a+2    a+3
    taps           g_0  g_1  …  g_a-1│  ·      ·      ·      ·       g_t: target's states at t, known before a
    the block                        │ x_a    mask   mask   mask     the pending token, and three unknown ones
    predicts                         │  –    x_a+1  x_a+2  x_a+3     from_anchor: x_a+1 … x_a+4, one later

Every row of the block attends to g_0 … g_a-1 and, in layers that are not causal, to the whole block; no row
attends to another block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft.dflash.layouts import ARCHITECTURE, DEFAULT_THETA, SLIDING, SPARK, TYPE
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.layouts import speculators_config
from outrider.heads.parts import Layer, RmsNorm, register_vocabulary, rotary_angles, sizes_config
from outrider.heads.sample import Sample, TargetWeights

ANCHORS = 64  # of a text, at most, in one loss
DECAY = 4.0  # of the weights of a block's tokens, in tokens: a wrong one makes all after it worthless


@dataclass(frozen=True)
class Shape:
    """Sizes and variants of a head.

    taps: as `Needs.states` numbers them.
    ids: the target's tokens in the head's vocabulary, ascending; empty for all.
    sliding: the layers that have the window.
    markov: rank of DSpark's table, 0 without one.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    taps: tuple[int, ...]
    block: int
    mask: int
    eps: float = 1e-6
    theta: float = DEFAULT_THETA
    from_anchor: bool = False
    ids: tuple[int, ...] = ()
    window: int = 0
    sliding: tuple[int, ...] = ()
    non_causal: bool = False
    markov: int = 0

    @property
    def skipped(self) -> int:
        """The rows of a block that predict nothing."""
        return 0 if self.from_anchor else 1

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, self.eps)


def block_mask(anchors: Tensor, block: int, context: int, window: int, causal: bool) -> Tensor:
    """Attention mask, bool [R, context + R]: columns are the context, then the rows of all blocks.

    R = A · block rows; anchors [A]: the position of each block's first row.  window: in tokens, 0 for none.
    """
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block)
    position = (anchors[:, None] + torch.arange(block, device=anchors.device)).flatten()
    before = torch.arange(context, device=anchors.device)
    to_context = before < anchors[owner, None]
    to_rows = owner == owner[:, None]
    if causal:
        to_rows = to_rows & (position <= position[:, None])
    if window:
        to_context = to_context & (before > position[:, None] - window)
        to_rows = to_rows & (position > position[:, None] - window)
    return torch.cat([to_context, to_rows], dim=-1)


class BlockLayer(Layer):
    """A layer whose rows attend to the context and to their block.  window, causal: as in `block_mask`."""

    def __init__(self, s: Shape, window: int, causal: bool) -> None:
        super().__init__(s.sizes, qk_norm=True)
        self.shape, self.window, self.causal = s, window, causal

    def read(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """x [R, hidden] of all blocks, context [T, hidden], anchors [A] -> [R, hidden]."""
        s, attention, u = self.shape, self.self_attn, self.input_layernorm(x)
        positions = (anchors[:, None] + torch.arange(s.block, device=x.device)).flatten()
        before = rotary_angles(torch.arange(len(context), device=x.device), s.head_dim, s.theta)
        own = rotary_angles(positions, s.head_dim, s.theta)
        k = torch.cat([attention.keys(context, before), attention.keys(u, own)], dim=1)
        v = torch.cat([attention.values(context), attention.values(u)], dim=1)
        mask = block_mask(anchors, s.block, len(context), self.window, self.causal)
        return self.feed_forward(x + attention.attend(attention.queries(u, own), k, v, mask))


class Network(nn.Module):
    @staticmethod
    def like(target: Target, **options: Any) -> Network:
        """A small one for this target, with random weights and three taps, spread as the published ones are.

        options: of `Shape`.  Attention copies values at first (o_proj = v_proj^T, orthogonal): a mask needs
        the anchor unchanged, and learns that slowly from noise.
        """
        spec, vocabulary = target.decoder.spec, target.vocabulary
        first, last = min(2, spec.layers), max(1, spec.layers - 2)
        width = 64 if spec.hidden >= 256 else 16
        heads = max(1, spec.hidden // width)
        sizes: dict[str, Any] = {"hidden": spec.hidden, "inner": 2 * spec.hidden, "layers": 2, "block": 8}
        sizes |= {"heads": heads, "kv_heads": heads, "head_dim": width}
        sizes |= {"vocabulary": vocabulary, "mask": vocabulary - 1}
        sizes |= {"taps": tuple(sorted({first, (first + last) // 2, last}))}
        network = Network(Shape(**{**sizes, **options}))
        for layer in network.layers:
            attention: Any = layer.self_attn
            nn.init.orthogonal_(attention.v_proj.weight)
            if attention.o_proj.weight.shape == attention.v_proj.weight.T.shape:
                attention.o_proj.weight.data.copy_(attention.v_proj.weight.data.T)
        return network

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.taps = s, s.taps
        self.fc = nn.Linear(len(s.taps) * s.hidden, s.hidden, bias=False)
        self.hidden_norm, self.norm = (RmsNorm(s.hidden, s.eps) for _ in range(2))
        sliding = [i in s.sliding for i in range(s.layers)]
        self.layers = nn.ModuleList(
            BlockLayer(s, s.window * one, one and not s.non_causal) for one in sliding
        )
        if s.ids:
            self.lm_head = nn.Linear(s.hidden, len(s.ids), bias=False)
            register_vocabulary(self, torch.tensor(s.ids), s.vocabulary)
        if s.markov:
            second = nn.Linear(s.markov, len(s.ids) or s.vocabulary, bias=False)
            nn.init.zeros_(second.weight)
            first = nn.Embedding(s.vocabulary, s.markov)
            self.markov_head = nn.ModuleDict({"markov_w1": first, "markov_w2": second})

    def config(self) -> dict[str, Any]:
        """In the format of speculators."""
        s = self.shape
        kind, architecture = (SPARK, "DSparkDraftModel") if s.markov else (TYPE, ARCHITECTURE)
        markov = {"markov_rank": s.markov, "markov_head_type": "vanilla", "enable_confidence_head": False}
        kinds = [SLIDING if i in s.sliding else "full_attention" for i in range(s.layers)]
        fixed = {"attention_bias": False, "hidden_act": "silu", "model_type": "qwen3"}
        sizes = {"num_hidden_layers": s.layers, "vocab_size": s.vocabulary, "tie_word_embeddings": False}
        window = {"sliding_window": s.window or None, "layer_types": kinds}
        return {
            **(markov if s.markov else {}),
            "architectures": [architecture],
            "speculators_model_type": kind,
            "block_size": s.block,
            "mask_token_id": s.mask,
            "aux_hidden_state_layer_ids": list(s.taps),
            "sliding_window_non_causal": s.non_causal,
            "sample_from_anchor": s.from_anchor,
            "draft_vocab_size": len(s.ids) or s.vocabulary,
            "transformer_layer_config": {
                **fixed,
                **sizes_config(s.sizes),
                **sizes,
                "rope_theta": s.theta,
                **window,
            },
            "speculators_config": speculators_config(kind, s.block - s.skipped, ""),
        }

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor, outer: TargetWeights) -> Tensor:
        """Logits [A, block, Vd] of each row, given the text before it.

        taps [T, len(taps) * hidden], tokens [T], anchors [A]: positions in the text.
        """
        s = self.shape
        context = self.hidden_norm(self.fc(taps))
        ids = torch.full((len(anchors), s.block), s.mask, device=anchors.device)
        ids[:, 0] = tokens[anchors]
        x = outer.embedding[ids.flatten()]
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            x = layer.read(x, context, anchors)
        logits = self.lm_head(self.norm(x)) if s.ids else outer.logits(self.norm(x))
        logits = logits.view(*ids.shape, -1)
        if not s.markov:
            return logits
        before = anchors[:, None] + torch.arange(s.block, device=anchors.device) - s.skipped
        first, second = self.markov_head["markov_w1"], self.markov_head["markov_w2"]
        added: Tensor = second(first(tokens[before.clamp(0, len(tokens) - 1)]))
        return logits + added

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the text over the rows that predict, weighted by exp(-depth / DECAY)."""
        s, tokens = self.shape, sample.tokens
        mask = torch.ones_like(tokens, dtype=torch.bool) if sample.mask is None else sample.mask
        places = mask[:-1].nonzero().flatten()
        anchors = places[torch.randperm(len(places), device=places.device)[:ANCHORS]]
        logits = self(torch.cat([sample.states[tap] for tap in s.taps], dim=-1), tokens, anchors, outer)
        depth = torch.arange(s.block, device=tokens.device) - s.skipped
        at = anchors[:, None] + 1 + depth
        following = tokens[at.clamp_max(len(tokens) - 1)]
        counted = (at < len(tokens)) & (depth >= 0) & mask[(at - 1).clamp_max(len(tokens) - 1)]
        if s.ids:
            t2d: Any = self.t2d
            counted = counted & t2d[following]
            known = t2d.nonzero().flatten()
            following = torch.searchsorted(known, following).clamp_max(len(known) - 1)
        weight = counted * torch.exp(-depth / DECAY)
        rows = logits.flatten(0, 1).float()
        losses = F.cross_entropy(rows, following.flatten(), reduction="none")
        return (losses.view_as(weight) * weight).sum() / weight.sum().clamp_min(1e-6)
