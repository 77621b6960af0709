"""States of steps without drafts, which a recurrent head reads later or never."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from head_pairs import LONG, check, distribution, run, use_drafter

from outrider import LLM
from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import Batch, Commit
from outrider.core.tree import NO_BUDGET, Budget
from outrider.testing import random_prompts


@pytest.mark.parametrize("rest", [1, 7, 80])
def test_states_of_steps_without_drafts_are_read_together_later(
    llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch, rest: int
) -> None:
    """Drafts pause for so many steps, in which requests come and go.  No pair is missing afterwards."""
    prompts = random_prompts(5, seed=13, longest=40)
    params = [distribution(i, max_tokens=LONG + 11 * i) for i in range(5)]
    llm, drafter = use_drafter(llama, plain, prompts, params, max_num_seqs=3)
    budget, steps, pending = llm.engine.controller.budget, itertools.count(1), list[int]()

    def paused(batch: Batch) -> list[Budget]:
        pending.append(drafter.deferred.num_steps)
        return budget(batch) if next(steps) % (rest + 2) < 2 else [NO_BUDGET] * len(batch)

    monkeypatch.setattr(llm.engine.controller, "budget", paused)
    run(llm, prompts, params)
    assert min(rest + 1, 50) <= max(pending) <= 64
    check(llm, drafter)


def test_a_prompt_that_fills_its_pages_is_cached_without_drafts(llama: str, plain: LLM) -> None:
    """Its last pair is beside a token without a slot, so it is read in the next step; the row ends soon."""
    prompt, params = [3 + i % 20 for i in range(8 * PAGE)], [distribution(0, max_tokens=12)]
    llm, drafter = use_drafter(llama, plain, [prompt], params)
    llm.engine.controller.budget = lambda batch: [NO_BUDGET] * len(batch)  # type: ignore[method-assign]
    run(llm, [prompt], params)
    assert not drafter.deferred.ended
    (again,) = run(llm, [[*prompt, 5]], [distribution(0, max_tokens=1)])
    assert again.num_cached_tokens == 8 * PAGE - 1


def test_rows_that_end_at_once_are_not_kept(llama: str, plain: LLM) -> None:
    """Requests of one token overlap, so that some are always open and no step is deferred."""
    prompts = [[3 + (7 * i + j) % 50 for j in range(50 + 3 * (i % 7))] for i in range(40)]
    params = [distribution(0, max_tokens=1)] * len(prompts)
    llm, drafter = use_drafter(llama, plain, [], [], max_num_seqs=4, max_num_batched_tokens=64)
    most, step = 0, llm.engine.step

    def counted() -> Any:
        nonlocal most
        found = step()
        most = max(most, len(drafter.deferred.ended))
        return found

    llm.engine.step = counted  # type: ignore[method-assign]
    run(llm, prompts, params)
    assert most <= 4


def test_a_lost_plain_step_leaves_a_gap(llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on both sides of one whose states were lost are not taken for neighbours."""
    prompts, params = random_prompts(2, seed=3), [distribution(i, max_tokens=40) for i in range(2)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    drafter.complete = False
    budget, observe, steps, seen = llm.engine.controller.budget, drafter.observe, itertools.count(), []

    def paused(batch: Batch) -> list[Budget]:
        return budget(batch) if next(steps) > 12 else [NO_BUDGET] * len(batch)

    def lossy(commit: Commit) -> None:
        seen.append(commit)
        if len(seen) != 6:
            observe(commit)

    monkeypatch.setattr(llm.engine.controller, "budget", paused)
    monkeypatch.setattr(drafter, "observe", lossy)
    run(llm, prompts, params)
    assert drafter.drafted > 2
    check(llm, drafter, once=False)


def test_deferred_states_of_rows_that_end_are_dropped(
    llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, and nothing is drafted for any of them: only prompts are read."""
    prompts, params = random_prompts(6, seed=3), [distribution(i, max_tokens=20) for i in range(6)]
    llm, drafter = use_drafter(llama, plain, prompts, params, max_num_seqs=2)
    monkeypatch.setattr(llm.engine.controller, "budget", lambda batch: [NO_BUDGET] * len(batch))
    appended: list[Any] = []
    monkeypatch.setattr(drafter.deferred, "append_to", lambda *given: appended.append(given))
    run(llm, prompts, params)
    assert not appended and not drafter.deferred.steps and not drafter.catch_up.cursors


def test_states_from_before_a_preemption_are_not_appended_behind_it(
    llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(2, seed=5), [distribution(i, max_tokens=40) for i in range(2)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    budget, step, steps = llm.engine.controller.budget, llm.engine.step, itertools.count()

    def paused(batch: Batch) -> list[Budget]:
        return budget(batch) if next(steps) > 20 else [NO_BUDGET] * len(batch)

    def preempting() -> list[Row]:
        scheduler = llm.engine.scheduler
        if len(drafter.deferred.steps) and scheduler.running[-1].steps == 9:
            scheduler._preempt(scheduler.running[-1])
        return step()

    def share(row: Row) -> int:
        unread.append(row.computed - filled(row))
        return filled(row)

    filled, unread = drafter.filled, list[int]()
    monkeypatch.setattr(llm.engine.controller, "budget", paused)
    monkeypatch.setattr(llm.engine, "step", preempting)
    monkeypatch.setattr(llm.engine.scheduler.hooks, "filled", share)
    run(llm, prompts, params)
    assert llm.engine.scheduler.preemptions and drafter.drafted > 2 and unread[-1] < 5
    check(llm, drafter, once=False)
