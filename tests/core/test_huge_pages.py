"""Tensors in huge pages: equal to what was copied, apart from each other, and freed."""

from __future__ import annotations

import mmap
import re
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from outrider.core import huge_pages
from outrider.core.huge_pages import ALIGNMENT, LEAST, PAGE, HugePages, large_zeros

CPU = torch.device("cpu")
SIZES = [(300, 256), (129, 513), (4000, 70), (100, 200_001)]
HAS_FLAGS = Path("/proc/self/smaps").exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_copies_are_equal_aligned_and_apart(dtype: torch.dtype) -> None:
    pages, tensors = HugePages(), [torch.randint(0, 99, size).to(dtype) for size in SIZES * 2]
    copies = [pages.copy(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
        assert copy.data_ptr() != tensor.data_ptr() and copy.data_ptr() % ALIGNMENT == 0
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in copies)
    for (start, size), (following, _) in pairwise(places):
        assert start + size <= following


def test_small_tensors_stay_where_they_are() -> None:
    small = torch.zeros(LEAST - 1, dtype=torch.uint8)
    assert HugePages().copy(small) is small


def test_a_block_lives_as_long_as_a_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *args: object, **named: object) -> None:
            blocks.append(weakref.ref(self))

    monkeypatch.setattr(huge_pages.mmap, "mmap", Watched)
    pages = HugePages()
    first, second = pages.copy(torch.ones(PAGE)), pages.copy(torch.ones(huge_pages.BLOCK))
    assert len(blocks) == 2 and blocks[0]() is not None
    del first
    assert blocks[0]() is None and blocks[1]() is not None
    assert bool((second == 1).all())
    del second  # it filled its block
    assert blocks[1]() is None


@pytest.mark.skipif(not HAS_FLAGS, reason="needs Linux with huge pages")
def test_memory_is_marked_for_huge_pages() -> None:
    for tensor in (HugePages().copy(torch.ones(PAGE)), large_zeros(2 * PAGE, torch.int8, CPU)):
        assert "hg" in _flags(tensor.data_ptr() + tensor.nbytes // 2)


def _flags(address: int) -> list[str]:
    """VmFlags of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_systems_without_huge_pages_keep_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    large = torch.ones(PAGE)
    assert HugePages().copy(large) is large
    assert large_zeros(PAGE, torch.float32, CPU).sum() == 0


@pytest.mark.parametrize("count", [1, PAGE + 3])
def test_zeros_have_the_size_and_type_that_was_asked_for(count: int) -> None:
    zeros = large_zeros(count, torch.bfloat16, CPU)
    assert zeros.shape == (count,) and zeros.dtype == torch.bfloat16 and not zeros.any()
