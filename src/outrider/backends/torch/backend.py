"""The same operations in torch: any device, and the CPU without a compiler.

On a CPU the linears are oneDNN's packed ones, never called with one row: from two rows on their results do not depend on
the number of rows (docs/log.md has the trials).  Attention sums in float64 there, float32 elsewhere.  A quantised weight
stays in its bits and is widened every time it is used: small, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends import candidates as tree
from outrider.backends.base import (
    Answer,
    AttentionShape,
    Backend,
    DecoderLayer,
    ModelShape,
    ScoreModifier,
)
from outrider.backends.torch import sampling
from outrider.cache.pool import Pool
from outrider.core import lora
from outrider.core import stop_rule as stop_rules
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.params import DistributionParams
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import NodeFeatures, StopRule


@dataclass
class Plain:
    data: Tensor | QuantizedWeight  # [O,K]
    packed: Tensor | None  # oneDNN's own layout
    bias: Tensor | None
    inputs: int
    outputs: int


@dataclass
class Stack:
    layers: Sequence[DecoderLayer]
    turn: Tensor
    skips: Sequence[int]  # of every layer: 1 the attention, 2 the MLP


Adapter = list[
    dict[str, list[tuple[slice, Tensor, Tensor]]]
]  # of every layer and fused linear: outputs, a^T, scale * b^T


class Unanswered:
    """Questions that nobody answers."""

    def add(self, *_: Any) -> None: ...
    def read(self) -> dict[int, Answer | None]:
        return {}


class TorchBackend:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.activations = dtype
        onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.onednn = onednn and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.exact = self.onednn
        self.wide = torch.float64 if device.type == "cpu" else torch.float32
        self.name = f"torch on {device} ({str(dtype).removeprefix('torch.')})"

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Plain:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        if isinstance(weight, QuantizedWeight):
            return Plain(
                weight.mapped(lambda part: part.to(self.device)),
                None,
                bias,
                weight.values.shape[1],
                weight.values.shape[0],
            )
        data = weight.to(self.device, self.dtype).contiguous()
        return Plain(data, self._packed(data), bias, weight.shape[1], weight.shape[0])

    def _packed(self, data: Tensor) -> Tensor | None:
        return torch.ops.mkldnn._reorder_linear_weight(data) if self.onednn else None

    def linear(self, x: Tensor, weight: Plain, add: Tensor | None = None) -> Tensor:
        data, packed = weight.data, weight.packed
        if isinstance(data, QuantizedWeight):
            data = data.dense().to(self.dtype)
            packed = self._packed(data)
        if packed is None:
            y = F.linear(x, data, weight.bias)
        else:
            alone = x.shape[0] == 1
            rows = F.pad(x, (0, 0, 0, 1)) if alone else x  # the two-row rule
            y = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), packed, weight.bias, "none", [], "")
            y = y[:1] if alone else y
        return y if add is None else add.add_(y)

    def embed(self, weight: Plain, step_input: StepInput) -> Tensor:
        ids = step_input.ids.to(self.device)
        if isinstance(weight.data, QuantizedWeight):
            return weight.data.mapped(lambda part: part[ids]).dense().to(self.dtype)
        return F.embedding(ids, weight.data)

    def pair(
        self,
        weight: Plain,
        step_input: StepInput,
        g: Tensor,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
    ) -> Tensor:
        return beside(self, self.embed(weight, step_input).to(g.dtype), g, norm_token, norm_state, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_store(
        self, qkv: Tensor, spec: AttentionShape, turn: Tensor, step_input: StepInput, pool: Pool, layer: int
    ) -> Tensor:
        n, d = qkv.shape[0], spec.head_dim
        q, k, v = torch.split(qkv.view(n, -1, d), [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = self.rms_norm(q, spec.q_norm, spec.eps), self.rms_norm(k, spec.k_norm, spec.eps)
        angles = turn.to(self.device)[step_input.positions.to(self.device)][:, None]
        cos, sin = angles.chunk(2, dim=-1)
        slots = step_input.slots.to(self.device)
        pool.write(layer, 0, slots, _rotate(k, cos, sin))
        pool.write(layer, 1, slots, v)
        return _rotate(q, cos, sin).to(qkv.dtype)

    def attend(
        self,
        q: Tensor,
        spec: AttentionShape,
        step_input: StepInput,
        pool: Pool,
        layer: int,
        scale: float,
        window: int,
        modifier: ScoreModifier | None = None,
    ) -> Tensor:
        n, group = q.shape[0], spec.heads // spec.kv_heads
        out = torch.empty(n, spec.heads, spec.head_dim, dtype=q.dtype, device=q.device)
        for table, first, count in step_input.segments:
            slots, order = step_input.keys(first, count, table)
            slots, order = slots.to(self.device), order.to(self.device)
            keys, values = pool.read(layer, slots, self.wide).transpose(1, 2)  # [k,m,D]
            rows = q[first : first + count].to(self.wide).view(count, spec.kv_heads, group, spec.head_dim)
            hidden = order < 0
            positions = step_input.positions[first : first + count, None].to(self.device)
            ahead = order - positions  # 0 at the row itself, -1 before it
            if window > 0:
                hidden |= ahead <= -window
            elif window:
                hidden |= order < positions // -window * -window
            scores = torch.einsum("nkgd,kmd->nkgm", rows, keys) * scale
            if modifier is not None:
                scores = _modified(scores, modifier, ahead)
            scores[..., : len(slots)].masked_fill_(hidden[:, None, None], float("-inf"))
            weights = scores.softmax(-1)[..., : len(slots)]
            out[first : first + count] = (
                torch.einsum("nkgm,kmd->nkgd", weights, values).flatten(1, 2).to(q.dtype)
            )
        return out.flatten(1)

    def prepare(self, spec: ModelShape, layers: Sequence[DecoderLayer], turn: Tensor) -> Stack:
        return Stack(layers, turn, [0] * len(layers))

    def without(self, stack: Stack, skips: Sequence[int]) -> Stack:
        return Stack(stack.layers, stack.turn, skips)

    def adapter(self, spec: LayerSizes, layers: Adapted) -> Adapter:
        def turned(matrix: Tensor) -> Tensor:
            return matrix.to(self.device, self.wide).T

        spans = {
            name: slice(place.start, place.start + place.outputs) for name, place in lora.places(spec).items()
        }
        return [
            {
                fused: [
                    (spans[name], turned(low.a), turned(low.b) * low.scale)
                    for name in names
                    if (low := layer.get(name))
                ]
                for fused, names in lora.FUSED.items()
            }
            for layer in layers
        ]

    def run(
        self,
        stack: Stack,
        x: Tensor,
        step_input: StepInput,
        pool: Pool,
        runs: Runs = (),
        u: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        for i, (block, skip) in enumerate(zip(stack.layers, stack.skips)):

            def linear(
                x: Tensor, name: str, add: Tensor | None = None, i: int = i, block: Any = block
            ) -> Tensor:
                y = self.linear(x, getattr(block, name), add)
                for first, count, adapter in runs:
                    rows = x[first : first + count].to(self.wide)
                    for span, a, b in adapter[i][name]:
                        here = y[first : first + count, span]
                        here.copy_(here.to(self.wide) + rows @ a @ b)
                return y

            if not skip & 1:
                qkv = linear(self.rms_norm(x, block.norm_in, block.eps) if u is None or i else u, "qkv")
                q = self.rope_store(qkv, block, stack.turn, step_input, pool, layer + i)
                x = linear(
                    self.attend(q, block, step_input, pool, layer + i, block.head_dim**-0.5, block.window),
                    "o",
                    add=x,
                )
            if not skip & 2:
                x = linear(
                    self.silu_mul(linear(self.rms_norm(x, block.norm_post, block.eps), "gate_up")),
                    "down",
                    add=x,
                )
        return x

    def ends(self, *_: Any) -> None: ...
    def read(self, *_: Any) -> None:
        """The parts one by one."""

    def chain(self, *_: Any) -> None:
        """Nobody is waiting: the drafter goes level by level."""

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, level: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        features = stop_rules.measure(logits if logits.dim() == 1 else logits[row], temperature, token)
        return stop_rules.should_stop(stop_rule, features, level), features

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        return sampling.pick(logits if logits.dim() == 1 else logits[row], distribution, key, k)

    def trees(self) -> Unanswered:
        return Unanswered()

    def follow(self, logits: Tensor, trees: Unanswered) -> None:
        """The verifier goes pick by pick."""

    def picks(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        out, prob = torch.full((len(keys), k), -1, dtype=torch.int32), torch.zeros(len(keys), k)
        for r, key in enumerate(keys):
            entries, shares = sampling.pick(logits[r], distribution, key, k, ids)
            out[r, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
            if probs:
                prob[r, : len(entries)] = torch.tensor(shares)
        return out, prob

    def candidates(self, k: int, wide: int, levels: int) -> tree.Plain:
        return tree.Plain(self.picks, k, wide)


def beside(
    backend: Backend, e: Tensor, g: Tensor, norm_token: Tensor | None, norm_state: Tensor | None, eps: float
) -> Tensor:
    """`Backend.pair` of embeddings e [n,h]."""
    return torch.cat(
        [
            x if norm is None else backend.rms_norm(x, norm, eps)
            for x, norm in ((e, norm_token), (g, norm_state))
        ],
        dim=-1,
    )


def _modified(scores: Tensor, modifier: ScoreModifier, ahead: Tensor) -> Tensor:
    """scores [n,k,g,m] as `modifier` says; a sink is one column more."""
    by_head = (1, *scores.shape[1:3], 1)
    if modifier.cap:
        scores = modifier.cap * torch.tanh(scores / modifier.cap)
    if modifier.slopes is not None:
        scores = scores + modifier.slopes.to(scores).view(by_head) * ahead[:, None, None]
    if modifier.sinks is not None:
        scores = torch.cat(
            [scores, modifier.sinks.to(scores).view(by_head).expand(len(scores), -1, -1, 1)], dim=-1
        )
    return scores


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 2·cos.shape[-1] dimensions turn in pairs (i, i + half), as transformers lays them out; the rest stays."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.float()], dim=-1)
