"""The network of a block-parallel head, for training and as an example: plain torch, in float32.

For every anchor a of a text, what its block sees, and what its rows are to say (block = 4):

    position       0    1    …   a-1 │  a     a+1    a+2    a+3
    taps           g_0  g_1  …  g_a-1│  ·      ·      ·      ·       g_t: what the target computed at t, which is certain before a is
    the block                        │ x_a    mask   mask   mask     the pending token, and three that nobody knows
    is to say                        │  –    x_a+1  x_a+2  x_a+3     from_anchor: x_a+1 … x_a+4, each row the token after it

Every row of the block sees g_0 … g_a-1 and, in layers that are not causal, the whole block; no row sees another block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft.dflash.layouts import ARCHITECTURE, DEFAULT_THETA, SLIDING, SPARK, TYPE
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes, rotary_table
from outrider.heads.sample import Sample, TargetWeights

ANCHORS = 64  # of a text, at most, in one loss
DECAY = 4.0  # the tokens of a block count less the further they are from the anchor: a wrong one makes all behind it worthless


@dataclass(frozen=True)
class Shape:
    """taps: as `Needs.states` numbers them.  ids: the target's tokens that the head knows, ascending, where they are not all.
    sliding: which layers have the window.  markov: rank of DSpark's table, 0 without one."""

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
        """Rows of a block that guess nothing."""
        return 0 if self.from_anchor else 1

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, self.eps)


