"""Matrix products of tiles, and their exact form in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, total):
    """total + a [M, K] · b [K, N], in float32.

    A device computes an entry from its row and its column alone, wherever they are in the tile, and begins
    with its total.  The interpreter calls BLAS, which does neither, and which misreads bfloat16.  There the
    sum is taken in order.
    """
    if INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rounded(x, like):
    """x in the dtype of another tensor.  The interpreter has no cast from integers to bfloat16."""
    return x.to(tl.float32).to(like.dtype) if x.dtype.is_int() else x.to(like.dtype)
