"""Matrix products of tiles, and their exact form in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """Product float32 of a [M, K] and b [K, N], which is rounded to the dtype of a.

    A device computes an entry from its row and its column alone, wherever they are in the tile.  The
    interpreter calls BLAS, which does not, and which misreads bfloat16.  There the sum is taken in order.
    """
    if INTERPRETED:
        if b.dtype.is_floating():
            b = b.to(a.dtype)
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")
