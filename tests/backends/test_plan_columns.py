"""Plans of steps and of levels of chains, which are laid out by columns, against a plan row by row."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
import torch
from interpreted import needs_triton

from outrider.core.noise import key_in
from outrider.core.params import DistributionParams
from outrider.core.step_input import StepInput

pytestmark = needs_triton
KINDS = ("tokens", "chains", "trees", "views")
GREEDY, SAMPLED = DistributionParams(0.0), DistributionParams(0.8)


def tables(count: int) -> list[array[int]]:
    return [array("i", range(100 * i, 100 * i + 100)) for i in range(count)]


def step_of(kind: str, rng: random.Random) -> StepInput:
    step = StepInput(2 if kind == "views" else 0)
    for table in tables(rng.randint(1, 5)):
        start, count = rng.randint(2, 40), rng.randint(1, 40)
        if kind == "tokens":
            step.token(table, start, rng.randrange(50))
        elif kind == "views":
            step.chain(table, start, [1] * count, rng.choice([0, 7]))
        else:
            step.chain(table, start, [1] * count)
        if kind == "trees" and rng.random() < 0.7:
            first = start + count
            step.nodes(table, first, [[table[first]], [table[first], table[first + 1]]], [3, 4])
    return step.build()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_those_of_every_row(kind: str) -> None:
    from outrider.backends.triton.plan import ALL, PIECE, plan_of, tables_of

    rng = random.Random(3)
    for _ in range(20):
        step = step_of(kind, rng)
        plan, places = plan_of(step, torch.device("cpu")), tables_of(step).places
        shared, own_tables, pieces = list[int](), list[int](), list[int]()
        for table, (first, end) in zip(step.slot_tables, pairwise(step.query_start)):
            for at in range(first, end, PIECE):
                rows = range(at, min(at + PIECE, end))
                least = min([step.context_lens[row] for row in rows if step.path_lens[row]], default=ALL)
                shared += [least] * len(rows)
                own_tables += [places[id(table)]] * len(rows)
                pieces += at, len(rows), least
        keys = [context + path for context, path in zip(step.context_lens, step.path_lens)]
        shifts = [step.key_shift(row) for row in range(step.length)]
        assert plan.num_keys.tolist() == keys and plan.shifts.tolist() == shifts
        assert plan.shared.tolist() == shared and plan.tables.tolist() == own_tables
        assert plan.pieces.tolist() == pieces
        for row, context in enumerate(step.context_lens):
            seen = plan.table_slots[own_tables[row] : own_tables[row] + context].tolist()
            assert [*seen, *step._paths[row]] == step.key_slots(row)
    assert any(shifts) == (kind == "views")


def test_tokens_of_several_requests_are_added_as_one_by_one() -> None:
    rng, of = random.Random(4), tables(6)
    positions = [rng.randrange(90) for _ in of]
    together, alone = StepInput(), StepInput()
    together.tokens(of, positions)
    for table, position in zip(of, positions):
        alone.token(table, position, 0)
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "query_start", "max_seq_len"):
        assert getattr(together, name) == getattr(alone, name)
    assert together.build().columns == alone.build().columns and together.slot_tables == alone.slot_tables


@pytest.mark.parametrize("shift", [0, 5])
def test_levels_of_chains_are_steps_of_one_row_each(shift: int) -> None:
    """Chains of several lengths, whose graph has room for more of them, and for more rows."""
    from outrider.backends.base import Chain, Chains
    from outrider.backends.triton.chain_numbers import ChainNumbers
    from outrider.backends.triton.plan import Sizes, columns_of, tables_of

    step, levels, count = StepInput(0), [3, 1, 2], 4
    for i, table in enumerate(tables(3)):
        step.chain(table, 4 + i, [1, 2], shift)
    step.build()
    chains = [
        Chain(2 * i + 1, depth, (SAMPLED, GREEDY, SAMPLED)[i], 70 + i) for i, depth in enumerate(levels)
    ]
    exact = Sizes.of(step, more=2)
    numbers = ChainNumbers(exact._replace(rows=8, pieces=8), 3, count)
    flat = torch.zeros(numbers.total, dtype=torch.int32)
    own = numbers.of(step, Chains(chains, 50))
    flat[: len(own)] = torch.tensor(own, dtype=torch.int32)
    given, places = numbers.split(flat), tables_of(step, 2).places
    for level in range(3):
        for i, chain in enumerate(chains):
            position = 6 + i + shift + level
            noise = key_in(chain.stream, position) if chain.distribution is SAMPLED else 0
            assert given.owners[level, i].tolist() == [i, noise - (noise >> 63 << 64)]
    for level, plan in enumerate(given.levels, 1):
        for i, depth in enumerate(levels):
            if level >= depth:
                assert (plan.slots[i], plan.num_keys[i], plan.contexts[i]) == (-1, 0, 0)
                continue
            one = StepInput()
            one.chain(step.slot_tables[i], 5 + i + level, [0], shift)
            columns = columns_of(one.build(), Sizes.of(one), tables_of(one))
            assert [column[i] for column in plan[:6]] == [columns[8 * at] for at in range(6)]
            assert plan.tables[i] == places[id(step.slot_tables[i])]
        assert plan.slots[3:].tolist() == [-1] and plan.num_keys[3:].tolist() == [0]
        assert plan.pieces[: 3 * len(levels)].view(-1, 3)[:, :2].tolist() == [[0, 1], [1, 1], [2, 1]]
        assert plan.pieces[9:11].tolist() == [3, 0]
