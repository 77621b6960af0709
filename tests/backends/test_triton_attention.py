"""Attention of the Triton kernels: the reference's numbers, and the same bits for a row in any company."""

from __future__ import annotations

import random
from array import array
from typing import Any

import interpreted
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from kernel_cases import heads_of, ragged
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.torch import attention as reference
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.drafting.view import Window

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton import attention
from outrider.backends.triton.plan import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
SLOTS = 1024
MODIFIERS = ["none", "cap", "slopes", "sinks", "all"]
DTYPES = [  # of queries and of K/V
    *((dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # the interpreter is slow
        monkeypatch.setattr(attention, "BLOCK", 16)
        monkeypatch.setattr(attention, "SPLIT", 48)


def modifier_of(name: str, heads: int) -> ScoreModifier | None:
    slopes, sinks = torch.rand(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    return {
        "none": None,
        "cap": ScoreModifier(3.0),
        "slopes": ScoreModifier(slopes=slopes),
        "sinks": ScoreModifier(sinks=sinks),
        "all": ScoreModifier(2.0, slopes, sinks),
    }[name]


def filled(spec: Any, dtype: torch.dtype) -> Pool:
    pool = Pool(2, spec.kv_heads, spec.head_dim, SLOTS, dtype, DEVICE)
    for part in (0, 1):
        pool.write(
            1, part, torch.arange(SLOTS), torch.randn(SLOTS, spec.kv_heads, spec.head_dim, device=DEVICE)
        )
    return pool


def attend(
    step_input: StepInput, q: Tensor, pool: Pool, spec: Any, window: int, modifier: ScoreModifier | None
) -> Tensor:
    kv, scores = LayerKV(step_input, pool, 1), Scores(0.25, window, modifier)
    return attention.attend(q, spec, plan_of(step_input, DEVICE), kv, scores)


def expected(
    step_input: StepInput, q: Tensor, pool: Pool, spec: Any, window: int, modifier: ScoreModifier | None
) -> Tensor:
    groups, kv = reference.prepare(step_input, DEVICE), LayerKV(step_input, pool, 1)
    return reference.attend(groups, q, spec, kv, Scores(0.25, window, modifier), torch.float64)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


def batch(rng: random.Random, lengths: list[int], most_nodes: int, most_known: int = 4) -> StepInput:
    step_input = StepInput()
    for table, length, paths in ragged(rng, lengths, most_nodes, SLOTS):
        start = length - rng.randint(1, min(length, most_known))
        step_input.chain(table, start, [0] * (length - start))
        if paths:
            step_input.nodes(table, length, paths, [0] * len(paths))
    return step_input.build()


@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rng=st.randoms(use_true_random=False),
    layout=st.sampled_from([(4, 2, 64), (6, 1, 16), (2, 2, 40), (2, 1, 96), (20, 1, 8), (2, 1, 256)]),
    dtypes=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 0, 3, 20, -5, -20]),
    modifier=st.sampled_from(MODIFIERS),
)
def test_ragged_trees_get_the_numbers_of_the_reference(
    rng: Any,
    layout: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    window: int,
    modifier: str,
) -> None:
    torch.manual_seed(0)
    spec, changed = heads_of(*layout), modifier_of(modifier, layout[0])
    if DEVICE.type == "cuda" and spec.head_dim > 64:
        dtypes = torch.bfloat16, torch.bfloat16  # float32 takes a minute to compile
    pool = filled(spec, dtypes[1])
    step_input = batch(rng, [rng.randint(1, attention.BLOCK + 4), attention.SPLIT + rng.randint(-2, 2)], 4)
    q = torch.randn(step_input.length, spec.heads, spec.head_dim, device=DEVICE).to(dtypes[0])
    found = attend(step_input, q, pool, spec, window, changed)
    near(found, expected(step_input, q, pool, spec, window, changed), dtypes[0])


@pytest.mark.parametrize(
    ("window", "modifier", "kv_dtype"),
    [(0, "none", torch.int8), (20, "all", torch.float32), (-20, "none", torch.float32)],
    ids=str,
)
def test_a_row_gets_the_same_bits_alone_and_in_a_batch(
    window: int, modifier: str, kv_dtype: torch.dtype
) -> None:
    """Rows of chains and trees at the borders of blocks and splits, against each row alone.

    Alone, all its keys are in one slot table, as in plain decoding.
    """
    torch.manual_seed(0)
    rng, spec = random.Random(window), heads_of(2, 1, 16)
    pool, changed = filled(spec, kv_dtype), modifier_of(modifier, 2)
    step_input = batch(rng, [attention.BLOCK - 2, attention.SPLIT - 2, attention.SPLIT + 3], 6, 1)
    q = torch.randn(step_input.length, 2, 16, device=DEVICE)
    found = attend(step_input, q, pool, spec, window, changed)
    for row in range(step_input.length):
        alone, slots = StepInput(), array("i", step_input.key_slots(row))
        alone.chain(slots, len(slots) - 1, [0])
        assert torch.equal(
            found[row : row + 1], attend(alone.build(), q[row : row + 1], pool, spec, window, changed)
        ), row


def test_a_prompt_chunk_gets_the_bits_of_its_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the sums of a step exceed their memory and its rows are computed one part after another."""
    torch.manual_seed(0)
    spec, step_input, slots = heads_of(2, 1, 16), StepInput(), array("i", range(300))
    pool = filled(spec, torch.float32)
    step_input.chain(slots, 270, [0] * 20)
    q = torch.randn(20, 2, 16, device=DEVICE)
    found = attend(step_input.build(), q, pool, spec, 0, None)
    monkeypatch.setattr(attention, "PARTIAL_BYTES", 1)
    assert len(attention._parts(step_input.query_start, 1000)) == 2
    assert torch.equal(attend(step_input, q, pool, spec, 0, None), found)
    for row in (15, 16):
        alone = StepInput.of_chain(slots, 270 + row, [0])
        assert torch.equal(attend(alone, q[row : row + 1], pool, spec, 0, None), found[row : row + 1])


@pytest.mark.parametrize("window", [6, -9])
def test_views_attend_to_positions_of_the_text(window: int) -> None:
    torch.manual_seed(0)
    rng, spec = random.Random(1), heads_of(4, 2, 16)
    pool, views, step_input = filled(spec, torch.float32), Window(3, 9), StepInput(3)
    for table, length, paths in ragged(rng, [2, 40], 5, SLOTS):
        view = views.read(step_input, table, length - 1, [0], len(paths))
        for path in paths:
            view.node(step_input, length, [table.index(slot) - length for slot in path], 0)
    modifier = ScoreModifier(slopes=torch.rand(4, device=DEVICE))
    q = torch.randn(step_input.build().length, 4, 16, device=DEVICE)
    found = attend(step_input, q, pool, spec, window, modifier)
    near(found, expected(step_input, q, pool, spec, window, modifier), torch.float32)


def test_values_that_are_not_finite_stay_within_their_request() -> None:
    spec, step_input = heads_of(2, 1, 16), StepInput()
    pool = filled(spec, torch.float32)
    pool.write(1, 1, torch.arange(10), torch.full((10, 1, 16), float("nan"), device=DEVICE))
    bad, good = array("i", range(10)), array("i", range(20, 30))
    step_input.chain(bad, 0, [0] * 10)
    step_input.chain(good, 5, [0] * 5)
    found = attend(step_input.build(), torch.randn(15, 2, 16, device=DEVICE), pool, spec, 0, None)
    assert found[:10].isnan().all() and found[10:].isfinite().all()


def test_the_interpreter_runs_where_there_is_no_device() -> None:
    assert torch.cuda.is_available() or interpreted.os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 16), (6, 2, 64), (8, 8, 24)])
def test_keys_of_a_path_are_summed_as_those_of_a_table(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    assert attention.same_with_paths(heads_of(heads, kv_heads, head_dim, False), DEVICE, dtype)


def test_sums_that_depend_on_the_slots_of_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes of trees miss their last key."""
    plan_of = attention.plan_of

    def cut(step: StepInput, device: torch.device) -> Any:
        plan = plan_of(step, device)
        return plan._replace(num_keys=plan.num_keys - 1) if step.max_path_len else plan

    monkeypatch.setattr(attention, "plan_of", cut)
    attention._same_with_paths.cache_clear()
    assert not attention.same_with_paths(heads_of(2, 1, 16, False), DEVICE, torch.float32)
    attention._same_with_paths.cache_clear()
