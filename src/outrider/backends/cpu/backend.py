"""The C kernels, called through ctypes (build.py compiles them for this processor on first use).

torch is imported first on purpose: the library then shares torch's OpenMP threads instead of bringing a second pool.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from outrider.backends.base import AttentionShape, Chain, DecoderLayer, ModelShape, ScoreModifier
from outrider.backends.cpu import build, chain, lora, picking, structs, threads
from outrider.backends.cpu import candidates as tree
from outrider.backends.cpu.lora import Adapter
from outrider.backends.cpu.packing import KINDS, Packed, pack
from outrider.backends.cpu.picking import Picking
from outrider.cache.pool import Pool
from outrider.core.limits import check_attention
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, StopRule

KEPT = 1 << 24  # bytes of logits


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels. None, with one warning, if there are none and they cannot be built."""
    made = build.load(build.recipe(os.environ), os.environ)
    return None if made is None else declare(made)


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """The signatures of all functions."""
    p, n, i, f = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
    w = ctypes.POINTER(structs.Weight)
    lib.linear.argtypes = [w, p, n, n, p, n, i]
    lib.embed.argtypes = [w, p, n, n, p]
    lib.rms_norm.argtypes = [p, p, n, n, f, p]
    lib.silu_mul.argtypes = [p, n, n, p]
    lib.rope_store.argtypes = [p, n, n, n, n, n, p, p, f, p, n, p, p, p, p, i, n, p]
    lib.attend.argtypes = [
        p,
        p,
        p,
        i,
        n,
        n,
        n,
        n,
        n,
        n,
        p,
        p,
        p,
        p,
        p,
        n,
        f,
        n,
        n,
        n,
        ctypes.POINTER(structs.ScoreModifier),
        p,
    ]
    lib.stack.argtypes = [p, p, p, p, n, p, p, n, p]
    lib.read_model.argtypes = [p, p, p, p, p, p, n, p, p, n, p, p, n, p]
    lib.pair.argtypes = [w, p, n, n, p, n, p, p, f, p]
    lib.chain.argtypes = [p, p, p, p, p, p, n, p, n, n, n, p, p, p, p]
    picking.declare(lib)
    tree.declare(lib)
    for name in (
        "linear",
        "embed",
        "rms_norm",
        "silu_mul",
        "rope_store",
        "attend",
        "stack",
        "read_model",
        "chain",
        "pair",
    ):
        getattr(lib, name).restype = None
    return lib


@dataclass
class Stack:
    """Blocks as the C structs, and the tensors that these point into."""

    layers: ctypes.Array[structs.Layer]
    shape: structs.Shape
    alive: object

    def __post_init__(self) -> None:
        self.at = ctypes.addressof(self.shape), ctypes.addressof(self.layers)


@dataclass
class Ends:
    c: structs.Ends
    alive: object

    def __post_init__(self) -> None:
        self.at, self.outputs = ctypes.addressof(self.c), self.c.outputs


