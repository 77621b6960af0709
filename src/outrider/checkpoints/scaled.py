"""Weights in fp8 or int8 that have their own names, with scales beside them.

    format                              weight                  scales
    fp8 in blocks (DeepSeek, Qwen3)     float8_e4m3fn [O, K]    weight_scale_inv [⌈O/b⌉, ⌈K/c⌉]
    fp8                                 float8_e4m3fn [O, K]    weight_scale []
    compressed-tensors "float-…"        float8_e4m3fn [O, K]    weight_scale [], [1], [O, 1] or [⌈O/b⌉, ⌈K/c⌉]
    compressed-tensors "int-quantized"  int8 [O, K]             weight_scale [O, 1], weight_zero_point [O, 1]

weight = scale (value - zero).  fp8 is expanded while loading, int8 stays.  Inputs are not quantized here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.checkpoints.mxfp4 import METHOD
from outrider.checkpoints.packed import PackedWeights
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.quantized_layers import Layout, QuantizedLayers
from outrider.checkpoints.weights import Weights
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

ZEROS = "weight_zero_point"
PARTS = ("weight_scale", "weight_scale_inv", ZEROS, "input_scale", "input_zero_point")
STORED = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def quantized(files: Weights, scheme: Scheme) -> QuantizedLayers:
    """The tensors of a checkpoint that is quantized so."""
    if scheme.method == METHOD:
        raise ModelError("weights in MXFP4 are read where they are those of gpt-oss's experts only.")
    return ScaledWeights(files, scheme) if scheme.scales else PackedWeights(files, scheme)


class ScaledWeights(QuantizedLayers):
    """Weights with scales.  A layer is quantized if it has both."""

    def __init__(self, files: Weights, scheme: Scheme) -> None:
        scales = f".{scheme.scales}"
        names = [name.removesuffix(scales) for name in files if name.endswith(scales)]
        layers = [layer for layer in names if f"{layer}.weight" in files]
        super().__init__(files, scheme, Layout("weight", ZEROS, scheme.scales, others=PARTS), layers)

    def get(self, name: str, *shape: int) -> Tensor:
        if name in self.layer_of:
            self._check_shape(name, shape)
            return self.raw(name)
        return super().get(name, *shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of a layer; dense unless it is stored in int8."""
        full = f"{name}.weight"
        if full not in self.layer_of:
            return self.get(full, outputs, inputs)
        self._check_shape(full, (outputs, inputs))
        return self._read(name)

    def bits(self, names: Iterable[str]) -> int | None:
        """8 if one of these weights is in int8; None otherwise: fp8 is expanded."""
        return 8 if self.scheme.sizes and any(name in self.layer_of for name in names) else None

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self.shape(name) != shape:
            raise ModelError(f"{name} has shape {self.shape(name)}, the config asks for {shape}.")

    def _read(self, layer: str) -> Tensor | QuantizedWeight:
        values = self.files.raw(f"{layer}.weight")
        if values.dtype not in STORED or values.dim() != 2:
            raise ModelError(
                f"{layer}.weight is {values.dtype} {tuple(values.shape)}, which is no fp8 (e4m3) or int8 as "
                "quantization_config says."
            )
        scales = self.files.raw(f"{layer}.{self.scheme.scales}")
        if not scales.is_floating_point():
            raise ModelError(f"{layer}.{self.scheme.scales} is {scales.dtype}: scales are fractions.")
        if values.dtype == torch.int8:
            return self._int8(layer, values, scales.float())
        return values.float() * self._expanded(layer, scales.float(), *values.shape)

    def _int8(self, layer: str, values: Tensor, scales: Tensor) -> QuantizedWeight:
        """One scale for each output."""
        outputs, inputs = values.shape
        whole = self._expanded(layer, scales, outputs, 1)
        zeros = None
        if f"{layer}.{ZEROS}" in self.files:
            zeros = self._expanded(layer, self.files.raw(f"{layer}.{ZEROS}").float(), outputs, 1)
        offsets = None if zeros is None or not zeros.any() else -whole * zeros
        return QuantizedWeight(values, whole, offsets, 8, inputs)

    def _expanded(self, layer: str, scales: Tensor, outputs: int, inputs: int) -> Tensor:
        """Scales as float32 [outputs, inputs], or [outputs, 1] where all inputs share them."""
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(outputs, 1)
        if scales.shape == (outputs, 1) or scales.shape == (outputs,):
            return scales.reshape(outputs, 1)
        height, width = self.scheme.block
        blocks = (-(-outputs // height), -(-inputs // width)) if height and width else ()
        if tuple(scales.shape) != blocks:
            raise ModelError(
                f"{layer} of [{outputs}, {inputs}] has scales of {tuple(scales.shape)}: there must be one, "
                f"or one for each output, or for each block of {self.scheme.block}."
            )
        rows = scales.repeat_interleave(height, dim=0)[:outputs]
        return rows.repeat_interleave(width, dim=1)[:, :inputs]
