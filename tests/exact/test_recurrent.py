"""Hybrid models: text with draft trees, replays, preemption and chunks is that of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import answer, transformers_tokens
from hybrid_texts import NEW, POSITIONS, Case, prompts, sampling, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import LLM
from outrider.backends import recurrent_path
from outrider.core.step import Batch
from outrider.draft import names
from outrider.engine import memory
from outrider.engine.row_states import RowStates
from outrider.errors import CapacityError, ConfigError
from outrider.testing import (
    EngineDriver,
    bare_checkpoint,
    check_idle,
    run_staggered,
    use_example,
    visible_parts,
)

# the first two in the lean decoder
CASES = ("qwen3.5", "qwen3-next", "olmo-hybrid", "granite-hybrid-rope", "lfm2")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hybrid"))


def test_greedy_text_is_that_of_transformers(case: Case) -> None:
    """With a draft tree around it: `generate` of transformers has its own cache, and chunks."""
    given = prompts((23, 23, 23))
    params = [replace(p, max_tokens=NEW) for p in sampling(0.0, 3)]
    case.expected(given, params)
    case.llm.use(case.script("hidden"))
    found = [output.outputs[0].token_ids for output in run_staggered(case.llm, given, params)]
    assert found == transformers_tokens(case.theirs, given, NEW)
    assert all(len(set(text)) > NEW // 2 for text in found), "texts that repeat are not worth comparing"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_and_chains_change_no_text(case: Case, temperature: float) -> None:
    """Ragged batches of three, prompts in chunks, chains that are right or wrong, trees around the truth."""
    params = sampling(temperature)
    expected = case.expected(prompts(), params)
    for kind in ("right", "wrong", "hidden", "wide", "messy"):
        case.llm.use(case.script(kind))
        assert texts(case.llm, prompts(), params) == expected, kind


def test_preempted_rows_begin_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for one long row and a little more: rows lose their states, and compute them again."""
    params = sampling(0.8)
    expected = case.expected(prompts(), params)
    monkeypatch.setattr(memory, "plan_pages", lambda *given: 5)
    case.llm.use(case.script("hidden"))
    assert texts(case.llm, prompts(), params) == expected
    assert case.llm.engine.scheduler.preemptions


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    kind=st.sampled_from(["right", "hidden", "wide", "deep", "messy", "wrong"]),
    nodes=st.integers(1, 30),
    depth=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.9]),
    aborts=st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=2),
)
def test_any_batch(
    case: Case,
    lengths: list[int],
    kind: str,
    nodes: int,
    depth: int,
    temperature: float,
    aborts: dict[int, int],
) -> None:
    """Rows of any lengths, some aborted in between, with any drafts."""
    given, params = prompts(tuple(lengths)), sampling(temperature, len(lengths))
    expected = case.expected(given, params)
    case.llm.use(case.script(kind, nodes, depth))
    outputs = run_staggered(case.llm, given, params, aborts)
    for i, output in enumerate(outputs):
        if i not in aborts:
            assert visible_parts(output.outputs) == expected[i]
    check_idle(case.llm)


@pytest.mark.parametrize("method", ["auto", "ngram", "suffix", "recycle", "eagle3", "medusa"])
def test_methods_change_no_text(case: Case, method: str) -> None:
    params = sampling(0.8)
    expected = case.expected(prompts(), params)
    if method == "auto":
        case.llm.use({"method": "auto"})
    else:
        assert method in names()
        use_example(case.llm, method)
    for _ in range(2):  # the second time with what the first has taught
        assert texts(case.llm, prompts(), params) == expected


