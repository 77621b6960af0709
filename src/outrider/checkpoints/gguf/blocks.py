"""Unpacking of ggml's block formats into `QuantizedWeight`.

A row is a sequence of blocks of 32 or 256 weights; a block holds packed values and the scales of its
groups.  The formats below are linear, weight = scale * value + offset, or have up to 16 values that a scale
multiplies.  They are represented exactly: 4-bit values in 4 bits, other widths in 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.checkpoints.mxfp4 import HALF_BIAS, LEVELS, NUMBERS
from outrider.core.quantized import QuantizedWeight

Array = np.ndarray[Any, Any]
Parts = tuple[Array, Array, Array | None]  # of n blocks: values [n, weights], scales and offsets [n, groups]

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)


def _fields(packed: Array, width: int, chunk: int) -> Array:
    """Unpack fields of `width` bits, uint8: of every `chunk` bytes first all lowest fields, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, chunk) >> shifts & (1 << width) - 1).reshape(len(packed), -1)


def _half(packed: Array) -> Array:
    """float16 stored in the bytes of a block, as float32."""
    values: Array = np.ascontiguousarray(packed).view(np.float16).astype(np.float32)
    return values


def _q4_0(b: Array) -> Parts:
    return _fields(b[:, 2:], 4, 16).view(np.int8) - 8, _half(b[:, :2]), None


def _q4_1(b: Array) -> Parts:
    scale, minimum = _half(b[:, :2]), _half(b[:, 2:4])
    return _fields(b[:, 4:], 4, 16).view(np.int8) - 8, scale, minimum + 8 * scale


def _q5(high: Array, low: Array) -> Array:
    """Values 0 … 31: four low bits, and the fifth bits of all weights packed separately."""
    values: Array = _fields(low, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << 4
    return values.view(np.int8)


def _q5_0(b: Array) -> Parts:
    return _q5(b[:, 2:6], b[:, 6:]) - 16, _half(b[:, :2]), None


def _q5_1(b: Array) -> Parts:
    return _q5(b[:, 4:8], b[:, 8:]), _half(b[:, :2]), _half(b[:, 2:4])


def _q8_0(b: Array) -> Parts:
    return b[:, 2:].view(np.int8), _half(b[:, :2]), None


def _q2_k(b: Array) -> Parts:
    scales = _half(b[:, 80:82]) * (b[:, :16] & 15)
    return _fields(b[:, 16:80], 2, 32).view(np.int8), scales, -_half(b[:, 82:84]) * (b[:, :16] >> 4)


def _q3_k(b: Array) -> Parts:
    values = (_fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2).view(np.int8) - 4
    scales = (_fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4).view(np.int8) - 32
    return values, _half(b[:, 108:110]) * scales, None


def _k_scales(b: Array) -> tuple[Array, Array]:
    """Scales and offsets of the 8 groups of a Q4_K or Q5_K block.

    byte 0-1     float16 factor of all scales
    byte 2-3     float16 factor of all minimums
    byte 4-7     scales 0-3 in 6 bits each, and in the upper 2 bits the high bits of scales 4-7
    byte 8-11    minimums 0-3 in 6 bits each, and in the upper 2 bits the high bits of minimums 4-7
    byte 12-15   low 4 bits of scales 4-7, then of minimums 4-7
    """
    first_scales, first_minimums, low_bits = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first_scales & 63, low_bits & 15 | first_scales >> 2 & 48], axis=1)
    minimums = np.concatenate([first_minimums & 63, low_bits >> 4 | first_minimums >> 2 & 48], axis=1)
    return _half(b[:, :2]) * scales, -_half(b[:, 2:4]) * minimums


def _q4_k(b: Array) -> Parts:
    scales, offsets = _k_scales(b)
    return _fields(b[:, 16:], 4, 32).view(np.int8) - 8, scales, offsets + 8 * scales


def _q5_k(b: Array) -> Parts:
    return (_fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4).view(np.int8), *_k_scales(b)


def _q6_k(b: Array) -> Parts:
    values = (_fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4).view(np.int8) - 32
    return values, _half(b[:, 208:]) * b[:, 192:208].view(np.int8), None


def _iq4_nl(b: Array) -> Parts:
    return IQ4_VALUES[_fields(b[:, 2:], 4, 16)], _half(b[:, :2]), None


def _iq4_xs(b: Array) -> Parts:
    scales = (_fields(b[:, 4:8], 4, 1) | _fields(b[:, 2:4], 2, 1) << 4).view(np.int8) - 32
    return IQ4_VALUES[_fields(b[:, 8:], 4, 16)], _half(b[:, :2]) * scales, None


def _mxfp4(b: Array) -> Parts:
    """As in files of gpt-oss, but with the lower half of a block in the low bits."""
    scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - HALF_BIAS)
    return NUMBERS[_fields(b[:, 1:], 4, 16)], scales, None


class Format(NamedTuple):
    """Bits, group and levels of the `QuantizedWeight`, and what unpacks uint8 [n, block bytes]."""

    bits: int
    group: int
    unpack: Callable[[Array], Parts]
    levels: tuple[int, ...] = ()


FORMATS = {
    "Q4_0": Format(4, 32, _q4_0),
    "Q4_1": Format(4, 32, _q4_1),
    "Q5_0": Format(8, 32, _q5_0),
    "Q5_1": Format(8, 32, _q5_1),
    "Q8_0": Format(8, 32, _q8_0),
    "Q2_K": Format(4, 16, _q2_k),
    "Q3_K": Format(4, 16, _q3_k),
    "Q4_K": Format(4, 32, _q4_k),
    "Q5_K": Format(8, 32, _q5_k),
    "Q6_K": Format(8, 16, _q6_k),
    "IQ4_NL": Format(4, 32, _iq4_nl, tuple(IQ4_VALUES.tolist())),
    "IQ4_XS": Format(4, 32, _iq4_xs, tuple(IQ4_VALUES.tolist())),
    "MXFP4": Format(4, 32, _mxfp4, LEVELS),
}
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unpack(ggml_type: str, rows: Array, block_bytes: int) -> Tensor | QuantizedWeight:
    """The tensor in the raw bytes `rows`, uint8 [outputs, bytes per row]."""
    if ggml_type in DENSE:
        return torch.from_numpy(rows.copy()).view(DENSE[ggml_type])
    if ggml_type not in FORMATS:
        return _dequantized(ggml_type, rows)
    bits, group, unpack_blocks, levels = FORMATS[ggml_type]
    outputs = len(rows)
    values, scales, offsets = unpack_blocks(rows.reshape(-1, block_bytes))
    return QuantizedWeight(
        torch.from_numpy(np.require(values, requirements=["C", "W"])).view(outputs, -1),
        torch.from_numpy(scales).view(outputs, -1),
        None if offsets is None else torch.from_numpy(offsets).view(outputs, -1),
        bits,
        group,
        levels,
    )


def _dequantized(ggml_type: str, rows: Array) -> Tensor:
    """float32, for formats that are not linear (IQ1 … IQ3) or rare."""
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[ggml_type]))
