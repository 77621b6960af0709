"""MXFP4 (OCP Microscaling Formats, 2023): numbers of 4 bits (e2m1), of which 32 share a scale 2^(s - 127).

Twice a number is an integer, so that the weights are exact as integers and scales.
"""

from __future__ import annotations

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


BYTES = np.arange(256)
# the two numbers of every byte, the first one in its low bits, as one element
PAIRS = np.stack([NUMBERS[BYTES & 15], NUMBERS[BYTES >> 4]], axis=1).view(np.int16)[:, 0]


def unpack(pairs: Tensor, exponents: Tensor) -> QuantizedWeight:
    """The weight [O, K] of numbers, uint8 [O, K / 32, 16], and scales, uint8 [O, K / 32]."""
    numbers = np.take(PAIRS, pairs.numpy()).view(np.int8).reshape(len(pairs), -1)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - HALF_BIAS)
    return QuantizedWeight(torch.from_numpy(numbers), scales, None, 4, BLOCK, LEVELS)
