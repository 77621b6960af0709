"""Experts of gpt-oss, which its files have as one tensor of all experts of a layer.

    files                                                     an expert e
    mlp.router.weight, bias                                   mlp.gate.weight, bias
    mlp.experts.gate_up_proj         [E, K, 2 I]              mlp.experts.e.gate_proj.weight  [I, K]
    mlp.experts.gate_up_proj_blocks  uint8 [E, 2 I, K/32, 16]   the same in MXFP4
    mlp.experts.gate_up_proj_scales  uint8 [E, 2 I, K/32]
    mlp.experts.gate_up_proj_bias    [E, 2 I]                 mlp.experts.e.gate_proj.bias    [I]

Even outputs of gate_up_proj are the gate's, odd ones those of up_proj; down_proj is alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from outrider.checkpoints.mxfp4 import BLOCK, METHOD, unpack
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.quantized_layers import QuantizedLayers
from outrider.checkpoints.scaled import quantized
from outrider.checkpoints.stacked_experts import StackedExperts, has_stacked_experts
from outrider.checkpoints.weights import Source, Weights
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

JOINED = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj(_blocks)?")
PACKED = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj_blocks")
PART = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales)")
OF_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
ROUTER = re.compile(r"(.*\.mlp)\.gate\.(weight|bias)")
ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}


def has_joined_experts(names: Iterable[str]) -> bool:
    """Whether files have the experts of gpt-oss."""
    return any(map(JOINED.fullmatch, names))


def open_source(files: Weights, scheme: Scheme | None) -> Source:
    """The tensors of a checkpoint's files.

    Raises ModelError for MXFP4 elsewhere than in such experts, and for those of stacked_experts.py quantized.
    """
    if has_stacked_experts(files):
        if scheme is not None:
            raise ModelError("experts in one tensor of a layer are supported without quantization only.")
        return StackedExperts(files)
    if scheme is not None:
        return open_quantized(files, scheme)
    return JoinedExperts(files, files) if has_joined_experts(files) else files


def open_quantized(files: Weights, scheme: Scheme) -> QuantizedLayers | JoinedExperts:
    """The tensors of a checkpoint's files that are quantized so.  Raises as `open_source`."""
    if not has_joined_experts(files):
        return quantized(files, scheme)
    return JoinedExperts(files, files if scheme.method == METHOD else quantized(files, scheme))


class JoinedExperts:
    """The tensors of such a checkpoint (`Source`), every expert by itself.

    rest: the tensors beside the experts.  layer_of: joined weights in MXFP4, under the names that dense ones
    have.
    """

    def __init__(self, files: Weights, rest: Source) -> None:
        self.files, self.rest = files, rest
        packed = (name.removesuffix("_blocks") for name in files if PACKED.fullmatch(name))
        self.layer_of = {name: name for name in packed}

    def __contains__(self, name: str) -> bool:
        """Whether the files have the tensor; `get` and `linear` check its shape."""
        if router := ROUTER.fullmatch(name):
            name = f"{router[1]}.router.{router[2]}"
        if expert := OF_EXPERT.fullmatch(name):
            prefix, _, part, suffix = expert.groups()
            joined = _joined(prefix, part)
            return (f"{joined}_bias" if suffix == "bias" else self._weight(joined)) in self.files
        return name in self.rest and not PART.fullmatch(name)

    def get(self, name: str, *shape: int) -> Tensor:
        if router := ROUTER.fullmatch(name):
            name = f"{router[1]}.router.{router[2]}"
        if not (expert := OF_EXPERT.fullmatch(name)):
            return self.rest.get(name, *shape)
        prefix, number, part, suffix = expert.groups()
        if suffix == "weight":
            weight = self.linear(name.removesuffix(".weight"), *shape)
            return weight.dense() if isinstance(weight, QuantizedWeight) else weight
        (outputs,) = shape
        return self._entry(f"{_joined(prefix, part)}_bias", number, _outputs(part, outputs))[ROWS[part]]

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        expert = OF_EXPERT.fullmatch(f"{name}.weight")
        if expert is None:
            router = name.removesuffix(".gate")
            return self.rest.linear(name if router == name else f"{router}.router", outputs, inputs)
        prefix, number, part, _ = expert.groups()
        joined, rows = _joined(prefix, part), _outputs(part, outputs)
        if joined not in self.layer_of:
            return self._entry(joined, number, inputs, rows).T[ROWS[part]]
        return self._unpacked(joined, number, rows, inputs, ROWS[part])

    def _unpacked(self, joined: str, number: str, outputs: int, inputs: int, rows: slice) -> QuantizedWeight:
        """Some outputs of an expert in MXFP4.  outputs: how many there are in the file."""
        groups = inputs // BLOCK if inputs % BLOCK == 0 else -1  # no file has such a shape
        pairs = self._entry(f"{joined}_blocks", number, outputs, groups, BLOCK // 2)[rows]
        exponents = self._entry(f"{joined}_scales", number, outputs, groups)[rows]
        return unpack(pairs, exponents)

    def _weight(self, joined: str) -> str:
        return f"{joined}_blocks" if joined in self.layer_of else joined

    def _entry(self, name: str, number: str, *shape: int) -> Tensor:
        """An expert's part of a tensor.  Raises ModelError if it is missing or of another shape or type."""
        if name not in self.files:
            self.files.raw(name)  # raises
        stored = self.files.shape(name)
        if len(stored) != 1 + len(shape) or stored[1:] != shape or int(number) >= stored[0]:
            wanted = ", ".join(map(str, shape))
            raise ModelError(
                f"{name} has shape {stored}, the config asks for (more than {number}, {wanted})."
            )
        entry = self.files.entry(name, int(number))
        is_packed = name.endswith(("_blocks", "_scales"))
        if entry.dtype != torch.uint8 if is_packed else not _is_float(entry):
            raise ModelError(
                f"{name} is {entry.dtype}, not {'uint8' if is_packed else 'of floating-point numbers'}."
            )
        return entry

    # ---- whole tensors, under the names of the files

    def __iter__(self) -> Iterator[str]:
        yield from self.layer_of
        yield from (name for name in self.files if not PART.fullmatch(name))

    def raw(self, name: str) -> Tensor:
        """The tensor; of weights in MXFP4 bfloat16 [E, K, O], which is exact."""
        if name not in self.layer_of:
            return self.files.raw(name)
        experts, outputs, inputs = self.shape(name)
        dense = torch.empty(experts, inputs, outputs, dtype=torch.bfloat16)
        for e in range(experts):
            dense[e] = self._unpacked(name, str(e), outputs, inputs, slice(None)).dense().T
        return dense

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.layer_of:
            return self.files.shape(name)
        blocks = f"{name}_blocks"
        stored = self.files.shape(blocks)
        if len(stored) != 4:
            raise ModelError(f"{blocks} has shape {stored}, not [experts, outputs, groups, {BLOCK // 2}].")
        experts, outputs, groups, half = stored
        return experts, outputs, groups * half * 2

    def bits(self, names: Iterable[str]) -> int | None:
        return 4 if any(name in self.layer_of for name in names) else None


def _joined(prefix: str, part: str) -> str:
    return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"


def _outputs(part: str, outputs: int) -> int:
    """Outputs of the tensor in the file."""
    return outputs if part == "down" else 2 * outputs


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1
