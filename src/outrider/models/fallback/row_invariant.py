"""Arithmetic whose rows do not depend on each other, for modelling code that is not ours.

Two things in torch make a row's numbers depend on the rows beside it: matrix products, and the few functions that compute
the last numbers of a call by another formula than the rest.  A `Matrix` stands where a weight stood and multiplies by our
kernels; `Rowwise` calls those functions row by row.  The modelling code notices neither.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from outrider.backends.base import Backend, Weight

T = TypeVar("T")


@dataclasses.dataclass
class Ids:
    """What `Backend.embed` reads of a plan."""

    ids: Tensor

    def __post_init__(self) -> None:
        self.ids_at, self.length = self.ids.data_ptr(), len(self.ids)


class Matrix:
    """A weight [O,K], [K,O] or, of experts, [E,…], packed when it is first multiplied by, the way that it is used.

    Whatever else the modelling code does with it happens to a dense copy: right, but slow.
    """

    def __init__(self, dense: Tensor, bias: Tensor | None, backend: Backend) -> None:
        self.shape, self.device, self.dtype, self.requires_grad = (
            dense.shape,
            dense.device,
            backend.activations,
            False,
        )
        self._dense: Tensor | None = dense
        self._bias, self._backend = bias, backend
        self._packed: dict[tuple[bool, bool], Weight] = {}  # by (is [K,O], with the bias)
        self._experts = [Matrix(part, None, backend) for part in dense] if dense.dim() == 3 else []

    def linear(self, x: Tensor, across: bool = False, bias: Tensor | None = None) -> Tensor:
        """x [...,K] times the matrix, which is [K,O] if `across`, and [O,K] otherwise."""
        fused = bias is not None and bias is self._bias
        weight = self._packed.get((across, fused)) or self._pack(across, fused)
        flat = x.view(-1, weight.inputs) if x.is_contiguous() else x.reshape(-1, weight.inputs).contiguous()
        y = self._backend.linear(flat, weight)
        return (y if fused or bias is None else y + bias).view(*x.shape[:-1], weight.outputs)

    def _pack(self, across: bool, fused: bool) -> Weight:
        dense = self.dense(self.dtype) if self._dense is None else self._dense
        weight = self._backend.pack(dense.T.contiguous() if across else dense, self._bias if fused else None)
        self._packed[across, fused] = weight
        self._dense = None
        return weight

    def rows(self, ids: Tensor) -> Tensor:
        """[…, K] of the embeddings of some ids."""
        if self._dense is not None:
            return F.embedding(ids, self._dense).to(self.dtype)
        across = next(iter(self._packed))
        if across[0]:
            return F.embedding(ids, self.dense(self.dtype))
        ours: Any = Ids(ids.reshape(-1).contiguous())
        return self._backend.embed(self._packed[across], ours).view(*ids.shape, -1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self._experts:
            return torch.stack([expert.dense(dtype) for expert in self._experts])
        if self._dense is not None:
            return self._dense.to(dtype)
        (across, _), weight = next(iter(self._packed.items()))
        ours: Any = Ids(torch.arange(weight.outputs))
        whole = self._backend.embed(weight, ours).to(dtype)
        return whole.T if across else whole

    def __getitem__(self, at: Any) -> Any:
        if self._experts and (isinstance(at, int) or (isinstance(at, Tensor) and at.dim() == 0)):
            return self._experts[int(at)]
        return self.dense(self.dtype)[at]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("to", "type", "float", "contiguous"):
            return lambda *_, **__: self
        if name in ("T", "mT"):
            return Flipped(self)
        if name == "t":
            return lambda: Flipped(self)
        return getattr(self.dense(self.dtype), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        use = USES.get(func)
        if use is not None and (done := use(*args, **(kwargs or {}))) is not None:
            return done
        return func(*_densely(args), **{key: _densely(value) for key, value in (kwargs or {}).items()})


@dataclasses.dataclass
class Flipped:
    """`weight.T` in `x @ weight.T`."""

    matrix: Matrix

    __torch_function__ = Matrix.__torch_function__

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.matrix.dense(dtype).T

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype


def _densely(thing: Any) -> Any:
    if isinstance(thing, (list, tuple)):
        return [_densely(part) for part in thing]
    return thing.dense(thing.dtype) if isinstance(thing, (Matrix, Flipped)) else thing


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    return weight.linear(x, bias=bias) if isinstance(weight, Matrix) and not weight._experts else None


def _addmm(bias: Tensor, x: Any, weight: Any, **scaled: Any) -> Tensor | None:
    return weight.linear(x, across=True, bias=bias) if isinstance(weight, Matrix) and not scaled else None


def _matmul(x: Any, weight: Any) -> Tensor | None:
    if isinstance(weight, Flipped):
        return weight.matrix.linear(x)
    return weight.linear(x, across=True) if isinstance(weight, Matrix) and not weight._experts else None


def _bmm(x: Any, weight: Any) -> Tensor | None:
    """x [E,n,K] times experts [E,K,O].

    Rows of zeros cost nothing: a router leaves them to the experts that it did not choose.
    """
    if isinstance(x, (Matrix, Flipped)) or not isinstance(weight, Matrix) or not weight._experts:
        return None
    out: Tensor = x.new_zeros(*x.shape[:2], weight.shape[2])
    for rows, expert, y in zip(x, weight._experts, out):
        some = rows.any(-1).nonzero()[:, 0]
        if len(some):
            y[some] = expert.linear(rows[some], across=True)
    return out


def _embedding(ids: Tensor, weight: Any, *_: Any, **__: Any) -> Tensor:
    rows: Tensor = weight.rows(ids)
    return rows


USES: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear, torch.addmm: _addmm, F.embedding: _embedding,
    torch.bmm: _bmm, torch.matmul: _matmul, torch.mm: _matmul, torch.Tensor.matmul: _matmul, torch.Tensor.mm: _matmul, torch.Tensor.__matmul__: _matmul,
}  # fmt: skip


def enter(model: nn.Module, backend: Backend, dtype: torch.dtype) -> None:
    """Puts a `Matrix` in the place of every weight of two dimensions or three; one that two modules share stays shared.

    What is left (norms, biases) and every buffer of floats becomes as wide as the activations.
    """
    made: dict[int, Matrix] = {}
    module: Any  # its attributes are about to change their types
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            if weight.dim() in (2, 3):
                if id(weight) not in made:
                    bias = module._parameters.get("bias") if name == "weight" else None
                    made[id(weight)] = Matrix(weight.detach().to(dtype), bias, backend)
                del module._parameters[name]
                object.__setattr__(module, name, made[id(weight)])
                if type(module) in (nn.Linear, Conv1D):  # no need to go by way of torch
                    module.forward = functools.partial(
                        made[id(weight)].linear, across=type(module) is Conv1D, bias=module.bias
                    )
            else:
                weight.requires_grad_(False)
                weight.data = weight.data.to(backend.activations)
        if type(module) in (nn.Dropout,):
            module.forward = _same
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
                module._buffers[name] = buffer.to(backend.activations)


def _same(x: Tensor) -> Tensor:
    return x


# ---- functions that compute the end of a call by another formula: the vectors are Sleef's, what is left over libm's

UNSTEADY = {
    F.silu,
    F.gelu,
    F.softplus,
    F.mish,
    F.elu,
    F.logsigmoid,
    torch.sigmoid,
    torch.Tensor.sigmoid,
    torch.Tensor.sigmoid_,
}
VECTOR, SHARED = (
    32,
    16384,
)  # numbers that torch computes at once; above how many it may split a call among threads


def by_rows(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """func(x): as many rows at once as make whole vectors and stay on one thread, so that each is computed as it would be alone."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    step = 1 if width % VECTOR else max(1, SHARED // width)
    if len(rows) <= step:
        return func(x, *args, **kwargs)
    return torch.cat([func(rows[i : i + step], *args, **kwargs) for i in range(0, len(rows), step)]).view(
        x.shape
    )


class Rowwise(TorchFunctionMode):
    """While it is on, unsteady functions go row by row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNSTEADY and isinstance(args[0], Tensor) and args[0].dim() > 1:
            self.notice()
            return by_rows(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def notice(self) -> None:
        """An unsteady function was called."""


class Listening(Rowwise):
    """Notes the classes of the modules in whose own forward an unsteady function is called."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found: set[type[nn.Module]] = set()

    def notice(self) -> None:
        if self.running:
            self.found.add(type(self.running[-1]))


def row_invariant(model: nn.Module, run: Callable[[], T]) -> T:
    """run(), which runs the model; the modules that call an unsteady function in it are made `Rowwise` for good.

    So only an activation pays, or the block that has a gate written out in its forward.
    """
    mode = Listening()
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: mode.running.append(module)))
        hooks.append(module.register_forward_hook(lambda *_: void(mode.running.pop())))
    try:
        with mode:
            result = run()
    finally:
        for hook in hooks:
            hook.remove()
    for module in model.modules():
        if type(module) in mode.found:
            module.forward = _rowwise(module.forward)
    return result


def void(_: object) -> None:
    """A hook that returns something would replace the result."""


def _rowwise(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with Rowwise():
            return forward(*args, **kwargs)

    return wrapped
