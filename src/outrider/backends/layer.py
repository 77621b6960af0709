"""Weights of a decoder layer, as the backend that runs it has packed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class LayerExperts:
    """MLPs of which every row has the `chosen` best by the router's softmax, weighted by it.

    normalized: whether the weights of a row's experts are divided by their sum
    gate_limit: not 0: gate and up are clamped, and gate * sigmoid(gate_slope * gate) * (up + 1) is taken
    """

    router: Any  # [experts, hidden]
    gate_up: Any  # of every expert, [2 inner, hidden]; a list, or as `Backend.pack_experts` has it
    down: Any  # [hidden, inner]
    chosen: int
    normalized: bool
    gate_slope: float = 0.0
    gate_limit: float = 0.0


@dataclass
class LayerDelta:
    """A gated delta rule (`Recurrence`) in place of attention, between two linears.

        [q k v | z] = qkvz(u);   [b | a] = gates(u);   q, k, v = silu(convolution(q k v))
        beta = sigmoid(b);       g = rates * softplus(a + bias)
        x += o(norm(delta(q, k, v, g, beta)) * silu(z)), a norm of each head

    channels: C, of the convolution: the outputs of q, k and v.  Its vectors are float32 and contiguous.
    """

    qkvz: Any  # [C + heads dim, hidden]
    gates: Any  # [2 heads, hidden]
    taps: Tensor  # [K, C], the oldest first
    bias: Tensor  # [heads]
    rates: Tensor  # [heads]
    norm: Tensor  # [heads dim], the same for each head
    key_heads: int
    heads: int
    key_dim: int
    dim: int
    eps: float

    @property
    def channels(self) -> int:
        return self.taps.shape[1]


@dataclass
class DecoderLayer:
    """Weights of one decoder block (`AttentionShape`), packed by the backend that runs it.

    norm_in: None if the caller computes the input of `qkv`
    norm_post, gate_up, down: None in a block without an MLP, which runs with that skipped
    experts: in place of `gate_up` and `down`, which are None then, or those of a shared expert
    shared_gate: its sigmoid is the share of a shared expert, which every row has beside its own
    delta: in place of the attention; `qkv` is None then
    query_gate: its sigmoid is multiplied with the attention's output, if there is one
    norm_attended, norm_mlp: norms of what attention and MLP add to the residual stream, if any
    rotations: of this layer alone, as in `rope_store`; None for those of the stack
    window, scale, cap, sinks: as in `Scores` and `ScoreModifier`.  gelu: GELU (tanh) in place of SiLU
    """

    norm_in: Any  # Tensor
    qkv: Any  # [(heads + 2 kv_heads) head_dim, hidden]
    o: Any
    norm_post: Any  # Tensor
    gate_up: Any  # [2 inner, hidden]
    down: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int
    scale: float
    experts: LayerExperts | None = None
    norm_attended: Tensor | None = None
    norm_mlp: Tensor | None = None
    rotations: Tensor | None = None
    cap: float = 0.0
    gelu: bool = False
    sinks: Tensor | None = None
    delta: LayerDelta | None = None
    query_gate: Any = None  # [heads head_dim, hidden]
    shared_gate: Any = None  # [1, hidden]


def places(layers: Sequence[DecoderLayer]) -> list[int]:
    """Number of each layer among those with attention, whose K/V it is, or among those with a delta rule."""
    counts, found = [0, 0], []
    for layer in layers:
        kind = int(layer.delta is not None)
        found.append(counts[kind])
        counts[kind] += 1
    return found
