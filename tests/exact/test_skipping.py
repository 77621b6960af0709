"""Drafting with a part of the target, in its own pool, changes no token; wrong K/V is detected."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import answer, token_prompts

from outrider import LLM, SamplingParams
from outrider.core.step import Batch, Commit
from outrider.core.step_input import StepInput
from outrider.core.tree import Draft, Resume
from outrider.draft.layerskip import LayerSkip
from outrider.engine.runner import Runner
from outrider.models.decoder import Decoder
from outrider.testing import check_idle, random_prompts, run_staggered, tiny_checkpoint, visible_parts

PROMPTS = random_prompts(5, seed=11)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "processed": {"temperature": 0.7, "repetition_penalty": 1.3, "bad_words": ["a"]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sets": {"skip_attention": [1], "skip_mlp": [2]},
    "exit": {"early_exit": 3},
    "exit at once": {"early_exit": 1, "exit_threshold": None},
    "siblings": {"siblings": 3, "exit_threshold": 0.01},
    "exit with siblings": {"early_exit": 2, "siblings": "confidence", "exit_threshold": None},
    "search": {"search": True, "context_window": 6, "bayes_interval": 3, "siblings": 2},
}
NEVER_STOP = {"exit_threshold": None, "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers that change the residual stream little, so that a part of them is often right."""
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), num_hidden_layers=4, initializer_range=0.12)


@pytest.fixture(scope="module")
def alone(deep: str) -> LLM:
    return LLM(deep, max_num_seqs=4, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def llm(deep: str) -> LLM:
    return LLM(deep, max_num_seqs=4)


def params_of(sampling: str) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, max_tokens=26 + 3 * i, ignore_eos=True, **SAMPLING[sampling])
        for i in range(len(PROMPTS))
    ]


