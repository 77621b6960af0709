"""Counter-based noise: Gumbel noise as a pure function of (seed, sample index, position, token id).

At temperature > 0 the noise depends on the seed, not on the batch, the tree or the method.
`kernels/sample.c` computes the same numbers.  Logarithms are computed in float64 and rounded, so devices
agree.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

DRAW, ACCEPT, EMIT = 1, 2, 3  # purposes of `uniform`, one random stream each
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijective mixing of 64-bit words."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key_of(seed: int, index: int, position: int) -> int:
    """The 64-bit key of one position of one sample."""
    return key_in(stream_of(seed, index), position)


@lru_cache(maxsize=8192)
def key_in(stream: int, position: int) -> int:
    """`key_of` by the sample's random stream (`stream_of`).

    Kept, as drafters and the verification of a step ask for the same ones.
    """
    return mix(stream + position & MASK)


@lru_cache(maxsize=4096)
def stream_of(seed: int, index: int) -> int:
    """64-bit stream id of one sample, from which its keys derive."""
    return mix(mix((seed + GOLDEN) & MASK) + index & MASK)


def uniform(stream: int, purpose: int, step: int, node: int) -> float:
    """Uniform in [0, 1) of 53 bits, a pure function of its arguments.

    stream: random stream of the sample.  purpose: DRAW, ACCEPT or EMIT.  step: length of the row in tokens.
    node: number of a node of the draft tree.
    """
    key = uniform_key(stream, purpose, step)
    return (mix(key + (node + 2) * GOLDEN & MASK) >> 11) * 2.0**-53


def uniform_key(stream: int, purpose: int, step: int) -> int:
    """The 64-bit key of the uniforms of all nodes of a tree, of `uniform`'s other arguments."""
    return mix(mix(stream ^ mix(purpose * GOLDEN & MASK)) + step & MASK)


def gumbel(key: int, vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Gumbel noise of all tokens of a vocabulary, float32 [vocabulary].  key: see `key_of`."""
    return gumbel_of(key, torch.arange(vocabulary, device=device))


def gumbel_of(key: int, tokens: Tensor) -> Tensor:
    """Gumbel noise of int64 tokens, float32: -log(-log(u)).

    u: from 24 bits of mix(key + (token + 1) · GOLDEN)
    """
    z = (tokens + 1) * _signed(GOLDEN) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    bits = _shift(z ^ _shift(z, 31), 40)
    uniform = (bits.double() + 0.5) * 2.0**-24
    return (-torch.log(-torch.log(uniform))).float()


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)
