"""Every emitted token names the method that drafted it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, RequestError, SamplingParams

PROMPT = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
NGRAM, RECYCLE = {"method": "ngram"}, {"method": "recycle"}


@pytest.mark.parametrize(
    ("config", "methods"),
    [
        (None, set()),
        (RECYCLE, {"recycle"}),
        ({"method": "union", "drafters": [NGRAM, RECYCLE]}, {"ngram", "recycle"}),
        (
            {"method": "first", "drafters": [NGRAM, {"method": "suffix"}, RECYCLE]},
            {"ngram", "suffix", "recycle"},
        ),
    ],
)
def test_accepted_tokens_name_their_drafter(
    tiny: Path, config: dict[str, Any] | None, methods: set[str]
) -> None:
    output = LLM(str(tiny), speculative_config=config).generate(PROMPT, PARAMS)[0].outputs[0]
    drafted = [source for source in output.token_sources if source is not None]
    assert len(output.token_sources) == len(output.token_ids) == 40
    assert len(drafted) == output.speculation.accepted and set(drafted) <= methods
    assert bool(drafted) == bool(methods)


def test_a_mix_records_the_drafter_of_every_token(tiny: Path) -> None:
    """A look-up that finds nothing leaves its tokens to the other drafter, and none to itself."""
    never = {"method": "ngram", "prompt_lookup_min": 30, "prompt_lookup_max": 31}
    for drafters in ([never, RECYCLE], [RECYCLE, never]):
        config = {"method": "union", "drafters": drafters}
        output = LLM(str(tiny), speculative_config=config).generate(PROMPT, PARAMS)[0].outputs[0]
        assert {source for source in output.token_sources if source} == {"recycle"}


@pytest.mark.parametrize("mix", ["union", "first", "auto"])
def test_a_request_may_name_the_one_drafter_of_a_mix(tiny: Path, mix: str) -> None:
    llm = LLM(str(tiny), speculative_config={"method": mix, "drafters": [NGRAM, RECYCLE]})
    expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    for name in ("ngram", "recycle"):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, draft_method=name)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == expected and {*output.token_sources} <= {name, None}
        assert sum(output.drafted_by.values()) == output.speculation.drafted
        assert output.drafted_by.keys() == {name} or mix == "auto"
    with pytest.raises(RequestError, match=r"ngram, recycle.*got 'medusa'"):
        llm.generate(PROMPT, SamplingParams(draft_method="medusa"))
