"""`Model.forward_step` in terms of a model's other methods, for backends without a fused model."""

from __future__ import annotations

from torch import Tensor

from outrider.backends.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.models.base import Model


def forward_parts(
    model: Model,
    step_input: StepInput,
    pool: Pool,
    states: dict[int, Tensor],
    queries: TreeQueries | None = None,
) -> Tensor:
    """`Model.forward_step` as `forward`, `final` and `logits`."""
    taps = {layer: state for layer, state in states.items() if layer != FINAL}
    x = model.forward(step_input, pool, taps=taps)
    states.update(taps)
    return finish_step(model, step_input, x, states, queries)


def finish_step(
    model: Model, step_input: StepInput, x: Tensor, states: dict[int, Tensor], queries: TreeQueries | None
) -> Tensor:
    """The part of `Model.forward_step` after the last layer; x: the result of `forward`."""
    if FINAL in states:
        states[FINAL] = model.final(x)
    logits = model.logits(x, step_input.logits_rows)
    if queries is not None:
        assert model.backend.verifier is not None, "queries come from the backend's verifier"
        model.backend.verifier.verify(logits, queries)
    return logits
