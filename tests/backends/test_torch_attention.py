"""Batched attention of the torch backend: the result of a row in any company, bit for bit."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from covering import pairwise
from kernel_cases import Case, ragged
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.torch import attention
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput

CPU, SLOTS = torch.device("cpu"), 2048


def requests(rng: random.Random) -> list[Case]:
    """Requests of 1 to 300 tokens with trees of up to 12 nodes over scattered slots."""
    lengths = [1, rng.randint(2, 100), rng.choice([127, 128, 129]), rng.randint(200, 300)]
    return ragged(rng, lengths, 12, SLOTS)


def attend(
    step_input: StepInput, q: Tensor, pool: Pool, spec: Any, window: int, modifier: ScoreModifier | None
) -> Tensor:
    groups, kv = attention.prepare(step_input.build(), CPU), LayerKV(step_input, pool)
    return attention.attend(groups, q, spec, kv, Scores(0.25, window, modifier), torch.float64)


@pairwise(
    heads=[(4, 2, 16), (6, 1, 24), (3, 3, 40)],
    window=[0, 40, -50],
    kv_dtype=[torch.float32, torch.bfloat16, torch.int8],
)
def test_batched_rows_equal_the_same_rows_alone(
    heads: tuple[int, int, int], window: int, kv_dtype: torch.dtype
) -> None:
    """Every row of a batch of prompts and trees against the row alone, with all its keys in one slot table.

    q is float64 and the result is not rounded: the sums themselves must agree.
    """
    queries, kv_heads, head_dim = heads
    rng = random.Random(queries + window)
    spec: Any = SimpleNamespace(heads=queries, kv_heads=kv_heads, head_dim=head_dim)
    modifiers = [None, ScoreModifier(5.0, torch.rand(queries), torch.randn(queries))]
    for modifier in modifiers:
        pool = Pool(1, kv_heads, head_dim, SLOTS, kv_dtype, CPU)
        for part in (0, 1):
            pool.write(0, part, torch.arange(SLOTS), torch.randn(SLOTS, kv_heads, head_dim))
        together, cases = StepInput(), requests(rng)
        for table, length, paths in cases:
            start = rng.choice([0, length - 1])
            together.chain(table, start, [0] * (length - start))
            if paths:
                together.nodes(table, length, paths, [0] * len(paths))
        q = torch.randn(together.length, queries, head_dim, dtype=torch.float64)
        found = attend(together, q, pool, spec, window, modifier)
        for row in range(together.length):
            alone, slots = StepInput(), array("i", together.key_slots(row))
            alone.chain(slots, len(slots) - 1, [0])
            expected = attend(alone, q[row : row + 1], pool, spec, window, modifier)
            assert torch.equal(found[row : row + 1], expected), row


def known_on_device(step_input: StepInput, rng: random.Random) -> StepInput:
    """The same level of trees with other slots of paths on the host than on the device."""
    paths = torch.frombuffer(step_input.path_slots, dtype=torch.int32).view(step_input.length, -1).clone()
    for i, slot in enumerate(step_input.path_slots):
        step_input.path_slots[i] = (slot + rng.randrange(9)) % SLOTS
    step_input._paths = [[slot] * len(path) for path, slot in zip(step_input._paths, step_input.slot_mapping)]
    step_input.device_paths = paths
    return step_input


def level_of(rng: random.Random, depth: int) -> StepInput:
    """Nodes of one depth of three trees, from one to twenty of each."""
    step_input, slots = StepInput(), rng.sample(range(SLOTS), 900)
    for length, nodes in ((1, 2), (129, 1), (300, 20)):
        table = array("i", (slots.pop() for _ in range(length)))
        own = [slots.pop() for _ in range(nodes + depth)]
        paths = [[*rng.sample(own[nodes:], depth - 1), own[i]] for i in range(nodes)]
        step_input.nodes(table, length, paths, [0] * nodes)
    return step_input.build()


def test_paths_that_only_a_device_knows_are_read_in_place_of_those_of_the_host() -> None:
    spec: Any = SimpleNamespace(heads=4, kv_heads=2, head_dim=16)
    pool = Pool(1, 2, 16, SLOTS, torch.float32, CPU)
    for part in (0, 1):
        pool.write(0, part, torch.arange(SLOTS), torch.randn(SLOTS, 2, 16))
    for depth in (1, 3):
        q = torch.randn(23, 4, 16)
        wanted = level_of(random.Random(depth), depth)
        hidden = known_on_device(level_of(random.Random(depth), depth), random.Random(5))
        found = [
            attention.attend(
                attention.prepare(step, CPU), q, spec, LayerKV(step, pool), Scores(0.25), torch.float64
            )
            for step in (wanted, hidden)
        ]
        assert torch.equal(*found)


def test_values_that_are_not_finite_stay_within_their_request() -> None:
    spec: Any = SimpleNamespace(heads=2, kv_heads=1, head_dim=16)
    pool = Pool(1, 1, 16, SLOTS, torch.float32, CPU)
    bad, good = array("i", range(10)), array("i", range(20, 30))
    pool.write(0, 0, torch.arange(SLOTS), torch.randn(SLOTS, 1, 16))
    pool.write(0, 1, torch.arange(10), torch.full((10, 1, 16), float("nan")))
    step_input = StepInput()
    for table, tokens in ((bad, 10), (good, 1), (good, 10)):
        step_input.chain(table, 10 - tokens, [0] * tokens)
    found = attend(step_input, torch.randn(21, 2, 16), pool, spec, 0, None)
    assert found[:10].isnan().all() and found[10:].isfinite().all()
