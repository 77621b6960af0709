"""`Recurrence` by recurrent.c, short_conv.c and gates.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from outrider.backends.cpu import threads
from outrider.backends.cpu.bindings import STRUCTS
from outrider.backends.cpu.structs import address
from outrider.backends.recurrence import Activation, Path
from outrider.core.limits import MAX_STATE_DIM


class Forest:
    """`Forest` of recurrent.h.  The path owns it, as it points into the path's arrays."""

    def __init__(self, path: Path) -> None:
        self.fresh = array("i", [int(slot in path.fresh) for slot in path.slot])
        arrays = path.parent, path.slot, path.save, self.fresh, path.copy
        self.words = array("q", (len(path), *[values.buffer_info()[0] for values in arrays]))
        self.c = STRUCTS["Forest"].from_buffer(self.words)


class Rows:
    """`RowInputs` of recurrent.h of x [N, heads, dim], or [N, dim], and the tensor that it points into.

    That is x, or a copy if x is not float32 or the elements of a row are not contiguous.
    """

    def __init__(self, x: Tensor) -> None:
        inner = x.dim() < 3 or x.shape[1] == 1 or x.stride(1) == x.shape[2]
        is_dense = inner and (x.shape[-1] == 1 or x.stride(-1) == 1)
        self.tensor = x = x if x.dtype == torch.float32 and is_dense else x.float().contiguous()
        heads = x.shape[1] if x.dim() == 3 else 1
        self.c = STRUCTS["RowInputs"](x.data_ptr(), x.stride(0), heads, x.shape[-1])


class CpuRecurrence:
    """`Recurrence` in C."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Literal["silu"] | None,
        path: Path,
        tails: Tensor,
    ) -> Tensor:
        (taps, channels), rows = weight.shape, Rows(x)
        _check_shapes({"x": (x, (len(path), channels))})
        memory = {"weight": (weight, weight.shape), "tails": (tails, (len(tails), taps - 1, channels))}
        _check_memory(memory if bias is None else {**memory, "bias": (bias, (channels,))})
        _check_slots(path, tails)
        out, given = torch.empty(len(path), channels), (weight.data_ptr(), address(bias))
        threads.adopt(self.lib)
        self.lib.short_conv(
            forest_of(path).c, rows.c, *given, taps, activation == "silu", tails.data_ptr(), out.data_ptr()
        )
        return out.to(x.dtype)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        (n, heads, height), (key_heads, dim) = v.shape, k.shape[1:]
        by_dim = (n, heads, dim)
        keys = {
            "q": (q, k.shape),
            "k": (k, (len(path), key_heads, dim)),
            "v": (v, (len(path), heads, height)),
        }
        gates = {"g": (g, by_dim if g.dim() == 3 else (n, heads)), "beta": (beta, (n, heads))}
        _check_shapes({**keys, **gates})
        _check_memory({"states": (states, (len(states), heads, height, dim))})
        inputs = k, q, v, g if g.dim() == 3 else g[..., None], beta[..., None]
        return self._scan(self.lib.gated_delta, inputs, None, path, states).to(q.dtype)

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        (n, heads, height), (groups, dim) = x.shape, b.shape[1:]
        rates = (heads, dim) if a.dim() == 2 else (heads,)
        own = {"x": (x, (len(path), heads, height)), "dt": (dt, (n, heads)), "c": (c, (n, groups, dim))}
        _check_shapes({**own, "b": (b, (n, groups, dim))})
        shape = len(states), heads, height, dim
        _check_memory({"a": (a, rates), "d": (d, (heads,)), "states": (states, shape)})
        inputs = b, c, x, a.view(1, heads, -1).expand(n, heads, -1), dt[..., None]
        return self._scan(self.lib.selective_scan, inputs, d, path, states).to(x.dtype)

    def _scan(
        self,
        function: Callable[..., None],
        inputs: tuple[Tensor, ...],
        skips: Tensor | None,
        path: Path,
        states: Tensor,
    ) -> Tensor:
        """keys, reads, values, decays, rates: as `Recurrent` of recurrent.h."""
        _check_slots(path, states)
        (_, heads, height, dim), key_heads = states.shape, inputs[0].shape[1]
        if not 1 <= dim <= MAX_STATE_DIM or height < 1 or key_heads < 1 or heads % key_heads:
            raise ValueError(
                f"{heads} heads of {height} dimensions, {key_heads} of keys and states of {dim} dimensions: "
                "the heads must be a multiple of those of the keys, and a state has 1 to "
                f"{MAX_STATE_DIM} dimensions."
            )
        rows, out = [Rows(x) for x in inputs], torch.empty(len(path), heads, height)
        ends = address(skips), states.data_ptr(), out.data_ptr()
        threads.adopt(self.lib)
        function(forest_of(path).c, STRUCTS["Recurrent"](*[row.c for row in rows], *ends))
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        y, rows = torch.empty(x.shape), Rows(x)
        self.lib.sigmoid_rows(rows.c, len(x), y.data_ptr())
        return y

    def softplus(self, x: Tensor, bias: Tensor, low: float = 0.0, high: float = float("inf")) -> Tensor:
        _check_memory({"bias": (bias, x.shape[1:])})
        y, rows = torch.empty(x.shape), Rows(x)
        self.lib.softplus_rows(rows.c, len(x), bias.data_ptr(), low, high, y.data_ptr())
        return y

    def gate(self, x: Tensor, z: Tensor, activation: Activation) -> Tensor:
        _check_shapes({"z": (z, x.shape)})
        y, rows, gates = torch.empty(x.shape), Rows(x), Rows(z)
        self.lib.gate_rows(rows.c, gates.c, len(x), activation == "silu", y.data_ptr())
        return y.to(x.dtype)

    def gated_norm(
        self,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        activation: Activation = "silu",
        group: int = 0,
        gate_first: bool = False,
    ) -> Tensor:
        width = len(weight)
        _check_shapes({"x": (x, (*x.shape[:-1], width)), "z": (z, x.shape)})
        _check_memory({"weight": (weight, (width,))})
        if group < 0 or width % (group or width):
            raise ValueError(f"{width} elements cannot be divided into groups of {group}.")
        y, rows, gates = torch.empty(x.shape), Rows(x.reshape(-1, width)), Rows(z.reshape(-1, width))
        own = weight.data_ptr(), group or width, eps, activation == "silu", gate_first
        self.lib.gated_norm(rows.c, gates.c, rows.tensor.shape[0], *own, y.data_ptr())
        return y.to(x.dtype)


def forest_of(path: Path) -> Forest:
    return path.derived(Forest, Forest)


def _check_shapes(given: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Compare shapes with those that are needed.  Raises ValueError."""
    for name, (tensor, shape) in given.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}.")


def _check_memory(given: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """The same for tensors that C takes by their address: float32 and contiguous."""
    _check_shapes(given)
    for name, (tensor, _) in given.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and float32.")


def _check_slots(path: Path, memory: Tensor) -> None:
    if path.num_slots > len(memory):
        raise ValueError(f"there is no slot {path.num_slots - 1} among {len(memory)}.")
