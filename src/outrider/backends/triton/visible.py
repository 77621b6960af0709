"""Which of its keys a row sees: all, or those in a window."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_key(position, shift, pinned, WINDOW: tl.constexpr):
    """A number that no visible key of a row is below."""
    if WINDOW == 0:
        return position * 0
    oldest = position - WINDOW + 1 if WINDOW > 0 else position // -WINDOW * -WINDOW
    return tl.where(pinned > 0, 0, tl.maximum(oldest - shift, 0))


@triton.jit
def seen_by(j, num_keys, position, shift, pinned, WINDOW: tl.constexpr):
    """Which of the keys j each row sees, and their distance from it (0 or below), [M, BLOCK]."""
    at = j[None, :] + tl.where(j[None, :] >= pinned, shift[:, None], 0)
    seen = j[None, :] < num_keys[:, None]
    if WINDOW > 0:
        seen = seen & (at > position[:, None] - WINDOW)
    elif WINDOW < 0:
        seen = seen & (at >= (position // -WINDOW * -WINDOW)[:, None])
    return seen, at - position[:, None]
