"""Weights of a decoder layer, as the backend that runs it has packed them."""

from __future__ import annotations

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
class DecoderLayer:
    """Weights of one decoder block (`AttentionShape`), packed by the backend that runs it.

    norm_in: None if the caller computes the input of `qkv`
    norm_post, gate_up, down: None in a block without an MLP, which runs with that skipped
    experts: in place of `gate_up` and `down`, which are None then
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
