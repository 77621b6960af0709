"""Inputs and backends shared by the tests of kernels and of the sampler."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu import build, threads
from outrider.backends.cpu.backend import CpuBackend
from outrider.cache.pool import Pool
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.testing import make_row

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SLOTS = 160
needs_c = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")


class Ops(CpuBackend):
    """C kernels with single calls for operations that are otherwise part of a fused one."""

    def silu_mul(self, x: Tensor) -> Tensor:
        n, both = x.shape
        y = torch.empty(n, both // 2)
        self.lib.silu_mul(x.data_ptr(), n, both // 2, y.data_ptr())
        return y


def c_backend(dtype: torch.dtype = torch.float32) -> Ops:
    library = cpu.library()
    assert library is not None
    return Ops(library, dtype)


def kernels_but_for(*files: str) -> list[str]:
    """What a compiler links into all kernels, with these files compiled anew and the rest as it is."""
    return [*(str(build.FOLDER / f"{file}.c") for file in files), c_backend().lib._name]


@contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(2)
    try:
        yield
    finally:
        use_threads(before)


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    threads.adopt(c_backend().lib)


def near(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def random_plan(rng: random.Random, rows: int = 3) -> StepInput:
    """Chains, chunks and trees of several requests over scattered slots, no slot twice."""
    step_input, slots = StepInput(), list(range(SLOTS))
    rng.shuffle(slots)
    for _ in range(rows):
        length, nodes = rng.randint(1, 35), rng.randint(0, 9)
        table = array("i", [slots.pop() for _ in range(length + nodes)])
        start = rng.randint(0, length - 1)
        step_input.chain(table, start, [0] * (length - start))
        paths: list[list[int]] = []
        for node in range(nodes):
            parent = rng.randint(-1, node - 1)
            paths.append([*(paths[parent] if parent >= 0 else []), int(table[length + node])])
            step_input.node(table, length, paths[node], 0)
    return step_input.build()


class Case(NamedTuple):
    """One request: its slots, its number of known tokens, and the paths of its nodes as slots."""

    table: array[int]
    length: int
    paths: list[list[int]]


def ragged(rng: random.Random, lengths: list[int], most_nodes: int, num_slots: int) -> list[Case]:
    """Requests of these numbers of tokens with random trees over scattered slots, no slot twice."""
    slots, cases = rng.sample(range(num_slots), num_slots), []
    for length in lengths:
        nodes = rng.randint(0, most_nodes)
        table = array("i", [slots.pop() for _ in range(length + nodes)])
        paths: list[list[int]] = []
        for node in range(nodes):
            parent = rng.randint(-1, node - 1)
            paths.append([*(paths[parent] if parent >= 0 else []), table[length + node]])
        cases.append(Case(table, length, paths))
    return cases


def heads_of(heads: int, kv_heads: int, head_dim: int, norms: bool = False) -> Any:
    norm = (torch.randn(head_dim), torch.randn(head_dim)) if norms else (None, None)
    return SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, q_norm=norm[0], k_norm=norm[1], eps=1e-6
    )


def pools(spec: Any, dtype: torch.dtype) -> tuple[Pool, Pool]:
    """Two pools with the same random K/V; padding past the head size is zero."""
    pair = [Pool(2, spec.kv_heads, spec.head_dim, SLOTS, dtype, CPU) for _ in range(2)]
    past = torch.randn(2, 2, SLOTS, spec.kv_heads, spec.head_dim)
    for pool in pair:
        for layer, part in ((0, 0), (0, 1), (1, 0), (1, 1)):
            pool.write(layer, part, torch.arange(SLOTS), past[layer, part])
    return pair[0], pair[1]


LAYOUTS = [
    (4, 4, 32),
    (4, 2, 64),
    (6, 1, 16),
    (4, 2, 24),
    (8, 2, 128),
    (3, 3, 40),
    (2, 1, 96),
    (5, 5, 8),
]  # heads, kv_heads, head_dim


def sampled_row(
    tokens: list[int], distribution: DistributionParams, seed: int = 5, index: int = 0, processors: Any = ()
) -> Row:
    """A row with a sampling distribution, seed, sample index and logits processors of its own."""
    return make_row(
        tokens, distribution=distribution, seed=seed, index=index, processors=processors, limit=100
    )
