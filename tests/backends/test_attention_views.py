"""Views: which keys a draft with a K/V budget sees, in the plan, in the C kernels and in the reference."""

from __future__ import annotations

import random
import shutil
from array import array
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import attended_slots, requests_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider import ConfigError
from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.draft.draft_model import DraftModel
from outrider.drafting.view import View, Window

CPU, SLOTS = torch.device("cpu"), 400


class ForwardOutput(NamedTuple):
    """What one row must see: its own position, and the position and the slot of every key, in order."""

    position: int
    keys: list[tuple[int, int]]


def scene(
    rng: random.Random, sink: int, recent: int, requests: int = 3, longest: int = 60
) -> tuple[StepInput, list[ForwardOutput]]:
    """Requests whose known tokens and draft trees are read through a window, and the keys each row sees."""
    window, step_input, expected = Window(sink, recent), StepInput(sink), []
    slots = rng.sample(range(SLOTS), SLOTS)
    for _ in range(requests):
        end, nodes = rng.randint(1, longest), rng.randint(0, 8)
        start = max(0, end - rng.choice([1, 1, 3, 20]))
        table = array("i", [slots.pop() for _ in range(end + nodes)])
        view = window.read(step_input, table, start, [0] * (end - start), nodes)
        oldest = 0
        for p in range(start, end):
            piece = (
                start + (p - start) // recent * recent
            )  # the rows of a piece share what its first row sees
            oldest = max(0, piece + 1 - recent)
            shown = [q for q in range(p + 1) if q < sink or q >= oldest]
            expected.append(ForwardOutput(p, [(q, table[q]) for q in shown]))
        known = expected[-1].keys
        if rng.random() < 0.5:
            view.chain(step_input, end, [0] * nodes)
            draft_tree = [(end + i, table[end + i]) for i in range(nodes)]
            expected += [ForwardOutput(end + i, [*known, *draft_tree[: i + 1]]) for i in range(nodes)]
            continue
        paths: list[list[int]] = []
        for node in range(nodes):
            parent = rng.randint(-1, node - 1)
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            view.node(step_input, end, paths[node], 0)
            last = end + len(paths[node]) - 1
            expected.append(
                ForwardOutput(last, [*known, *((end + d, table[end + i]) for d, i in enumerate(paths[node]))])
            )
    return step_input.build(), expected


def checked(step_input: StepInput, expected: list[ForwardOutput]) -> None:
    assert step_input.positions == [row.position for row in expected]
    assert step_input.slot_mapping == [row.keys[-1][1] for row in expected]
    assert step_input.max_seq_len == max(len(row.keys) for row in expected)
    for table, first, count in requests_of(step_input):
        for i, row in enumerate(expected[first : first + count], first):
            shift = step_input.key_shift(i)
            positions = [j + shift * (j >= step_input.pinned) for j in range(len(row.keys))]
            assert list(zip(positions, step_input.key_slots(i))) == row.keys
            assert attended_slots(step_input, table, i) == [slot for _, slot in row.keys], (
                "the C kernels see the same keys"
            )


@given(st.randoms(use_true_random=False), st.integers(0, 6), st.integers(1, 20))
def test_row_attends_to_sink_recent_tokens_and_ancestors(rng: Any, sink: int, recent: int) -> None:
    step_input, expected = scene(rng, sink, recent)
    checked(step_input, expected)
    for row in expected:
        assert len(row.keys) >= min(row.position + 1, sink + recent), "less than the budget"


def test_a_budget_of_six_with_two_sinks() -> None:
    """The picture in window.py, by hand."""
    step_input, table = StepInput(2), array("i", range(100, 112))
    view = Window.of(6, 2).read(step_input, table, 8, [7], 3)
    view.chain(step_input, 9, [1, 2])
    step_input.build()
    assert [attended_slots(step_input, view.slots, row) for row in range(3)] == [
        [100, 101, 105, 106, 107, 108],
        [100, 101, 105, 106, 107, 108, 109],
        [100, 101, 105, 106, 107, 108, 109, 110],
    ]
    assert step_input.positions == [8, 9, 10]


@pytest.mark.parametrize("window", [Window.of(None, 4), Window.of(10, 4), Window.of(11, 0)])
def test_within_the_budget_nothing_changes(window: Window) -> None:
    """Ten tokens and ten in the budget: the request's own table, without copy or shift."""
    step_input, table = StepInput(window.sink), array("i", range(16))
    for start in range(10):
        assert window.read(step_input, table, start, [0] * (10 - start), 4) == View(table)
    assert len(step_input.slot_tables) == 1 and step_input.slot_tables[0] is table