class CpuBackend(Picking):
    """Every row is computed by the same operations in the same order, whatever stands beside it (see kernels.c)."""

    exact = True
    device, activations = torch.device("cpu"), torch.float32

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = f"C ({str(dtype).removeprefix('torch.')} weights, float32 sums)"
        super().__init__(lib)
        self._room: dict[
            tuple[int, int], tuple[Tensor, int]
        ] = {}  # by shape: the logits of the last call, and their address

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Packed:
        return pack(weight, bias, self.dtype)

    def linear(self, x: Tensor, weight: Packed, add: Tensor | None = None) -> Tensor:
        n = x.shape[0]
        y = torch.empty(n, weight.outputs) if add is None else add
        self.lib.linear(
            weight.c, x.data_ptr(), n, weight.inputs, y.data_ptr(), weight.outputs, add is not None
        )
        return y

    def embed(self, weight: Packed, step_input: StepInput) -> Tensor:
        y = torch.empty(step_input.length, weight.inputs)
        self.lib.embed(weight.c, step_input.ids_at, step_input.length, weight.inputs, y.data_ptr())
        return y

    def pair(
        self,
        weight: Packed,
        step_input: StepInput,
        g: Tensor,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
    ) -> Tensor:
        h, n = g.shape[1], step_input.length
        y = torch.empty(n, weight.inputs + h)
        norms = (None if norm is None else norm.data_ptr() for norm in (norm_token, norm_state))
        self.lib.pair(
            weight.c, step_input.ids_at, n, weight.inputs, g.data_ptr(), h, *norms, eps, y.data_ptr()
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        self.lib.rms_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, y.data_ptr())
        return y

    def rope_store(
        self, qkv: Tensor, spec: AttentionShape, turn: Tensor, step_input: StepInput, pool: Pool, layer: int
    ) -> Tensor:
        n, wide = qkv.shape[0], pool.width
        q = torch.empty(n, spec.heads, wide)
        keys = pool.address + 2 * layer * pool.plane
        self.lib.rope_store(
            qkv.data_ptr(), n, spec.heads, spec.kv_heads, spec.head_dim, wide,
            None if spec.q_norm is None else spec.q_norm.data_ptr(), None if spec.k_norm is None else spec.k_norm.data_ptr(),
            spec.eps, turn.data_ptr(), turn.shape[1], step_input.positions_at, step_input.slots_at, keys, keys + pool.plane,
            KINDS[pool.dtype], pool.head, q.data_ptr(),
        )  # fmt: skip
        return q

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
        n, heads, wide = q.shape
        keys = pool.address + 2 * layer * pool.plane
        out = torch.empty(n, heads * spec.head_dim)
        modified = (
            None
            if modifier is None
            else structs.ScoreModifier(
                *(None if v is None else v.data_ptr() for v in (modifier.slopes, modifier.sinks)),
                modifier.cap,
            )
        )
        self.lib.attend(
            q.data_ptr(), keys, keys + pool.plane, KINDS[pool.dtype], pool.head, n, heads, spec.kv_heads, spec.head_dim, wide,
            step_input.tables_at, step_input.positions_at, step_input.seen_at, step_input.paths_at, step_input.depths_at, step_input.width, scale, window, step_input.pinned,
            step_input.longest, modified, out.data_ptr(),
        )  # fmt: skip
        return out

    def prepare(self, spec: ModelShape, layers: Sequence[DecoderLayer], turn: Tensor) -> Stack:
        """The layers as the C structs; they point into tensors that `layers` keeps alive."""
        for layer in layers:
            check_attention(
                "the model", spec.heads, spec.kv_heads, spec.head_dim, turn.shape[1], layer.window
            )
        made = (structs.Layer * len(layers))()
        for to, layer in zip(made, layers):
            for name in structs.LINEARS:
                setattr(to, name, getattr(layer, name).c)
            for name in structs.VECTORS:
                vector = getattr(layer, name)
                setattr(to, name, None if vector is None else vector.data_ptr())
            to.window = layer.window
        shape = structs.Shape(
            len(layers), spec.hidden, spec.inner, spec.heads, spec.kv_heads, spec.head_dim, Pool.wide(spec.head_dim), turn.shape[1], 0,
            spec.eps, spec.head_dim**-0.5, turn.data_ptr(),
        )  # fmt: skip
        return Stack(made, shape, (layers, turn))

    def without(self, stack: Stack, skips: Sequence[int]) -> Stack:
        layers = (structs.Layer * len(skips)).from_buffer_copy(stack.layers)
        for layer, skip in zip(layers, skips):
            layer.skip = skip
        return Stack(layers, stack.shape, stack.alive)

    def adapter(self, spec: LayerSizes, layers: Adapted) -> Adapter:
        return lora.pack(spec, layers)

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
        threads.adopt()
        stack.shape.kv, adapted = KINDS[pool.dtype], lora.rows(runs)
        rows = structs.rows(step_input, adapted)
        at, wide = (None, 0) if u is None else (u.data_ptr(), u.shape[1])
        first = pool.address + 2 * layer * pool.plane
        self.lib.stack(*stack.at, rows.buffer_info()[0], first, pool.plane, x.data_ptr(), at, wide, None)
        return x

    def ends(self, embedding: Packed, norm: Tensor, head: Packed) -> Ends:
        return Ends(structs.Ends(embedding.c, head.c, norm.data_ptr(), head.outputs), (embedding, norm, head))

    def read(
        self, stack: Stack, ends: Ends, step_input: StepInput, pool: Pool, wanted: Sequence[int], kept: dict[int, Tensor],
        trees: picking.TreeQueries, runs: Runs = (),
    ) -> Tensor:  # fmt: skip
        threads.adopt()
        stack.shape.kv, adapted = KINDS[pool.dtype], lora.rows(runs)
        rows, places = structs.rows(step_input, adapted), array("q", wanted)
        taps = _taps(stack.shape, step_input.length, kept) if kept else None
        logits, at = self._room.get((len(wanted), ends.outputs)) or self._made(len(wanted), ends.outputs)
        self.lib.read_model(
            *stack.at, ends.at, rows.buffer_info()[0], step_input.ids_at, pool.address, pool.plane, taps, places.buffer_info()[0], len(wanted),
            at, trees.asks, len(trees.sizes), trees.held.buffer_info()[0],
        )  # fmt: skip
        return logits

    def _made(self, rows: int, outputs: int) -> tuple[Tensor, int]:
        """Room for logits, and where it lies.  One of a moderate size is kept: even to ask for memory takes 40 µs behind a forward."""
        logits = torch.empty(rows, outputs)
        made = logits, logits.data_ptr()
        self._room = {(rows, outputs): made} if logits.nbytes <= KEPT else {}
        return made

    def chain(
        self, stack: Stack, ends: Ends, step_input: StepInput, pool: Pool, chains: Sequence[Chain], vocabulary: int, stop_rule: StopRule | None = None,
        states: Tensor | None = None,
    ) -> Chained:  # fmt: skip
        threads.adopt()
        stack.shape.kv, rows = KINDS[pool.dtype], structs.rows(step_input)
        room = chain.Room(chains, stop_rule)
        self.lib.chain(
            *stack.at, ends.at, rows.buffer_info()[0], step_input.ids_at, pool.address, pool.plane, room.chains, len(chains), room.most,
            vocabulary, room.rule_at, room.out_at, room.traits_at, None if states is None else states.data_ptr(),
        )  # fmt: skip
        return room.read()

    def candidates(self, k: int, wide: int, levels: int) -> tree.Compiled:
        return tree.Compiled(self.lib, k, wide, levels)


def _taps(shape: structs.Shape, rows: int, kept: dict[int, Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Room for the states that are to be kept, and where the kernels find it: of each layer, then of the last norm, which is -1."""
    taps: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * (shape.layers + 2))()
    for layer in kept:
        kept[layer] = torch.empty(rows, shape.hidden)
        taps[layer] = kept[layer].data_ptr()
    return taps
