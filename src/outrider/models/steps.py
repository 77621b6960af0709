"""A forward part by part: `Model.read` where no one call does it all."""

from __future__ import annotations

from torch import Tensor

from outrider.backends.base import TreeQueries
from outrider.cache.pool import Pool
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.models.base import Model


def in_steps(
    model: Model,
    step_input: StepInput,
    pool: Pool,
    wanted: list[int],
    kept: dict[int, Tensor],
    trees: TreeQueries,
) -> Tensor:
    """`Model.read` by the other methods."""
    taps = {layer: state for layer, state in kept.items() if layer != FINAL}
    x = model.forward(step_input, pool, taps=taps)
    kept.update(taps)
    return behind(model, x, wanted, kept, trees)


def behind(model: Model, x: Tensor, wanted: list[int], kept: dict[int, Tensor], trees: TreeQueries) -> Tensor:
    """What `Model.read` does behind the last layer; x: what `forward` returned."""
    if FINAL in kept:
        kept[FINAL] = model.final(x)
    logits = model.logits(x, wanted)
    model.kernels.follow(logits, trees)
    return logits
