"""Examination of a difference: the distance of the two tokens' scores, and whether rounding explains it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.backends.torch.sampling import filtered
from outrider.core.noise import gumbel, key_of
from outrider.core.params import SamplingParams
from outrider.core.step_input import StepInput
from outrider.engine.engine import Engine
from outrider.models.base import Model

SAFETY = 4  # factor on the measured rounding: it is measured at one position only
# Upper bound of rounding, as units in the last place and as a share of the largest logit, whichever is more.
MAX_ROUNDINGS, MAX_SHARE = 8, 1e-3


@dataclass(frozen=True)
class Gap:
    """Scores (logits / T plus noise) of plain decoding at one position.

    best: the two tokens with the highest scores.  gap: their distance.
    lead: distance of the best token from the token of the speculative text.
    tolerance: how far rounding moves a score, as measured.  limit: upper bound of it.
    reproduced: in one forward over all rows, the scores select the speculative token.
    """

    best: tuple[int, int]
    gap: float
    lead: float
    tolerance: float
    reproduced: bool
    limit: float = math.inf

    @property
    def explained(self) -> bool:
        return self.tolerance > 0 and self.lead <= (self.limit if self.reproduced else self.tolerance)


def look(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, before: Sequence[int], token: int
) -> Gap:
    """The position after prompt and `before`, where plain decoding did not emit `token`."""
    alone, together = reference_logits(engine.decoder, prompt, before)
    a, b = (_scores(logits, params, len(prompt) + len(before)) for logits in (alone, together))
    values, best = a.topk(2)
    temperature = params.distribution.temperature or 1.0
    moved = 0.0 if engine.exact else tolerance(alone, together, engine.decoder.dtype) / temperature
    limit = max_rounding(alone, engine.decoder.dtype) / temperature
    first, second = best.tolist()
    gap, lead = float(values[0] - values[1]), float(values[0] - a[token])
    return Gap((first, second), gap, lead, moved, int(b.argmax()) == token, limit)


def reference_logits(decoder: Model, prompt: Sequence[int], text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [V] after prompt and text, twice: token by token, and with all rows in one forward."""
    ids = [*prompt, *text]
    return _last(decoder, ids, [len(prompt), *[1] * len(text)]), _last(decoder, ids, [len(ids)])


def tolerance(alone: Tensor, together: Tensor, dtype: torch.dtype) -> float:
    """Rounding error of a logit, at most: SAFETY times the measured difference, at least one ulp."""
    ulp = torch.finfo(dtype).eps * float(alone.abs().max())
    return min(max(SAFETY * float((alone - together).abs().max()), ulp), max_rounding(alone, dtype))


def max_rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """Upper bound of rounding, so that a wrong forward cannot raise its own tolerance without limit."""
    return max(MAX_ROUNDINGS * torch.finfo(dtype).eps, MAX_SHARE) * float(logits.abs().max())


def _last(decoder: Model, ids: list[int], pieces: list[int]) -> Tensor:
    table, pool, start = array("i", range(len(ids))), decoder.pool(len(ids)), 0
    for size in pieces:
        step_input = StepInput.of_chain(table, start, ids[start : start + size])
        x = decoder.forward(step_input, pool)
        start += size
    return decoder.logits(x, [x.shape[0] - 1])[0].float().cpu()


def _scores(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    scaled = filtered(logits, params.distribution)
    if params.temperature == 0:
        return scaled
    assert params.seed is not None
    return scaled + gumbel(key_of(params.seed, 0, position), len(scaled))
