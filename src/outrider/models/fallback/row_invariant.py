"""Row-invariant arithmetic for transformers' modelling code: a row's numbers do not depend on other rows.

Two things in torch depend on the batch:
- matrix products: a `Matrix` takes the place of every weight and multiplies with our kernels;
- elementwise functions whose vectorised loop and remainder loop differ: `RowwiseMode` calls them row by row.
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
from outrider.core.step_input import StepInput
from outrider.models.rowwise import by_rows

T = TypeVar("T")


class Matrix:
    """A weight [O,K], [K,O] or, of experts, [E,…] for our kernels, packed at its first product.

    Any other operation on it runs on a dense copy.
    """

    def __init__(self, dense: Tensor, bias: Tensor | None, backend: Backend) -> None:
        self.shape, self.device, self.dtype = dense.shape, dense.device, backend.activations
        self.requires_grad = False
        self._dense: Tensor | None = dense
        self._bias, self._backend = bias, backend
        self._packed: dict[tuple[bool, bool], Weight] = {}  # by (is [K,O], includes the bias)
        self._experts = [Matrix(part, None, backend) for part in dense] if dense.dim() == 3 else []

    def linear(self, x: Tensor, transposed: bool = False, bias: Tensor | None = None) -> Tensor:
        """Product with x [...,K]; the weight is [K,O] if `transposed`, else [O,K]."""
        fused = bias is not None and bias is self._bias
        weight = self._packed.get((transposed, fused)) or self._pack(transposed, fused)
        flat = x.view(-1, weight.inputs) if x.is_contiguous() else x.reshape(-1, weight.inputs).contiguous()
        y = self._backend.linear(flat, weight)
        return (y if fused or bias is None else y + bias).view(*x.shape[:-1], weight.outputs)

    def _pack(self, transposed: bool, fused: bool) -> Weight:
        dense = self.dense(self.dtype) if self._dense is None else self._dense
        weight = self._backend.pack(
            dense.T.contiguous() if transposed else dense, self._bias if fused else None
        )
        self._packed[transposed, fused] = weight
        self._dense = None
        return weight

    def rows(self, ids: Tensor) -> Tensor:
        """[…, K]: embeddings of `ids`."""
        if self._dense is not None:
            return F.embedding(ids, self._dense).to(self.dtype)
        (transposed, _), weight = next(iter(self._packed.items()))
        if transposed:
            return F.embedding(ids, self.dense(self.dtype))
        flat = StepInput.of_ids(ids.reshape(-1).tolist())
        return self._backend.embed(weight, flat).view(*ids.shape, -1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self._experts:
            return torch.stack([expert.dense(dtype) for expert in self._experts])
        if self._dense is not None:
            return self._dense.to(dtype)
        (transposed, _), weight = next(iter(self._packed.items()))
        all_rows = StepInput.of_ids(range(weight.outputs))
        whole = self._backend.embed(weight, all_rows).to(dtype)
        return whole.T if transposed else whole

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
            return Transposed(self)
        if name == "t":
            return lambda: Transposed(self)
        return getattr(self.dense(self.dtype), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = PRODUCTS.get(func)
        if product is not None and (result := product(*args, **(kwargs or {}))) is not None:
            return result
        return func(*_to_dense(args), **{key: _to_dense(value) for key, value in (kwargs or {}).items()})


@dataclasses.dataclass
class Transposed:
    """`weight.T`, as the operand of `x @ weight.T`."""

    matrix: Matrix

    __torch_function__ = Matrix.__torch_function__

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.matrix.dense(dtype).T

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype


def _to_dense(thing: Any) -> Any:
    if isinstance(thing, (list, tuple)):
        return [_to_dense(part) for part in thing]
    return thing.dense(thing.dtype) if isinstance(thing, (Matrix, Transposed)) else thing


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    return weight.linear(x, bias=bias) if isinstance(weight, Matrix) and not weight._experts else None


def _addmm(bias: Tensor, x: Any, weight: Any, **scaled: Any) -> Tensor | None:
    return weight.linear(x, transposed=True, bias=bias) if isinstance(weight, Matrix) and not scaled else None


def _rmatmul(x: Any, weight: Any) -> Tensor | None:
    """Product weight @ x of a weight [O, K] and columns x [1, K, n], as in Jamba."""
    if not isinstance(weight, Matrix) or weight._experts or x.dim() != 3:
        return None
    return weight.linear(x.transpose(1, 2)).transpose(1, 2)


def _matmul(x: Any, weight: Any) -> Tensor | None:
    if isinstance(weight, Transposed):
        return weight.matrix.linear(x)
    return weight.linear(x, transposed=True) if isinstance(weight, Matrix) and not weight._experts else None


def _bmm(x: Any, weight: Any) -> Tensor | None:
    """x [E,n,K] times experts [E,K,O].

    Rows of zeros are skipped: a router gives them to experts it did not choose.
    """
    if isinstance(x, (Matrix, Transposed)) or not isinstance(weight, Matrix) or not weight._experts:
        return None
    out: Tensor = x.new_zeros(*x.shape[:2], weight.shape[2])
    for rows, expert, y in zip(x, weight._experts, out):
        routed = rows.any(-1).nonzero()[:, 0]
        if len(routed):
            y[routed] = expert.linear(rows[routed], transposed=True)
    return out


def _embedding(ids: Tensor, weight: Any, *_: Any, **__: Any) -> Tensor:
    rows: Tensor = weight.rows(ids)
    return rows


PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    **dict.fromkeys((torch.matmul, torch.mm), _matmul),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    torch.Tensor.__rmatmul__: _rmatmul,
}


def convert(model: nn.Module, backend: Backend, dtype: torch.dtype) -> None:
    """Replace every weight of two or three dimensions by a `Matrix`.  A shared weight stays shared.

    Other parameters (norms, biases) and floating-point buffers get the dtype of the activations.
    """
    matrices: dict[int, Matrix] = {}  # by the identity of the weight
    module: Any  # its attributes change their types
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(module, nn.Conv1d):
                break  # the kernels of recurrent layers take its weight as it is
            if weight is None or weight.dim() not in (2, 3):
                continue
            if id(weight) not in matrices:
                bias = module._parameters.get("bias") if name == "weight" else None
                matrices[id(weight)] = Matrix(weight.detach().to(dtype), bias, backend)
            _replace_weight(module, name, matrices[id(weight)])
        _cast(module, backend.activations)
        if type(module) in (nn.Dropout,):  # `is` would narrow the type, and refuse the assignment
            module.forward = lambda x: x


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers that are no matrices; buffers in float32 stay so."""
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
            module._buffers[name] = buffer.to(dtype)


