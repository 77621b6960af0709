"""Attention of the C kernels: a row has the same bits in any company, and what rounding its inputs means."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_cases import CPU, Case, c_backend, heads_of, near, needs_c, ragged, random_plan, two_threads
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.cpu.backend import CpuBackend
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput

SLOTS = 700
FORMS = {  # element type of the pool, and whether queries and weights are rounded
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "rounded": (torch.bfloat16, True),
    "int8": (torch.int8, False),
}
pytestmark = needs_c


def backend_of(form: str) -> CpuBackend:
    dtype, rounds = FORMS[form]
    weights = torch.float32 if dtype == torch.float32 else torch.bfloat16
    return CpuBackend(c_backend().lib, weights, torch.bfloat16 if rounds else torch.float32)


def pool_of(spec: Any, dtype: torch.dtype, heads: Tensor) -> Pool:
    """heads: [2, slots, kv_heads, head_dim]."""
    pool = Pool(1, spec.kv_heads, spec.head_dim, heads.shape[1], dtype, CPU)
    for part in (0, 1):
        pool.write(0, part, torch.arange(heads.shape[1]), heads[part])
    return pool


def attend(
    form: str, spec: Any, step: StepInput, pool: Pool, q: Tensor, window: int = 0, modifier: Any = None
) -> Tensor:
    wide = torch.nn.functional.pad(q, (0, pool.width - spec.head_dim)).contiguous()
    scores = Scores(spec.head_dim**-0.5, window, modifier)
    return backend_of(form).attend(wide, spec, LayerKV(step, pool, 0), scores)


def step_of(cases: Sequence[Case], starts: Sequence[int]) -> StepInput:
    """The tokens of every case from its start on, then its nodes."""
    step = StepInput()
    for case, start in zip(cases, starts):
        step.chain(case.table, start, [0] * (case.length - start))
        for path in case.paths:
            step.node(case.table, case.length, path, 0)
    return step.build()


def each_row(cases: Sequence[Case], starts: Sequence[int]) -> list[StepInput]:
    """The rows of `step_of`, each in a step of its own."""
    steps = []
    for case, start in zip(cases, starts):
        for row in range(start, case.length):
            steps.append(StepInput())
            steps[-1].chain(case.table, row, [0])
        for path in case.paths:
            steps.append(StepInput())
            steps[-1].node(case.table, case.length, path, 0)
    return [step.build() for step in steps]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 24), (20, 1, 32), (3, 3, 96)])
@pytest.mark.parametrize("window", [0, 13])
def test_a_row_has_the_same_bits_in_any_company(
    form: str, heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """Blocks of one row to 64 queries, odd and even numbers of keys, one thread and two."""
    rng, spec = random.Random(head_dim + window), heads_of(heads, kv_heads, head_dim)
    cases = ragged(rng, [1, 2, 37, 150, 90, 33], 20, SLOTS)
    starts = [0, 0, 36, 149, 20, 33]
    pool = pool_of(spec, FORMS[form][0], torch.randn(2, SLOTS, kv_heads, head_dim))
    together, rows = step_of(cases, starts), each_row(cases, starts)
    modifier = ScoreModifier(2.0, torch.rand(heads), torch.randn(heads))
    q = torch.randn(together.length, heads, head_dim) * 2
    for changed in (None, modifier):
        alone = torch.cat(
            [attend(form, spec, row, pool, q[i : i + 1], window, changed) for i, row in enumerate(rows)]
        )
        assert torch.equal(attend(form, spec, together, pool, q, window, changed), alone)
        with two_threads():
            assert torch.equal(attend(form, spec, together, pool, q, window, changed), alone)


@pytest.mark.parametrize("form", FORMS)
def test_the_places_of_keys_in_the_pool_do_not_matter(form: str) -> None:
    spec, heads = heads_of(4, 2, 64), torch.randn(2, SLOTS, 2, 64)
    case = ragged(random.Random(3), [103], 20, SLOTS)[0]
    moved = torch.randperm(SLOTS)
    to = torch.empty_like(moved)
    to[moved] = torch.arange(SLOTS)
    table = array("i", [int(to[slot]) for slot in case.table])
    other = Case(table, case.length, [[int(to[slot]) for slot in path] for path in case.paths])
    q = torch.randn(23 + len(case.paths), 4, 64)
    found = [
        attend(form, spec, step_of([at], [80]), pool_of(spec, FORMS[form][0], kv), q)
        for at, kv in ((case, heads), (other, heads[:, moved]))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["bfloat16", "rounded"])
def test_queries_are_rounded_only_if_the_backend_rounds_inputs(form: str) -> None:
    spec, step = heads_of(4, 2, 40), random_plan(random.Random(1))
    pool = pool_of(spec, torch.bfloat16, torch.randn(2, SLOTS, 2, 40))
    q = torch.randn(step.length, 4, 40)
    before = attend(form, spec, step, pool, q.bfloat16().float())
    assert torch.equal(attend(form, spec, step, pool, q), before) == FORMS[form][1]


@pytest.mark.parametrize("keys", [2, 3, 34, 35])
def test_weights_are_rounded_after_the_softmax(keys: int) -> None:
    """The last key has the weight 1, the others less; V is 1 for the first key, 0 for the others."""
    spec = heads_of(1, 1, 32)
    heads = torch.zeros(2, keys, 1, 32)
    heads[0, keys - 1, 0, 0] = heads[1, 0] = 1
    q = torch.zeros(1, 1, 32)
    q[0, 0, 0] = 1
    pool, step = pool_of(spec, torch.bfloat16, heads), StepInput()
    step.chain(array("i", range(keys)), keys - 1, [0])
    step.build()
    weight = math.exp(-(32**-0.5))
    for form, first in (("bfloat16", weight), ("rounded", float(torch.tensor(weight).bfloat16()))):
        got = attend(form, spec, step, pool, q)
        near(got, torch.full((1, 32), first / (1 + (keys - 1) * weight)), 1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 2, 24), (8, 1, 128), (3, 3, 40)])
def test_rounding_changes_little(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = heads_of(heads, kv_heads, head_dim)
    pool = pool_of(spec, torch.bfloat16, torch.randn(2, SLOTS, kv_heads, head_dim))
    for seed in range(5):
        step = random_plan(random.Random(seed))
        q = torch.randn(step.length, heads, head_dim)
        expected = attend("bfloat16", spec, step, pool, q)
        near(attend("rounded", spec, step, pool, q), expected, 1.5e-2)
