"""Hybrids as draft models: a chain is what the model decodes, also after rejected tokens and prefix hits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid_texts import POSITIONS, Case, prompts, sampling, texts
from hybrids import write

from outrider import LLM
from outrider.core.block_table import PAGE
from outrider.core.recurrent import RecurrentRows
from outrider.core.tree import Draft
from outrider.draft.draft_model.chain_states import ChainStates
from outrider.engine import memory
from outrider.testing import bare_checkpoint, check_idle, run_staggered, visible_parts

DEPTH = 4


@pytest.fixture(scope="module", params=("qwen3.5", "lfm2"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hybrid"))


def use(case: Case, folder: str) -> None:
    case.llm.use({"method": "draft_model", "model": folder, "num_speculative_tokens": DEPTH})


def check_acceptance(case: Case, temperature: float, wrong: bool) -> None:
    """The target's own weights draft what it emits, but for last tokens of chains if these are `wrong`."""
    params = [replace(each, n=1) for each in sampling(temperature)]
    expected = case.expected(prompts(), params)
    use(case, case.folder)
    if wrong:
        spoil_last_tokens(case.llm.engine.proposer)
    for _ in range(2):  # the second time with cached pages
        outputs = run_staggered(case.llm, prompts(), params)
        assert [visible_parts(output.outputs) for output in outputs] == expected
        check_idle(case.llm)
        for stats in (output.outputs[0].speculation for output in outputs):
            assert stats.drafted > DEPTH
            assert stats.accepted == stats.drafted - wrong * stats.drafts
    assert case.llm.engine.scheduler.prefix_hits


def spoil_last_tokens(proposer: Any) -> None:
    propose = proposer.propose

    def spoilt(batch: Any) -> Draft:
        drafts: Draft = propose(batch)
        for tree in drafts.trees:
            if tree.tokens:
                tree.tokens[-1] = 3 + (tree.tokens[-1] + 1) % 290
        return drafts

    proposer.propose = spoilt


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_is_what_the_model_decodes(case: Case, temperature: float, wrong: bool) -> None:
    check_acceptance(case, temperature, wrong)


def test_states_of_rejected_tokens_would_be_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that write to the slot of the committed tokens."""

    def grow(self: ChainStates, step_input: Any, row: Any) -> None:
        step_input.recurrent = step_input.recurrent or RecurrentRows()
        step_input.recurrent.add(2 * self.numbers[row], step_input.length - 1)

    monkeypatch.setattr(ChainStates, "grow", grow)
    with pytest.raises(AssertionError):
        check_acceptance(case, 0.0, True)


def test_another_hybrid_drafts(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another family, most of whose tokens are rejected, beside few pages."""
    write("granite-hybrid-rope", tmp_path)
    params = sampling(0.8)
    expected = case.expected(prompts(), params)
    monkeypatch.setattr(memory, "plan_pages", lambda *given: 7)
    use(case, str(tmp_path))
    assert texts(case.llm, prompts(), params) == expected
    assert case.llm.engine.scheduler.preemptions
    states = case.llm.engine.drafter.states  # type: ignore[attr-defined]
    assert not states.numbers and len(states.free) == 3, "one for each row that ran at once"


@pytest.mark.parametrize("family", ["qwen3.5", "Llama"])
def test_fewer_requests_run_where_states_of_drafts_leave_no_memory(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States of target and draft take half of the memory at most, and everything is within the limit."""
    limit, target, draft = 1_000_000, tmp_path / "target", tmp_path / "draft"
    write("qwen3.5", draft)
    if family == "Llama":
        bare_checkpoint(target, family, seed=3)
    else:
        write(family, target)
    given = prompts()[:2], sampling(0.0)[:2]
    expected = texts(LLM(str(target), max_model_len=POSITIONS), *given)
    for count in (16, 32, 64):
        llm = LLM(
            str(target),
            max_model_len=POSITIONS,
            kv_cache_memory_bytes=limit,
            max_num_seqs=count,
            speculative_config={"method": "draft_model", "model": str(draft)},
        )
        engine, drafter = llm.engine, llm.engine.drafter
        each = engine.decoder.state_bytes(drafter.size(drafter.depth)) + drafter.state_bytes(engine.device)
        most = limit // 2 // each.total()
        assert engine.scheduler.limits.max_num_seqs == min(count, most)
        kv = (engine.decoder.footprint + drafter.footprint(engine.device)).total() * PAGE
        snapshots = len(engine.cache.snapshots.slots) * engine.decoder.state_bytes(0).total()
        assert min(count, most) * each.total() + engine.cache.pages * kv + snapshots <= limit
    assert 1 < most < 64 and f"{most} requests run at once, not 64 (max_num_seqs)" in caplog.text
    assert texts(llm, *given) == expected
