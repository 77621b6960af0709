"""Hybrid models resume at snapshots of their states: the text stays, no known prompt is computed again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import answer
from hybrid_texts import Case, sampling, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.cache.snapshots import Snapshots
from outrider.core.block_table import PAGE
from outrider.engine import memory
from outrider.engine.row_states import RowStates
from outrider.engine.scheduler import Hooks
from outrider.testing import bare_checkpoint, check_idle, run_staggered, use_example, visible_parts

POSITIONS, CHUNK = 160, 40
NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module", params=("qwen3.5", "qwen3-next", "granite-hybrid-rope", "lfm2"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hybrid"), POSITIONS, CHUNK)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def related(which: list[tuple[int, int]]) -> list[list[int]]:
    """Prompts by (stem, length): those of stem 1 share 41 tokens with those of stem 0."""
    stems = text(110, 0), text(41, 0) + text(69, 1), text(110, 2)
    return [stems[stem][:length] for stem, length in which]


def cached(case: Case, config: Any, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[int]:
    """Cached tokens of prompts that are answered one after another, with the texts of plain decoding."""
    expected, found = case.expected(prompts, [params] * len(prompts)), list[int]()
    case.llm.use(config)
    for prompt, plain in zip(prompts, expected):
        output = answer(case.llm, prompt, params)
        assert visible_parts(output.outputs) == plain
        check_idle(case.llm)
        assert output.num_cached_tokens is not None
        found.append(output.num_cached_tokens)
    return found


def test_a_chat_resumes_at_the_last_full_page_of_its_output(case: Case) -> None:
    """The K/V and the state of 70 + 20 - 1 tokens were computed, 80 of them are in full pages."""
    first = text(70)
    case.llm.use(None)
    second = first + list(answer(case.llm, first, GREEDY).outputs[0].token_ids) + text(9, 5)
    assert cached(case, None, [first, second]) == [0, 80]


@pytest.mark.parametrize("kind", ["right", "hidden", "wide", "wrong"])
def test_a_chat_with_drafts_resumes_behind_its_prompt(case: Case, kind: str) -> None:
    """Borders that lie between accepted nodes have a snapshot, too: of their replay."""
    first = text(70)
    case.llm.use(None)
    second = first + list(answer(case.llm, first, GREEDY).outputs[0].token_ids) + text(9, 5)
    assert cached(case, case.script(kind), [first, second]) == [0, 80]


def test_a_prompt_resumes_at_its_last_full_page(case: Case) -> None:
    assert cached(case, None, [text(70)] * 2, SAMPLED) == [0, 64]
    assert cached(case, None, [text(64)] * 2, SAMPLED) == [0, 48], "one token has to be computed"
    assert cached(case, None, [text(PAGE)] * 2, SAMPLED) == [0, 0]


@pytest.mark.parametrize("method", ["scripted", "eagle3"])
def test_samples_share_their_prompt(case: Case, method: str) -> None:
    params = replace(SAMPLED, n=3)
    expected = case.expected([text(70)], [params])
    if method == "scripted":
        case.llm.use(case.script("hidden"))
    else:
        use_example(case.llm, method)
    case.llm.engine.scheduler.hooks.prefill = Hooks().prefill  # admit samples right behind the prompt
    assert texts(case.llm, [text(70)], [params]) == expected
    assert case.llm.engine.scheduler.prefix_hits == 2 * (64 - case.llm.engine.cache.snapshots.lag)


def test_without_prefix_caching_samples_compute_their_prompts(case: Case) -> None:
    params = replace(SAMPLED, n=3)
    expected = case.expected([text(70)], [params])
    case.llm.use(None)
    case.llm.engine.cache.prefix_caching = False
    assert texts(case.llm, [text(70)], [params]) == expected
    assert case.llm.engine.scheduler.prefix_hits == 0


def test_the_second_text_with_a_beginning_leaves_a_snapshot_where_it_branches(case: Case) -> None:
    common = text(41)
    prompts = [common + text(60, seed) for seed in (1, 2, 3)]
    assert cached(case, None, prompts) == [0, 0, 32]


def test_prompts_have_snapshots_at_multiples(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.row_states.LEAST_INTERVAL", 32)
    monkeypatch.setattr("outrider.engine.row_states.SHARE", 3)
    common = text(41)
    assert cached(case, None, [common + text(60, seed) for seed in (1, 2)]) == [0, 32]


def test_a_head_computes_the_tokens_before_a_snapshot_again(case: Case) -> None:
    """It needs the hidden states of the last cached token, so that the snapshot is that before it."""
    expected = case.expected([text(70)], [SAMPLED])
    use_example(case.llm, "eagle3")
    assert case.llm.engine.scheduler.limits.lookbehind == case.llm.engine.cache.snapshots.lag == 1
    for hit in (0, 63):
        output = answer(case.llm, text(70), SAMPLED)
        assert [visible_parts(output.outputs)] == expected and output.num_cached_tokens == hit


def test_a_preempted_row_resumes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of up to 110 tokens have 13 pages: one is preempted, and goes on at a page of its output."""
    prompts, params = [text(75, 1), text(75, 2)], [replace(SAMPLED, max_tokens=35)] * 2
    expected = case.expected(prompts, params)
    monkeypatch.setattr(memory, "plan_pages", lambda *given: 13)
    case.llm.use(None)
    found, match = list[int](), case.llm.engine.cache.match

    def recorded(*given: Any) -> int:
        found.append(match(*given))
        return found[-1]

    monkeypatch.setattr(case.llm.engine.cache, "match", recorded)
    assert texts(case.llm, prompts, params) == expected
    assert case.llm.engine.scheduler.preemptions and max(found) >= 64


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 110)), min_size=2, max_size=6),
    kind=st.sampled_from(["right", "hidden", "wide", "messy", "wrong"]),
    snapshots=st.integers(1, 6),
    pages=st.integers(10, 24),
    temperature=st.sampled_from([0.0, 0.9]),
    aborts=st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=2),
)
def test_any_texts(
    case: Case,
    which: list[tuple[int, int]],
    kind: str,
    snapshots: int,
    pages: int,
    temperature: float,
    aborts: dict[int, int],
) -> None:
    """Prompts with common beginnings, twice, beside few pages and few snapshots."""
    given, params = related(which), sampling(temperature, len(which))
    expected = case.expected(given, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "plan_pages", lambda *_: pages)
        patch.setattr(memory, "plan_snapshots", lambda *_: snapshots)
        case.llm.use(case.script(kind))
    for turn in range(2):
        outputs = run_staggered(case.llm, given, params, aborts if turn == 0 else None)
        for i, output in enumerate(outputs):
            if turn or i not in aborts:
                assert visible_parts(output.outputs) == expected[i]
        check_idle(case.llm)