class Attention(nn.Module):
    def __init__(self, s: Shape, window: int, causal: bool) -> None:
        super().__init__()
        self.shape, self.window, self.causal = s, window, causal
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(s.hidden, size, bias=False) for size in (q, kv, kv)
        )
        self.o_proj = nn.Linear(q, s.hidden, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(s.head_dim, eps=s.eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, turn: Tensor) -> Tensor:
        """x [A, block, hidden], context [T, hidden], anchors [A]: the position of each block's first row."""
        s, (count, block, _) = self.shape, x.shape
        at, before = anchors[:, None] + torch.arange(block), torch.arange(len(context))
        q = turned(self.q_norm(self.q_proj(x).unflatten(-1, (-1, s.head_dim))), turn[at])
        own, theirs = (self.k_norm(self.k_proj(u).unflatten(-1, (-1, s.head_dim))) for u in (x, context))
        group = s.heads // s.kv_heads
        own, theirs = (
            k.repeat_interleave(group, -2) for k in (turned(own, turn[at]), turned(theirs, turn[before]))
        )
        v_own, v_theirs = (
            self.v_proj(u).unflatten(-1, (-1, s.head_dim)).repeat_interleave(group, -2) for u in (x, context)
        )
        hidden, inside = (before >= anchors[:, None, None]).expand(count, block, -1), torch.arange(block)
        ahead = inside > inside[:, None] if self.causal else torch.zeros(block, block, dtype=torch.bool)
        if self.window:
            hidden, ahead = (
                hidden | (before <= at[..., None] - self.window),
                ahead | (inside <= inside[:, None] - self.window),
            )
        masks = torch.cat([hidden, ahead.expand(count, -1, -1)], dim=-1)[:, None]
        scores = torch.cat(
            [torch.einsum("abhd,thd->ahbt", q, theirs), torch.einsum("abhd,achd->ahbc", q, own)], dim=-1
        )
        weights = (scores * s.head_dim**-0.5).masked_fill(masks, float("-inf")).softmax(-1)
        out = torch.einsum("ahbt,thd->abhd", weights[..., : len(context)], v_theirs)
        out = out + torch.einsum("ahbc,achd->abhd", weights[..., len(context) :], v_own)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(s.hidden, s.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, s: Shape, window: int, causal: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(s, window, causal), Mlp(s)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(s.hidden, eps=s.eps) for _ in range(2)
        )

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, turn: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, turn)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    @staticmethod
    def like(target: Target, **given: Any) -> Network:
        """A fresh one for `target`, with some of its shape given: three taps, spread as the published ones are.

        What a row looks at is what it adds, to begin with: a mask needs the anchor as it is, and learns that slowly from noise.
        """
        spec = target.decoder.spec
        first, last = min(2, spec.layers), max(1, spec.layers - 2)
        width = 64 if spec.hidden >= 256 else 16
        heads = max(1, spec.hidden // width)
        sizes: dict[str, Any] = {
            "hidden": spec.hidden, "inner": 2 * spec.hidden, "layers": 2, "heads": heads, "kv_heads": heads, "head_dim": width,
            "vocabulary": target.vocabulary, "mask": target.vocabulary - 1, "block": 8,
            "taps": tuple(sorted({first, (first + last) // 2, last})),
        }  # fmt: skip
        network = Network(Shape(**{**sizes, **given}))
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
        self.hidden_norm, self.norm = (nn.RMSNorm(s.hidden, eps=s.eps) for _ in range(2))
        sliding = [i in s.sliding for i in range(s.layers)]
        self.layers = nn.ModuleList(Layer(s, s.window * one, one and not s.non_causal) for one in sliding)
        if s.ids:
            ids = torch.tensor(s.ids)
            self.lm_head = nn.Linear(s.hidden, len(ids), bias=False)
            self.register_buffer("d2t", ids - torch.arange(len(ids)))
            self.register_buffer("t2d", torch.zeros(s.vocabulary, dtype=torch.bool).index_fill_(0, ids, True))

        if s.markov:
            second = nn.Linear(s.markov, len(s.ids) or s.vocabulary, bias=False)
            nn.init.zeros_(second.weight)
            self.markov_head = nn.ModuleDict(
                {"markov_w1": nn.Embedding(s.vocabulary, s.markov), "markov_w2": second}
            )

    def config(self) -> dict[str, Any]:
        s = self.shape
        flags = {
            "attention_bias": False,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "tie_word_embeddings": False,
        }
        sizes = {
            "hidden_size": s.hidden, "intermediate_size": s.inner, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "vocab_size": s.vocabulary, "rms_norm_eps": s.eps,
            "rope_theta": s.theta, "sliding_window": s.window or None,
            "layer_types": [SLIDING if i in s.sliding else "full_attention" for i in range(s.layers)],
        }  # fmt: skip
        method = {
            "proposal_type": "greedy",
            "speculative_tokens": s.block - s.skipped,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        kind = SPARK if s.markov else TYPE
        table = (
            {"markov_rank": s.markov, "markov_head_type": "vanilla", "enable_confidence_head": False}
            if s.markov
            else {}
        )
        return {
            **table, "architectures": ["DSparkDraftModel" if s.markov else ARCHITECTURE], "speculators_model_type": kind,
            "block_size": s.block, "mask_token_id": s.mask,
            "aux_hidden_state_layer_ids": list(s.taps), "sliding_window_non_causal": s.non_causal, "sample_from_anchor": s.from_anchor,
            "draft_vocab_size": len(s.ids) or s.vocabulary, "transformer_layer_config": {**flags, **sizes},
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
                "verifier": {"name_or_path": "", "architectures": []},
            },
        }  # fmt: skip

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor, outer: TargetWeights) -> Tensor:
        """taps [T, len(taps) * hidden], tokens [T], anchors [A]: positions in the text -> logits [A, block, Vd] behind each row, given
        that the text is what stands before it."""
        s = self.shape
        context = self.hidden_norm(self.fc(taps))
        ids = torch.full((len(anchors), s.block), s.mask)
        ids[:, 0] = tokens[anchors]
        turn = rotary_table(self.config()["transformer_layer_config"], s.sizes, len(tokens) + s.block)
        x = outer.embedding[ids]
        for layer in self.layers:
            x = layer(x, context, anchors, turn)
        logits = F.linear(self.norm(x), self.lm_head.weight if s.ids else outer.lm_head)
        if not s.markov:
            return logits
        before = anchors[:, None] + torch.arange(s.block) - s.skipped
        first, second = self.markov_head["markov_w1"], self.markov_head["markov_w2"]
        return logits + second(first(tokens[before.clamp(0, len(tokens) - 1)]))  # type: ignore[no-any-return]

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy of the text's own tokens, over the rows that guess, weighted by exp(-level / DECAY)."""
        s, tokens = self.shape, sample.tokens
        anchors = torch.randperm(len(tokens) - 1)[:ANCHORS]
        logits = self(torch.cat([sample.states[tap] for tap in s.taps], dim=-1), tokens, anchors, outer)
        at = anchors[:, None] + torch.arange(s.block) + 1 - s.skipped
        said = tokens[at.clamp_max(len(tokens) - 1)]
        counted = (at < len(tokens)) & (torch.arange(s.block) >= s.skipped)
        if s.ids:
            counted = counted & self.t2d[said]  # type: ignore[index]
            said = torch.searchsorted(torch.tensor(s.ids), said).clamp_max(len(s.ids) - 1)
        level = torch.arange(s.block) - s.skipped
        weight = counted * torch.exp(-level / DECAY)
        each = F.cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none").view_as(weight)
        return (each * weight).sum() / weight.sum().clamp_min(1e-6)


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., n, heads, head_dim] by turn [..., n, head_dim]: cos, then sin, of pairs (i, i + half)."""
    cos, sin = turn[..., None, :].chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
