"""The log-probabilities of two texts, as a certificate compares them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.certify.certificate import logprob_check
from outrider.certify.texts import GREEDY, Tally


def output(logprobs: list[float] | None) -> Any:
    """A text of the tokens 0 and 1."""
    found = None
    if logprobs is not None:
        found = [{token: SimpleNamespace(logprob=value)} for token, value in enumerate(logprobs)]
    return SimpleNamespace(token_ids=[0, 1], logprobs=found, finish_reason="length")


@pytest.mark.parametrize("given", [None, [-1.0], [math.nan, -2.0], [-1.0, math.nan], [-1.0, -math.inf]])
def test_missing_log_probabilities_are_not_equal(given: list[float] | None) -> None:
    """They counted as equal."""
    tally = Tally(GREEDY, False)
    tally.add([5], Any, output([-1.0, -2.0]), output(given))  # type: ignore[arg-type]
    check = logprob_check([tally], 0.1, lossless=True)
    assert not check.passed and check.result == "some are missing, or are not numbers"
    assert json.loads(json.dumps(check.figures, allow_nan=False))["largest difference"] is None


def test_equal_log_probabilities_pass() -> None:
    tally = Tally(GREEDY, False)
    tally.add([5], Any, output([-1.0, -2.0]), output([-1.0, -2.0]))  # type: ignore[arg-type]
    check = logprob_check([tally], 0.0, lossless=True)
    assert check.passed and check.result == "equal" and check.tested == "2 chosen tokens"
