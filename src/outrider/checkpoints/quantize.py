"""Quantization of weights while a checkpoint is loaded: `quantization="int8"` or `"int4"`.

In groups of 32 inputs, each with a scale (8.5 and 4.5 bits a weight).  Embedding and head stay at 8 bits in
both: they decide the tokens, and a tied one is both.  Norms and biases stay what they are.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from outrider.core.quantized import QuantizedWeight
from outrider.core.validate import one_of, optional

GROUP = 32
BITS = {"int8": 8, "int4": 4}
STORED = "The files of a quantized model say how it is stored: leave it out."
HINTS = {  # vLLM's words -> hint
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf"), STORED),
    "fp8": "Did you mean 'int8'?",
    "bitsandbytes": "Did you mean 'int4'?",
}
KIND = one_of(*BITS, hints=HINTS)
Quantization = Annotated[str, KIND]  # without: the weights as they are
# relative to the scale that just reaches the largest weight
SCALE_FACTORS = torch.linspace(0.8, 1.15, 15).tolist()


def bits_of(quantization: str | None) -> int | None:
    """Bits per weight, or None for unquantized weights.  Raises ConfigError for an unknown value."""
    optional(KIND).check(quantization, "quantization")
    return None if quantization is None else BITS[quantization]


def reduced(weight: Tensor | QuantizedWeight, bits: int | None) -> Tensor | QuantizedWeight:
    """The weight in at most `bits` bits (None: any); one that a checkpoint stores in fewer is unchanged."""
    if bits is None or (isinstance(weight, QuantizedWeight) and weight.bits <= bits):
        return weight
    return quantize(weight.dense() if isinstance(weight, QuantizedWeight) else weight, bits)


def quantize(weight: Tensor, bits: int) -> Tensor | QuantizedWeight:
    """Quantize symmetrically, in groups.  Returns a weight without whole groups unchanged."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return weight
    parts = weight.float().view(outputs, inputs // GROUP, GROUP)
    return _quantize_int8(parts) if bits == 8 else _quantize_int4(parts)


def _quantize_int8(parts: Tensor) -> QuantizedWeight:
    scale = _half(parts.abs().amax(-1) / 127)
    values = (parts / scale.clamp_min(1e-30)[..., None]).round().clamp(-127, 127)
    return QuantizedWeight(values.to(torch.int8).flatten(1), scale, None, 8, GROUP)


def _quantize_int4(parts: Tensor) -> QuantizedWeight:
    """Map the largest magnitude to about -8, by the scale factor with the least squared error."""
    lowest, highest = parts.amin(-1), parts.amax(-1)
    largest = torch.where(highest > -lowest, highest, lowest) / -8
    best, best_error = largest, torch.full_like(largest, float("inf"))
    for factor in SCALE_FACTORS:
        scale = largest * factor
        error = (_rounded(parts, scale) * scale[..., None] - parts).square().sum(-1)
        best = torch.where(error < best_error, scale, best)
        best_error = torch.minimum(error, best_error)
    best = _half(best)
    return QuantizedWeight(_rounded(parts, best).to(torch.int8).flatten(1), best, None, 4, GROUP)


def _half(scales: Tensor) -> Tensor:
    """Scales float32, rounded to half precision if all are in the range of its normal numbers.

    Kernels hold them so, and files store them in 2 bytes.
    """
    sizes, limits = scales[scales != 0].abs(), torch.finfo(torch.float16)
    inside = bool(((sizes >= limits.smallest_normal) & (sizes <= limits.max)).all())
    return scales.half().float() if inside else scales


def _rounded(parts: Tensor, scale: Tensor) -> Tensor:
    return (parts / torch.where(scale == 0, 1.0, scale)[..., None]).round().clamp(-8, 7)
