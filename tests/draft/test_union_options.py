"""Options of mixes: descriptions of the inner drafters, and errors that name the bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, ConfigError
from outrider.draft.draft_model import DraftModel
from outrider.draft.first import First
from outrider.draft.ngram import Ngram
from outrider.draft.suffix import Suffix
from outrider.draft.union import Union
from outrider.testing import make_drafter

LOOK_UPS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 3},
    {"method": "suffix", "num_speculative_tokens": 2},
]


def test_drafters_are_described_as_alone() -> None:
    union = make_drafter(Union, drafters=LOOK_UPS)
    assert [type(drafter) for drafter in union.drafters] == [Ngram, Suffix]
    assert union.drafters[0].options.prompt_lookup_min == 3
    assert union.depths == [5, 2] and union.depth == 5
    nested = make_drafter(First, drafters=[{"method": "union", "drafters": LOOK_UPS}, {"method": "recycle"}])
    assert nested.needs.topk == 8 and nested.depth == 6


@pytest.mark.parametrize("method", ["union", "first"])
def test_a_draft_model_needs_no_method(method: str, tiny: Path) -> None:
    """Neither one in a folder nor the target itself."""
    drafters = [{"model": str(tiny)}, {"model": "self", "draft_kv_budget": 16}]
    llm = LLM(str(tiny), speculative_config={"method": method, "drafters": drafters})
    made: Any = llm.engine.drafter
    assert [type(drafter) for drafter in made.drafters] == [DraftModel, DraftModel]
    assert made.drafters[1].decoder is llm.engine.decoder is not made.drafters[0].decoder


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ("ngram", "drafters must be a list"),
        ({"method": "ngram"}, "drafters must be a list"),
        (["ngram"], "must be a dict with a 'method' or a draft 'model', got 'ngram'"),
        ([{"num_speculative_tokens": 2}], "must be a dict with a 'method' or a draft 'model'"),
        ([{"model": 3}], "model must be a folder or a hub id, got 3"),
        ([{"method": "ngrams"}], "Did you mean 'ngram'"),
        ([{"method": "ngram", "prompt_lookup_mx": 3}], "Did you mean 'prompt_lookup_max'"),
        (
            [{"method": "ngram", "verification": "match"}],
            "unknown key 'verification' in 'drafters', method 'ngram'",
        ),
        (
            [{"method": "ngram", "num_speculative_tokens": 0}],
            "num_speculative_tokens must be a whole number of at least 1 or None, got 0",
        ),
        ([{"method": "ngram", "prompt_lookup_min": 0}], "prompt_lookup_min"),
        ([{"method": "recycle", "nodes": 0}], "nodes"),
        ([{"method": "union", "drafters": [{"method": "no"}]}], "unknown speculative method 'no'"),
    ],
)
@pytest.mark.parametrize("method", [Union, First])
def test_bad_drafters_are_named(method: type[Union], drafters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method.Options(drafters=drafters)


@pytest.mark.parametrize("nodes", [0, True, 2.5])
def test_bad_caps_are_named(nodes: Any) -> None:
    with pytest.raises(ConfigError, match="nodes must be a whole number"):
        Union.Options(nodes=nodes)


def test_a_union_without_drafters_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 'drafters'"):
        make_drafter(Union)