def _replace_weight(module: Any, name: str, matrix: Matrix) -> None:
    del module._parameters[name]
    object.__setattr__(module, name, matrix)
    if type(module) in (nn.Linear, Conv1D):  # without torch's dispatch
        transposed = type(module) is Conv1D
        module.forward = functools.partial(matrix.linear, transposed=transposed, bias=module.bias)


# ---- elementwise functions: full vectors go through Sleef, the remainder of a call through libm

BATCH_DEPENDENT = {F.silu, F.gelu, F.softplus, F.mish, F.elu, F.logsigmoid}
BATCH_DEPENDENT |= {torch.sigmoid, torch.Tensor.sigmoid, torch.Tensor.sigmoid_}


class RowwiseMode(TorchFunctionMode):
    """While active, calls batch-dependent functions row by row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BATCH_DEPENDENT and isinstance(args[0], Tensor) and args[0].dim() > 1:
            self.on_call()
            return by_rows(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def on_call(self) -> None:
        """Called for every call of a batch-dependent function."""


class RecordingMode(RowwiseMode):
    """Record the classes of the modules whose own forward calls a batch-dependent function."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found: set[type[nn.Module]] = set()

    def on_call(self) -> None:
        if self.running:
            self.found.add(type(self.running[-1]))


def row_invariant(model: nn.Module, run: Callable[[], T]) -> T:
    """Run a forward; modules that call a batch-dependent function in it run in `RowwiseMode` from now on.

    All other modules run at full speed.
    """
    mode = RecordingMode()
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: mode.running.append(module)))
        hooks.append(module.register_forward_hook(lambda *_: _discard(mode.running.pop())))
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


def _discard(_: object) -> None:
    """Return None: a hook that returns something would replace the result."""


def _rowwise(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with RowwiseMode():
            return forward(*args, **kwargs)

    return wrapped