# ---- the kernels


def by_definition(
    q: Tensor, pool: Pool, expected: list[ForwardOutput], window: int, modifier: ScoreModifier | None
) -> Tensor:
    """Row by row; windows, chunks and slopes count positions."""
    out = []
    for row, seen in enumerate(expected):
        first = seen.position // -window * -window if window < 0 else seen.position + 1 - window
        near = [(at, slot) for at, slot in seen.keys if not window or at >= first]
        ahead = torch.tensor([at - seen.position for at, _ in near])
        keys, values = pool.read(0, torch.tensor([slot for _, slot in near]), torch.float64)
        for head in range(4):
            scores = keys[:, head // 2] @ q[row, head].double() * 0.25
            if modifier is not None and modifier.slopes is not None:
                scores += modifier.slopes[head] * ahead
            out.append(scores.softmax(0) @ values[:, head // 2])
    return torch.stack(out).view(len(expected), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 50, -1, -5, -16, -50])
def test_all_kernels_attend_to_the_view(window: int, sloped: bool, dtype: torch.dtype) -> None:
    """Attention through a view: the reference against the definition, and C against the reference.

    Windows and chunks (below 0), shorter and longer than the view, follow positions of the text: a pinned key
    that is near in the view and far in the text is not attended to.
    """
    torch.manual_seed(0)
    spec = SimpleNamespace(heads=4, kv_heads=2, head_dim=24, q_norm=None, k_norm=None, eps=1e-6)
    pool = Pool(1, 2, 24, SLOTS, dtype, CPU)
    for part in (0, 1):
        pool.write(0, part, torch.arange(SLOTS), torch.randn(SLOTS, 2, 24))
    modifier = ScoreModifier(slopes=torch.rand(4)) if sloped else None
    for seed in range(4):
        step_input, expected = scene(random.Random(seed), sink=3, recent=9)
        q = torch.randn(step_input.length, 4, 24)
        want = by_definition(q, pool, expected, window, modifier)
        got: Any = TorchBackend(CPU, torch.float32).attend(
            q, spec, LayerKV(step_input, pool, 0), Scores(0.25, window, modifier)
        )
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        if any(map(shutil.which, ("cc", "gcc", "clang"))):
            wide = torch.nn.functional.pad(q, (0, pool.width - 24)).contiguous()
            ours = backend_for(CPU, torch.float32).attend(
                wide, spec, LayerKV(step_input, pool, 0), Scores(0.25, window, modifier)
            )
            torch.testing.assert_close(
                ours.double(), want, rtol=1e-4, atol=0.05 if dtype == torch.int8 else 1e-4
            )


# ---- what a user may ask for


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft_kv_budget": 4}, "at least draft_kv_sink \\+ 1 = 5 .* got 4"),
        ({"draft_kv_budget": 0, "draft_kv_sink": 0}, "= 1 .* got 0"),
        ({"draft_kv_budget": 8, "draft_kv_sink": 8}, "= 9 .* got 8"),
        ({"draft_kv_budget": "many"}, "draft_kv_budget .* 'many'"),
        ({"draft_kv_budget": True}, "draft_kv_budget .* True"),
        ({"draft_kv_budget": 64, "draft_kv_sink": -1}, "draft_kv_sink .* -1"),
        ({"draft_kv_sink": 2.0}, "draft_kv_sink .* 2.0"),
        ({"model": "self"}, "needs a draft_kv_budget"),
        (
            {"model": "self", "draft_kv_budget": 64, "quantization": "int8"},
            "quantization = 'int8' .* leave it out",
        ),
        ({"model": "self", "draft_kv_budget": 64, "draft_gpu_layers": 0}, "draft_gpu_layers = 0"),
        ({"model": "self", "draft_kv_budget": 64, "vocab_mismatch": "allow"}, "vocab_mismatch = 'allow'"),
    ],
)
def test_wrong_budgets_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftModel.Options(**keys)


def test_the_smallest_budgets_are_accepted() -> None:
    assert Window.of(5, 4) == Window(4, 1)
    DraftModel.Options(draft_kv_budget=1, draft_kv_sink=0)
    DraftModel.Options(model="self", draft_kv_budget=5)