def test_an_interrupted_step_is_computed_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh forward is interrupted: all rows lose their states."""
    given, params = prompts((6, 9, 12)), [replace(p, max_tokens=8) for p in sampling(0.8, 3)]
    case.expected(given, params)
    expected = [visible_parts(answer(case.llm, prompt, p).outputs) for prompt, p in zip(given, params)]
    case.llm.use(case.script("hidden"))
    engine, calls = case.llm.engine, itertools.count(1)
    forward = engine.decoder.forward_step

    def interrupted(*args: Any, **named: Any) -> Any:
        result = forward(*args, **named)
        if next(calls) % 7 == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(engine.decoder, "forward_step", interrupted)
    driver = EngineDriver(case.llm)
    requests = [driver.make_request(prompt, p) for prompt, p in zip(given, params)]
    tickets = [case.llm.loop.submit(request.rows) for request in requests]
    interrupts = 0
    while not all(ticket.finished for ticket in tickets):
        try:
            case.llm.loop.run_until(lambda: all(ticket.finished for ticket in tickets))
        except KeyboardInterrupt:
            interrupts += 1
            engine.check()
    assert interrupts
    assert [visible_parts(request.output().outputs) for request in requests] == expected
    check_idle(case.llm)


# ---- the tests above can fail


def one_replay_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = RowStates.settle

    def spoilt(self: RowStates, batch: Batch) -> None:
        settle(self, batch)
        self.accepted = {table: kept[:-1] for table, kept in self.accepted.items()}

    monkeypatch.setattr(RowStates, "settle", spoilt)


def replays_of_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = RowStates.settle

    def spoilt(self: RowStates, batch: Batch) -> None:
        settle(self, batch)
        self.accepted = {table: [*range(len(kept))] for table, kept in self.accepted.items()}

    monkeypatch.setattr(RowStates, "settle", spoilt)


def chains_for_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_path, "_parents", lambda step_input, known, end: [*range(known, end - 1)])


def stale_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverFresh(recurrent_path.Path):
        def __init__(self, parent: Any, slot: Any, save: Any, fresh: Any, copies: Any) -> None:
            super().__init__(parent, slot, save, (), copies)

    monkeypatch.setattr(recurrent_path, "Path", NeverFresh)


@pytest.mark.parametrize("spoil", [one_replay_too_few, replays_of_siblings, chains_for_trees, stale_states])
def test_a_broken_engine_is_noticed(
    case: Case, spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = sampling(0.8)
    expected = case.expected(prompts(), params)
    case.llm.use(case.script("hidden"))
    assert texts(case.llm, prompts(), params) == expected
    spoil(monkeypatch)
    assert texts(case.llm, prompts(), params) != expected


def test_a_draft_model_with_attention_drafts_for_a_hybrid(case: Case, tmp_path: Path) -> None:
    draft, params = bare_checkpoint(tmp_path, "Llama", seed=3), sampling(0.8)
    expected = case.expected(prompts(), params)
    case.llm.use({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, "siblings": 2})
    assert texts(case.llm, prompts(), params) == expected


# ---- what is refused


def test_a_hybrid_is_not_its_own_draft_model(case: Case) -> None:
    with pytest.raises(ConfigError, match="has recurrent layers, and cannot be its own draft model"):
        case.llm.use({"method": "draft_model", "model": "self", "draft_kv_budget": 16})


@pytest.mark.parametrize(
    "given", [{"siblings": 2}, {"draft_kv_budget": 16}, {"drafter": {"method": "ngram"}}]
)
def test_a_hybrid_drafts_chains_only(case: Case, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"and drafts plain chains .* leave {next(iter(given))} out"):
        case.llm.use({"method": "draft_model", "model": case.folder, **given})


def test_skipping_layers_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="layers can be skipped in"):
        use_example(case.llm, "layerskip")


def test_states_are_a_part_of_the_memory(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    decoder = case.llm.engine.decoder
    row, slot = decoder.state_bytes(0).total(), decoder.footprint.total()
    full = POSITIONS * slot
    with pytest.raises(CapacityError, match=r"beside [\d,]+ bytes of recurrent states"):
        LLM(case.folder, max_model_len=POSITIONS, kv_cache_memory_bytes=full + row - 1)
    few = LLM(case.folder, max_model_len=POSITIONS, kv_cache_memory_bytes=2 * full + 2 * row)
    assert 1 <= few.engine.cache.states <= 16
    assert few.engine.scheduler.limits.max_num_seqs == few.engine.cache.states
