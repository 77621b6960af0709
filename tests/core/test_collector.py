"""Full garbage collections are rarer while requests run, and as usual before and after."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider import LLM, SamplingParams
from outrider.core.collector import RARER, rare_collections


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_thresholds_are_raised_in_the_outermost_block_only(usual: tuple[int, int, int]) -> None:
    with rare_collections:
        raised = gc.get_threshold()
        with rare_collections:
            assert gc.get_threshold() == raised == (*usual[:2], RARER * usual[2])
        assert gc.get_threshold() == raised
    assert gc.get_threshold() == usual


def test_an_error_leaves_them_as_they_were(usual: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError), rare_collections:
        raise ValueError
    assert gc.get_threshold() == usual and not rare_collections.running


def test_thresholds_that_somebody_sets_meanwhile_stay() -> None:
    with rare_collections:
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)


def test_they_are_raised_while_requests_run(usual: tuple[int, int, int]) -> None:
    llm, seen = LLM("builtin", max_num_seqs=2, max_model_len=64), set[tuple[int, int, int]]()
    step = llm.engine.step

    def watched() -> object:
        seen.add(gc.get_threshold())
        return step()

    llm.engine.step = watched  # type: ignore[method-assign, assignment]
    llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3))
    assert seen == {(*usual[:2], RARER * usual[2])} and gc.get_threshold() == usual


def test_what_a_server_keeps_is_set_apart() -> None:
    code = "import gc, outrider.core.collector as c; c.set_apart(); assert gc.get_freeze_count() > 1000"
    subprocess.run([sys.executable, "-c", code], check=True)
