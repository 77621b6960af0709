"""Settings that are compared step by step emit what they emit alone, at the same pace."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.lockstep import Side, lockstep
from outrider.bench.measure import Configs

CONFIGS: Configs = {"plain": {"method": "off"}, "ngram": {"method": "ngram", "num_speculative_tokens": 3}}
GROUPS = [["one two one two one", "a b c a b"], ["1 2 3 4 1 2 3"]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", speculative_config=None)


def test_every_side_emits_what_it_emits_alone(llm: LLM) -> None:
    sides = lockstep(llm, CONFIGS, GROUPS, PARAMS)
    alone = [output.outputs[0].token_ids for group in GROUPS for output in llm.generate(group, PARAMS)]
    for side in sides.values():
        assert side.finished and side.tokens == alone
        assert side.seconds > 0 and side.steps == side.llm.engine.steps
    assert sides["ngram"].steps < sides["plain"].steps
    assert 0 < sides["ngram"].of_ideal(sides["plain"]) < 1.5


def test_no_side_is_ahead_by_more_than_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, ahead, advance = list[Side](), list[int](), Side.advance

    def watched(side: Side) -> None:
        advance(side)
        if side.groups is GROUPS and side not in sides:
            sides.append(side)
        emitted = [each.progress[0] for each in sides if not each.finished]
        ahead.append(max(emitted) - min(emitted) if len(emitted) == 2 else 0)

    monkeypatch.setattr(Side, "advance", watched)
    lockstep(llm, CONFIGS, GROUPS, PARAMS)
    assert 0 < max(ahead) <= 2 * (3 + 1)  # two rows, each three draft tokens and one more
