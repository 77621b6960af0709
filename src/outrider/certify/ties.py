"""Where two texts part: how near plain decoding was to saying the other token, and whether rounding explains it."""

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

SAFETY = 4  # one look at a few logits sees a small part of how far rounding can reach
ROUNDINGS, SHARE = (
    8,
    1e-3,
)  # of the largest logit, whichever is more: what is further apart was computed wrongly, whatever many rows say


@dataclass(frozen=True)
class Gap:
    """best: the two tokens with the largest scores (logits / T plus noise) that plain decoding sees.  gap: between these two.
    lead: how far the best is ahead of the token that was said instead.  tolerance: what rounding may move a score by; most: at most.
    shown: computed in one forward, with many rows, the scores choose that other token."""

    best: tuple[int, int]
    gap: float
    lead: float
    tolerance: float
    shown: bool
    most: float = math.inf

    @property
    def explained(self) -> bool:
        return self.tolerance > 0 and self.lead <= (self.most if self.shown else self.tolerance)


def look(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, before: Sequence[int], said: int
) -> Gap:
    """At the position after prompt and `before`, where plain decoding did not say `said`."""
    alone, together = both(engine.decoder, prompt, before)
    a, b = (_scores(logits, params, len(prompt) + len(before)) for logits in (alone, together))
    values, best = a.topk(2)
    hot = params.temperature or 1.0
    reach = 0.0 if engine.exact else tolerance(alone, together, engine.decoder.dtype) / hot
    most = furthest(alone, engine.decoder.dtype) / hot
    first, second = best.tolist()
    return Gap(
        (first, second),
        float(values[0] - values[1]),
        float(values[0] - a[said]),
        reach,
        int(b.argmax()) == said,
        most,
    )


def both(decoder: Model, prompt: Sequence[int], said: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits [V] after prompt and text: as plain decoding computes them, a token at a time, and all rows in one forward."""
    ids = [*prompt, *said]
    return _last(decoder, ids, [len(prompt), *[1] * len(said)]), _last(decoder, ids, [len(ids)])


def tolerance(alone: Tensor, together: Tensor, dtype: torch.dtype) -> float:
    """How far rounding may move a logit: SAFETY times what it was seen to do, at least one rounding of the largest logit."""
    seen = max(
        SAFETY * float((alone - together).abs().max()), torch.finfo(dtype).eps * float(alone.abs().max())
    )
    return min(seen, furthest(alone, dtype))


def furthest(logits: Tensor, dtype: torch.dtype) -> float:
    """The most that is put down to rounding, whatever was seen: a forward that computes something else must not excuse itself."""
    return max(ROUNDINGS * torch.finfo(dtype).eps, SHARE) * float(logits.abs().max())


def _last(decoder: Model, ids: list[int], pieces: list[int]) -> Tensor:
    table, pool, start = array("i", range(len(ids))), decoder.pool(len(ids)), 0
    for size in pieces:
        step_input = StepInput()
        step_input.chain(table, start, ids[start : start + size])
        x = decoder.forward(step_input.build(), pool)
        start += size
    return decoder.logits(x, [x.shape[0] - 1])[0].float().cpu()


def _scores(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    scaled = filtered(logits, params.distribution)
    if params.temperature == 0:
        return scaled
    assert params.seed is not None
    return scaled + gumbel(key_of(params.seed, 0, position), len(scaled))
