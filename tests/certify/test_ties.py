"""Differences between two texts: fabricated ties, and differences that are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.certify.ties import look
from outrider.core.noise import gumbel, key_of
from outrider.core.step_input import StepInput

PROMPT, BEFORE = [3, 1, 4], [1, 5]
LOGITS = torch.tensor([0.0, 2.0, 5.0, -1.0, 4.9999, 3.0])
GREEDY = SamplingParams(temperature=0, max_tokens=9)


class Model:
    """Says LOGITS; what `nudge` adds to them in a forward of many rows is its rounding."""

    dtype = torch.float32

    def __init__(self, nudge: dict[int, float]) -> None:
        self.nudge, self.rows = nudge, list[int]()

    def pool(self, slots: int) -> None:
        assert slots == len(PROMPT) + len(BEFORE)

    def forward(self, step_input: StepInput, pool: None) -> Tensor:
        self.rows.append(step_input.length)
        return torch.zeros(step_input.length, 1)

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        assert rows == [len(x) - 1]
        logits = LOGITS.clone()
        for token, by in self.nudge.items() if len(x) > 1 else ():
            logits[token] += by
        return logits[None]


def examine(nudge: dict[int, float], token: int, exact: bool = False, params: SamplingParams = GREEDY) -> Any:
    model: Any = SimpleNamespace(decoder=Model(nudge), exact=exact)
    gap = look(model, PROMPT, params, BEFORE, token)
    assert model.decoder.rows == [3, 1, 1, 5], "as plain decoding does it, and all at once"
    return gap


def test_a_tie_within_rounding_is_explained() -> None:
    gap = examine({0: 5e-5}, token=4)
    assert gap.best == (2, 4) and gap.gap == pytest.approx(1e-4, rel=0.1) and gap.lead == gap.gap
    assert gap.tolerance == pytest.approx(2e-4, rel=0.05) and gap.explained and not gap.reproduced


def test_a_tie_that_many_rows_break() -> None:
    gap = examine({4: 1e-3}, token=4)
    assert gap.reproduced and gap.explained


def test_what_is_too_far_behind_is_no_tie() -> None:
    gap = examine({0: 5e-5}, token=5)
    assert gap.gap < 1e-3 and gap.lead == pytest.approx(2) and not gap.explained


def test_exact_kernels_have_no_ties() -> None:
    gap = examine({}, token=4, exact=True)
    assert gap.tolerance == 0 and not gap.explained


def test_without_rounding_there_is_one_rounding_of_the_largest_logit() -> None:
    assert examine({}, token=4).tolerance == pytest.approx(5 * torch.finfo(torch.float32).eps)


def test_sampled_scores_have_the_noise_of_their_position_and_the_tolerance_of_their_temperature() -> None:
    params = SamplingParams(temperature=0.5, seed=8, max_tokens=9)
    scores = LOGITS / 0.5 + gumbel(key_of(8, 0, 5), 6)
    best = scores.topk(2)
    gap = examine({0: 5e-5}, token=3, params=params)
    assert gap.best == tuple(best.indices.tolist())
    assert gap.gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-5)
    assert gap.lead == pytest.approx(float(best.values[0] - scores[3]), rel=1e-5)
    assert gap.tolerance == pytest.approx(4e-4, rel=0.05)
    cut = SamplingParams(temperature=0.5, top_p=0.5, seed=8, max_tokens=9)
    assert examine({0: 5e-5}, token=3, params=cut).lead == float("inf"), "top_p forbids it"


def test_a_wrong_forward_does_not_raise_its_tolerance() -> None:
    gap = examine({0: 9.0}, token=0)
    assert gap.reproduced and not gap.explained