def use(llm: LLM, **config: Any) -> LayerSkip:
    llm.use({"method": "layerskip", **config})
    llm.engine.forget_prefixes()
    drafter = llm.engine.drafter
    assert isinstance(drafter, LayerSkip)
    return drafter


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("config", CONFIGS)
def test_skipping_layers_leaves_the_tokens_unchanged(
    config: str, sampling: str, alone: LLM, llm: LLM
) -> None:
    """Alone and in ragged company."""
    params = params_of(sampling)
    use(llm, **CONFIGS[config])
    expected = [visible_parts(answer(alone, prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    first = answer(llm, PROMPTS[0], params[0])
    assert visible_parts(first.outputs) == expected[0] and first.speculation.drafted > 0
    got = run_staggered(llm, PROMPTS, params)
    assert [visible_parts(output.outputs) for output in got] == expected
    assert sum(output.speculation.accepted for output in got) > 0
    check_idle(llm)


@pytest.mark.parametrize("config", ["sets", "exit", "exit with siblings"])
def test_int8_keys_keep_the_plain_text(config: str, deep: str) -> None:
    """Rounding would show at once where a key is written from another number."""
    plain, fast = (
        LLM(deep, max_num_seqs=4, kv_cache_dtype="int8", enable_prefix_caching=False) for _ in range(2)
    )
    use(fast, **CONFIGS[config])
    for params in (params_of("greedy"), params_of("sampled")):
        expected, got = (llm.generate(token_prompts(PROMPTS), params) for llm in (plain, fast))
        assert [visible_parts(output.outputs) for output in got] == [
            visible_parts(output.outputs) for output in expected
        ]


# ---- one call, or level by level


def heard(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], sampling: str
) -> list[tuple[list[list[int]], Any]]:
    """The draft tokens of every step, and the nodes that verification resumes from."""
    drafts: list[tuple[list[list[int]], Any]] = []
    propose = LayerSkip.propose

    def listening(self: LayerSkip, batch: Batch) -> Draft:
        draft = propose(self, batch)
        resume = draft.resume and (draft.resume.nodes, draft.resume.states.clone())
        drafts.append(([tree.tokens for tree in draft.trees], resume))
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(LayerSkip, "propose", listening)
        use(llm, **config)
        llm.generate(token_prompts(PROMPTS[:4]), params_of(sampling)[:4])
    return drafts


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("config", ["sets", "exit"])
def test_one_call_equals_one_level_after_another(
    config: str, sampling: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same draft tokens, stopped at the same node, and the same states bit for bit."""
    threshold = {"greedy": 0.04, "sampled": 0.01}[sampling]
    given = {
        **CONFIGS[config],
        "exit_threshold": threshold,
        "adapt_threshold": False,
        "num_speculative_tokens": 4,
    }
    once = heard(llm, monkeypatch, given, sampling)
    monkeypatch.setattr(Decoder, "fuses_chains", False)
    levels = heard(llm, monkeypatch, given, sampling)
    assert [tokens for tokens, _ in once] == [tokens for tokens, _ in levels]
    for (_, mine), (_, theirs) in zip(once, levels, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]))
    lengths = {len(tokens) for step, _ in once for tokens in step}
    assert len(lengths - {0}) >= 3, "some should stop early and some not"


# ---- resuming


def test_verification_computes_no_first_layer_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of four, the first layers are computed for the last node only."""
    rows: list[tuple[int, int]] = []
    run = Runner._resume

    def counting(self: Runner, step_input: StepInput, resume: Resume, *rest: Any) -> torch.Tensor:
        rows.append((step_input.length, step_input.length - sum(map(len, resume.nodes))))
        return run(self, step_input, resume, *rest)

    monkeypatch.setattr(Runner, "_resume", counting)
    use(llm, early_exit=2, **NEVER_STOP)
    answer(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert rows[0] == (5, 1)
    assert all(below == 1 for _, below in rows)


def differences(alone: LLM, llm: LLM) -> int:
    params = params_of("greedy")
    outputs = run_staggered(llm, PROMPTS, params)
    llm.engine.forget_prefixes()
    return sum(
        visible_parts(output.outputs) != visible_parts(answer(alone, prompt, p).outputs)
        for output, prompt, p in zip(outputs, PROMPTS, params)
    )


Edit = Callable[[Resume], Resume]


def spoil(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    run = Runner._resume
    monkeypatch.setattr(
        Runner, "_resume", lambda self, step_input, resume, *rest: run(self, step_input, edit(resume), *rest)
    )


EDITS: dict[str, Edit] = {
    "one layer too late": lambda resume: resume._replace(layer=resume.layer + 1),
    "one layer too early": lambda resume: resume._replace(layer=resume.layer - 1),
    "states of other nodes": lambda resume: resume._replace(states=resume.states.roll(1, 0)),
    "a state that is nearly right": lambda resume: resume._replace(states=resume.states * 1.05),
}


@pytest.mark.parametrize("edit", EDITS)
def test_resuming_wrongly_is_caught(edit: str, alone: LLM, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    use(llm, early_exit=2, **NEVER_STOP)
    assert differences(alone, llm) == 0
    spoil(monkeypatch, EDITS[edit])
    assert differences(alone, llm) > 0


# ---- the target's pool


@pytest.mark.parametrize("config", [{"skip_mlp": [1]}, {"skip_attention": [1]}, {"early_exit": 2}], ids=str)
def test_keys_of_a_draft_left_in_place_are_caught(
    config: dict[str, Any], alone: LLM, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft passes run over what has been verified: K/V of the skipped model stays where the target's should
    be.
    """
    drafter = use(llm, **config, **NEVER_STOP)
    assert differences(alone, llm) == 0
    observe = drafter.observe

    def late(commit: Commit) -> None:
        for step in commit.batch:
            row = step.row
            if row.table is not None and row.computed > row.prompt:
                step_input, end = StepInput(), row.computed
                step_input.chain(row.table.slots, step.end - 1, row.tokens[step.end - 1 : end])
                blocks = (
                    drafter.blocks
                    if "early_exit" not in config
                    else llm.engine.decoder.skip_sublayers([0], [0])
                )
                llm.engine.decoder.forward(step_input.build(), drafter.pool, blocks)
        observe(commit)

    monkeypatch.setattr(drafter, "observe", late)
    assert differences(alone, llm) > 0


@pytest.mark.parametrize("config", CONFIGS)
def test_drafting_writes_its_own_slots_only(config: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the draft nodes and of the pending token; none of committed tokens or other rows."""
    drafter = use(llm, **{**CONFIGS[config], "exit_threshold": None})
    propose, seen = drafter.propose, 0

    def watched(batch: Batch) -> Draft:
        nonlocal seen
        before = drafter.pool.data.clone()
        draft = propose(batch)
        written = {
            int(slot)
            for slot in (before != drafter.pool.data).any(-1).any(-1).any(0).any(0).nonzero().flatten()
        }
        handed = set()
        for step in batch:
            assert step.row.table is not None
            handed |= set(step.row.table.slots[step.start : step.end + step.budget.nodes])
        assert written <= handed
        seen += len(written)
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    run_staggered(llm, PROMPTS, params_of("sampled"))
    assert seen > 0
    check_idle(llm)


def test_a_skipped_attention_has_no_keys_in_the_pool(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = use(llm, skip_attention=[1], skip_mlp=[], **NEVER_STOP)
    propose = drafter.propose

    def watched(batch: Batch) -> Draft:
        before = drafter.pool.data.clone()
        draft = propose(batch)
        changed = [not torch.equal(a, b) for a, b in itertools.islice(zip(before, drafter.pool.data), 4)]
        assert changed[1] is False and (not draft.trees[0].tokens or changed[0])
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    assert (
        answer(
            llm, PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        ).speculation.drafted
        > 0
    )


# ---- thresholds and the search


def test_a_threshold_shortens_drafts_and_moves(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafted = {}
    for threshold in (None, 0.05, 1.0):
        use(llm, early_exit=1, exit_threshold=threshold, adapt_threshold=False, num_speculative_tokens=5)
        drafted[threshold] = answer(llm, PROMPTS[2], params).speculation
    assert drafted[1.0].drafted / drafted[1.0].steps <= 1 < drafted[None].drafted / drafted[None].steps
    assert drafted[1.0].drafted < drafted[0.05].drafted < drafted[None].drafted
    drafter = use(llm, early_exit=1, exit_threshold=0.05, num_speculative_tokens=5)
    moved = set()
    observe = drafter.observe

    def watched(commit: Commit) -> None:
        observe(commit)
        moved.update(threshold.value for threshold in drafter.thresholds.values())

    drafter.observe = watched  # type: ignore[method-assign]
    answer(llm, PROMPTS[2], params)
    assert len(moved) > 10 and max(moved) > 0.05, "drafts were wrong: it should have become stricter"


def test_the_search_finds_and_keeps_a_set(llm: LLM) -> None:
    """The search goes on from request to request, drafts with its best set, and can be restored."""
    drafter = use(
        llm, search=True, context_window=8, max_score=1.0, max_opt_iter=30, num_speculative_tokens=3
    )
    fresh, params = drafter.memory, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    counts = []
    for prompt in PROMPTS[:3]:
        answer(llm, prompt, params)
        counts.append(len(drafter.memory.scores))
    assert 0 < counts[0] < counts[-1] <= 30 and fresh is drafter.memory
    assert (
        drafter.memory.score == max(drafter.memory.scores) > drafter.memory.scores[-1]
        or len(set(drafter.memory.scores)) == 1
    )
    answer(llm, PROMPTS[3], params)
    assert drafter.skip is drafter.memory.best


def test_score_counts_drafts_of_the_skipped_model(llm: LLM, alone: LLM) -> None:
    """Agreement on the last tokens, each forward from verified keys on: with nothing skipped everything
    agrees.
    """
    drafter = use(llm, search=True, context_window=8, num_speculative_tokens=3)
    scores = []
    score = drafter._score

    def whole(*given: Any) -> float:
        scores.append(score(*given[:3], None))
        return score(*given)

    drafter._score = whole  # type: ignore[method-assign]
    answer(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert scores and set(scores) == {1.0}
    assert drafter.memory.scores[0] < 1.0
