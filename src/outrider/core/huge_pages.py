"""Memory of large tensors in pages of 2 MB, where the system has them.

A forward reads all weights, and the K/V of its rows, once.  Between pages of 4 KB a processor stops fetching
ahead and looks up an address, which costs plain decoding up to a fifth of its speed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

PAGE, BLOCK = 2 << 20, 32 << 20  # bytes
ALIGNMENT = 64  # a cache line
LEAST = 64 << 10  # smaller tensors stay in the first caches


def large_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [count]; on the CPU they fill huge pages of their own, unless they are few."""
    size = count * dtype.itemsize
    if device.type != "cpu" or size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype, device=device)
    return _block(size).view(dtype).zero_()  # memory that the system lacks is missed now, not in a step


class HugePages:
    """Copies tensors into blocks that they share.  A block is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._free, self._lock = torch.empty(0, dtype=torch.uint8), Lock()

    def copy(self, data: Tensor) -> Tensor:
        """Return contiguous `data` in huge pages; itself if it is small, or if there are none."""
        if data.nbytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return data
        return self._piece(data.nbytes).view(data.dtype).view(data.shape).copy_(data)

    def _piece(self, size: int) -> Tensor:
        with self._lock:
            if self._free.nbytes < size:
                self._free = _block(max(BLOCK, size))
            piece, rest = self._free[:size], self._free[-(-size // ALIGNMENT) * ALIGNMENT :]
            self._free = rest if len(rest) >= LEAST else rest.new_empty(0)  # which holds no block
        return piece


def _block(size: int) -> Tensor:
    """Bytes [size] that begin with a page."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE
    return block[start : start + size]


WEIGHTS = HugePages()
