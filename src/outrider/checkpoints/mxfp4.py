"""MXFP4 (OCP Microscaling Formats, 2023): numbers of 4 bits (e2m1), of which 32 share a scale 2^(s - 127).

Twice a number is an integer, so that the weights are exact as integers and scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.quantized import QuantizedWeight

METHOD = "mxfp4"  # the quant_method of a config
BLOCK = 32
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitude of a number, by its low bits; the fourth is the sign
NUMBERS = np.array([*TWICE, *(-n for n in TWICE)], dtype=np.int8)
LEVELS = tuple(sorted({*NUMBERS.tolist()}))
HALF_BIAS = 128  # of the exponents of scales for twice the numbers


def unpack(codes: np.ndarray[Any, Any], exponents: Tensor) -> QuantizedWeight:
    """The weight [O, K] of numbers in 4 bits, uint8 [O, K], and scales in 8 bits, uint8 [O, K / 32]."""
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - HALF_BIAS)
    return QuantizedWeight(torch.from_numpy(NUMBERS[codes]), scales, None, 4, BLOCK, LEVELS)
