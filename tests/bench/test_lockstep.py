"""Settings that are compared step by step emit what they emit alone, at the same pace."""

from __future__ import annotations

import pytest
from lockstep import Side, lockstep

from outrider import LLM, SamplingParams
from outrider.bench.measure import Configs

CONFIGS: Configs = {"plain": {"method": "off"}, "ngram": {"method": "ngram", "num_speculative_tokens": 3}}
PROMPTS = ["one two one two one", "a b c a b", "1 2 3 4 1 2 3", "x y x y", "up down up", "left right left"]
PARAMS = [SamplingParams(max_tokens=20 + i, ignore_eos=True, temperature=0.0) for i in range(len(PROMPTS))]
BATCH, TOKENS = 2, 72


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", speculative_config=None)


def test_every_side_emits_what_it_emits_alone(llm: LLM) -> None:
    sides = lockstep(llm, CONFIGS, PROMPTS, PARAMS, BATCH, TOKENS)
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    for side in sides.values():
        assert TOKENS <= side.progress[0] < TOKENS + BATCH * 4
        assert all(mine == theirs[: len(mine)] for mine, theirs in zip(side.outputs, alone))
        assert side.seconds > 0 and side.steps == side.llm.engine.steps
        assert side.agrees(sides["plain"])
    assert sides["ngram"].steps < sides["plain"].steps
    assert 0 < sides["ngram"].of_ideal(sides["plain"]) < 1.5
    sides["ngram"].tickets[0].rows[0].tokens[-1] += 1
    assert not sides["ngram"].agrees(sides["plain"])


def test_prompts_that_do_not_suffice_are_an_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="fewer than 100 tokens"):
        lockstep(llm, CONFIGS, PROMPTS[:2], PARAMS[:2], BATCH, 100)


def test_the_batch_is_full_and_no_side_is_ahead_by_more_than_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, ahead, advance = list[Side](), list[int](), Side.advance

    def watched(side: Side) -> None:
        open_before = sum(not ticket.finished for ticket in side.tickets)
        advance(side)
        if side.prompts is PROMPTS:
            began = len(side.tickets) - sum(ticket.finished for ticket in side.tickets)
            assert open_before <= BATCH and began <= BATCH
            if side not in sides:
                sides.append(side)
            emitted = [each.progress[0] for each in sides if not each.finished]
            ahead.append(max(emitted) - min(emitted) if len(emitted) == 2 else 0)

    monkeypatch.setattr(Side, "advance", watched)
    lockstep(llm, CONFIGS, PROMPTS, PARAMS, BATCH, TOKENS)
    assert 0 < max(ahead) <= BATCH * (3 + 1)  # rows, each with three draft tokens and one more
