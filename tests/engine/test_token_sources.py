"""Every emitted token names the method that drafted it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams

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