@pytest.mark.parametrize("method", ["auto", "eagle3", "draft_model"])
def test_methods_change_no_text(case: Case, method: str, tmp_path: Path) -> None:
    given, params = related([(0, 70), (1, 90), (0, 64), (1, 55), (2, 33)]), sampling(0.8)
    expected = case.expected(given, params)
    if method == "eagle3":
        use_example(case.llm, method)
    elif method == "auto":
        case.llm.use({"method": "auto"})
    else:
        draft = bare_checkpoint(tmp_path, "Llama", seed=3)
        case.llm.use({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4})
    for _ in range(2):
        assert texts(case.llm, given, params) == expected
    assert case.llm.engine.scheduler.prefix_hits


# ---- the tests above can fail


def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cache.states.StatePool.copy", lambda self, source, target: None)


def states_of_another_border(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RowStates.begin

    def spoilt(self: RowStates, batch: Any) -> Any:
        rows = begin(self, batch)
        rows.copies = {max(0, row - 1): slot for row, slot in rows.copies.items()}
        return rows

    monkeypatch.setattr(RowStates, "begin", spoilt)


def another_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_of = Snapshots.slot_of
    monkeypatch.setattr(
        Snapshots, "slot_of", lambda self, page: next((s for s in self.slots if s != slot_of(self, page)), 0)
    )


@pytest.mark.parametrize("spoil", [no_copy, states_of_another_border, another_snapshot])
def test_a_broken_engine_is_noticed(
    case: Case, spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, params = [text(65, seed) for seed in range(4)], [SAMPLED] * 4
    expected = case.expected(given, params)
    spoil(monkeypatch)
    case.llm.use(None)
    found = [texts(case.llm, given, params) for _ in range(2)]
    assert found[0] == expected and found[1] != expected
