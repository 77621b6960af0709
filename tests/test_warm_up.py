"""Warm-up: every batch size and every drafter comes up once, and only costs are learned from it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

from outrider import LLM, SamplingParams
from outrider.core.clock import may_record, one_recording, records_at_once
from outrider.core.step import Batch
from outrider.testing import check_idle

METHODS = [{"model": "builtin-draft"}, {"method": "ngram"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = {"method": "auto", "drafters": METHODS}
    return LLM("builtin", speculative_config=config, max_num_seqs=6, max_model_len=256)


class Seen(NamedTuple):
    """A step of a warm-up: rows, what drafts, tokens of the longest draft, whether all rows have a salt."""

    count: int
    method: str | None
    depth: int
    salted: bool
    at_once: bool


class Warmed(NamedTuple):
    """A warm-up: its steps, and report and controller of before and after."""

    steps: list[Seen]
    before: dict[str, Any]
    after: dict[str, Any]
    controllers: tuple[Any, Any]


@pytest.fixture(scope="module")
def warmed(llm: LLM) -> Warmed:
    seen, begin = list[Seen](), llm.engine.runner.begin
    before, controller = llm.engine.report(), llm.engine.controller

    def watched(batch: Batch, needs: Any) -> Any:
        params = batch[0].row.params
        method = params.draft_method if params.speculate else "plain"
        depth = max(len(step.tree.tokens) for step in batch)
        salted = all(step.row.cache_salt for step in batch)
        seen.append(Seen(len(batch), method, depth, salted, records_at_once()))
        return begin(batch, needs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "begin", watched)
        llm.warm_up()
    return Warmed(seen, before, llm.engine.report(), (controller, llm.engine.controller))


def test_batches_of_all_sizes_are_plain_and_drafted_by_each_method(warmed: Warmed) -> None:
    assert {(step.count, step.method) for step in warmed.steps} >= set(
        itertools.product((1, 2, 4, 6), ("plain", "draft_model", "ngram"))
    )
    assert all(step.salted and step.at_once for step in warmed.steps) and not records_at_once()


def test_drafts_of_every_depth_come_up(warmed: Warmed) -> None:
    seen = {(step.count, step.depth) for step in warmed.steps}
    assert seen >= {*itertools.product((1, 2, 4, 6), range(6))}


COSTS = ("ms_fixed", "ms_per_level", "outlook")


def without_costs(report: dict[str, Any]) -> dict[str, Any]:
    drafters = {
        name: {key: value for key, value in drafter.items() if key not in COSTS}
        for name, drafter in report["drafters"].items()
    }
    return {**report, "step_ms": None, "drafters": drafters}


def test_only_costs_are_learned(llm: LLM, warmed: Warmed) -> None:
    before, after = warmed.before, warmed.after
    assert without_costs(after) == without_costs(before) and warmed.controllers[0] is warmed.controllers[1]
    assert after["drafters"]["draft_model"]["ms_per_level"] > 0
    assert llm.engine.steps == 0 and not llm.engine.cache.index
    assert llm.engine.scheduler.prefix_queries == 0
    check_idle(llm)


def test_requests_without_a_seed_get_the_texts_that_they_would_have_without_it() -> None:
    params, found = SamplingParams(max_tokens=20, temperature=1.0), []
    for warms_up in (False, True):
        llm = LLM("builtin", speculative_config=None, max_num_seqs=2, max_model_len=256, seed=0)
        if warms_up:
            llm.warm_up()
        found.append(llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_a_schedule_of_draft_lengths_stays_where_it_was() -> None:
    config = {"model": "builtin-draft", "num_assistant_tokens_schedule": "heuristic"}
    llm = LLM("builtin", speculative_config=config, max_num_seqs=2, max_model_len=256)
    memory, pacer = repr(llm.engine.drafter.memory), repr(vars(llm.engine.pacer))
    assert "length=5" in memory, memory
    llm.warm_up()
    assert repr(llm.engine.drafter.memory) == memory and repr(vars(llm.engine.pacer)) == pacer


def test_a_controller_that_fails_to_answer_comes_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> None:
        raise RuntimeError("no memory")

    controller, adaptive = llm.engine.controller, llm.engine.adaptive
    monkeypatch.setattr(llm, "generate", failing)
    with pytest.raises(RuntimeError):
        llm.warm_up()
    assert llm.engine.controller is controller and llm.engine.adaptive is adaptive
    with one_recording:
        assert may_record() and not may_record()
