"""Overlap of neighbouring kernels of a stream: programmatic dependent launch, on Hopper and later.

A kernel is launched while the one before it still runs, as soon as all programs of that one have begun.  Its
programs compute addresses, prefetch weights, and wait.  This hides launches, prologues and tails.

    kernel 1   │ begin │ wait │ work ········ │
    kernel 2           │ begin, prefetch │ wait ········ │ work ········ │
    kernel 3                             │ begin │ wait ················ │ work

The wait ends when the kernel before has ended and its stores are visible.  Every program of every kernel
waits, before it loads or stores anything that changes, and before it returns.  So a kernel ends only after
the one before it, and by induction after all earlier ones.  Hence the usual order of a stream holds:

- what earlier kernels stored is loaded after they have ended
- what a kernel stores, earlier kernels have ended loading (write after read)
- memory that the allocator reuses belongs to kernels that have ended

Kernels and copies of torch are launched without this attribute.  They begin after the kernel before has
ended, and so after all earlier ones.  A kernel of ours that follows one of them waits until it has ended and
its stores are visible.  The same holds in a graph: a capture keeps the kind of each dependency.

Waiting programs hold no resource that an earlier kernel needs: all programs of that one have begun already.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from outrider.backends.triton.dot import INTERPRETED

# Not measured on a device yet (`scripts/gpu.py --parts overlap` does it), so off unless OUTRIDER_OVERLAP=1.
ENABLED = tl.constexpr(not INTERPRETED.value and os.environ.get("OUTRIDER_OVERLAP") == "1")
LINE = tl.constexpr(128)  # bytes
# The compiler wants a result of every instruction.
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
BULK_PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@triton.jit
def start_next():
    """Let the next kernel of the stream begin once all programs have come here."""
    if ENABLED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def wait_for_last():
    """Wait for the end of the kernel before."""
    if ENABLED and cuda_capability_geq(9, 0):
        gdc_wait()


@triton.jit
def overlap():
    """The begin of a kernel that has nothing to do before it waits."""
    start_next()
    wait_for_last()


@triton.jit
def prefetch(table, row, num_rows, row_bytes, LINES: tl.constexpr, BULK: tl.constexpr):
    """Begin to load the first LINES * LINE bytes of some rows of a table into the L2 cache.

    Loads into the L2 cache need no wait: all programs see one L2 cache.  Addresses are clamped to the table.
    BULK: two instructions a row.  Rows have at least as many bytes, and are aligned to 16.
    """
    begin = table.to(tl.pointer_type(tl.uint8)) + tl.minimum(row, num_rows - 1).to(tl.int64) * row_bytes
    if BULK:
        half = tl.full((2,), LINES * LINE // 2, tl.int32)
        at, size = begin.to(tl.int64)[:, None] + (tl.arange(0, 2) * half)[None, :], half[None, :]
        tl.inline_asm_elementwise(BULK_PREFETCH, "=r,l,r", [at, size], tl.int32, is_pure=False, pack=1)
    else:
        line = tl.minimum(tl.arange(0, LINES) * LINE, row_bytes - 1)
        at = begin.to(tl.int64)[:, None] + line[None, :]
        tl.inline_asm_elementwise(PREFETCH, "=r,l", [at], tl.int32, is_pure=False, pack=1)


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels for a device may wait for one another.

    The target is asked that kernels are compiled for: a kernel that is launched early has to wait.
    """
    return not INTERPRETED.value and device.type == "cuda" and bool(cuda_capability_geq(9, 0))


@lru_cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of every launch on a device."""
    return {"launch_pdl": True} if ENABLED.value and can_overlap(device) else {}
