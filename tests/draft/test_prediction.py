"""A predicted output saves steps where the output repeats it, and never changes the output."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, RequestError, SamplingParams
from outrider.draft.prediction import FIRST, RETRY, Follower

PROMPT = "Write a letter to a friend about the garden."
METHODS: dict[str, Any] = {
    "itself": {"method": "prediction"},
    "n-gram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft": {"model": "builtin-draft", "num_speculative_tokens": 3},
    "rejection": {"method": "ngram", "verification": "rejection"},
    "mix": {"method": "union", "drafters": [{"method": "ngram"}, {"method": "recycle"}]},
    "auto": {"method": "auto"},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", seed=1, max_model_len=256)


def run(llm: LLM, **given: Any) -> Any:
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 100, "ignore_eos": True, **given}
    return llm.generate(PROMPT, SamplingParams(**params))[0].outputs[0]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Any:
    return run(llm)


def edits(ids: list[int]) -> dict[str, list[int]]:
    return {
        "the same": ids,
        "replaced": [*ids[:30], 17, *ids[31:70], 18, 19, *ids[72:]],
        "longer": [*ids[:40], *range(20, 45), *ids[40:]],
        "shorter": [*ids[:40], *ids[55:]],
        "cut off": ids[:70],
    }


def test_an_edited_text_is_followed_through_its_edits(llm: LLM, plain: Any) -> None:
    llm = llm.variant({"method": "prediction"})
    for name, prediction in edits(plain.token_ids).items():
        found = run(llm, prediction=prediction)
        assert found.token_ids == plain.token_ids and found.text == plain.text, name
        most = {"cut off": 45, "shorter": 25}.get(name, 15)
        assert found.speculation.steps <= most, (name, found.speculation)


@pytest.mark.parametrize("method", METHODS)
def test_a_predicted_output_joins_every_method(llm: LLM, plain: Any, method: str) -> None:
    mixed = llm.variant(METHODS[method])
    found = run(mixed, prediction=edits(plain.token_ids)["replaced"])
    if method != "rejection":  # which keeps the distribution only
        assert found.token_ids == plain.token_ids
        assert found.token_sources.count("prediction") > 60 and found.speculation.steps <= 40
    assert "prediction" not in run(mixed, temperature=0.0).token_sources


def test_a_text_is_a_prediction_too(llm: LLM) -> None:
    plain = run(llm, temperature=0.3)
    found = run(llm.variant("prediction"), temperature=0.3, prediction=plain.text)
    assert found.token_ids == plain.token_ids and found.speculation.steps <= 30


def test_a_wrong_prediction_costs_few_draft_tokens(llm: LLM, plain: Any) -> None:
    found = run(llm.variant("prediction"), prediction=list(range(100, 220)))
    assert found.token_ids == plain.token_ids
    assert found.speculation.drafted <= FIRST + 3 * RETRY


def test_with_a_grammar_only_allowed_tokens_are_drafted(llm: LLM) -> None:
    form = {"structured_outputs": {"regex": "[a-z ]{20,40}"}, "ignore_eos": False}
    expected = run(llm, **form)
    fast = llm.variant("ngram")
    for prediction in (expected.token_ids, f"{expected.text[:9]}0{expected.text[10:]}"):
        found = run(fast, prediction=prediction, **form)
        assert found.token_ids == expected.token_ids
        assert "prediction" in found.token_sources


def test_a_draft_is_capped(llm: LLM, plain: Any) -> None:
    found = run(llm.variant("ngram"), prediction=plain.token_ids, max_draft_tokens=2)
    assert found.token_ids == plain.token_ids and len(found.speculation.accepted_lengths) == 3
    found = run(llm.variant("ngram"), prediction=plain.token_ids, speculate=False)
    assert found.speculation.drafted == 0


def test_ended_rows_are_forgotten(llm: LLM, plain: Any) -> None:
    fast = llm.variant("ngram")
    run(fast, prediction=plain.token_ids)
    (drafter,) = (d for d in fast.engine.proposer.automatic if d.sources == ("prediction",))
    assert not drafter.followers


def test_the_longest_and_then_the_nearest_match_counts() -> None:
    follower = Follower([1, 2, 3, 1, 2, 4, 1, 2, 5, 7, 2, 6], following=False, next=5)
    assert follower.draft([1, 2], 1) == [4]
    assert follower.draft([3, 1, 2], 1) == [4]
    assert follower.draft([9, 7, 2], 1) == [6]
    assert follower.next == 11
    follower.misses = 2
    assert follower.draft([9, 7, 2], 4) == [6], "two tokens, after as many drafts that failed"
    follower.misses = 3
    assert follower.draft([9, 7, 2], 4) == [], "too short"


@pytest.mark.parametrize("wrong", [[10**9], [-1], [0.5], 5])
def test_tokens_of_a_prediction_must_exist(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="prediction"):
        run(llm, prediction=wrong)


def test_a_prediction_that_begins_wrong_and_is_verbatim_later_is_found() -> None:
    follower = Follower(list(range(10, 40)))
    for token in range(100, 110):  # the output
        follower.draft([token], 4)
        follower.learn(4, 0)
        follower.follow([token])
    assert follower.draft([21, 22, 23], 3) == []
    assert follower.draft([20, 21, 22, 23], 3) == [24, 25, 26]
