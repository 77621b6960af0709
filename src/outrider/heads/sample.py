"""What a head learns from: texts as the target reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.step_input import StepInput
from outrider.models.base import Model

PIECE = 256  # tokens that go through the target at once


@dataclass(frozen=True)
class Sample:
    """tokens int64 [T]; states: FINAL or layer -> float32 [T, hidden], as `Needs.states` names them; logits float32 [T, V] of the target,
    logits[t] for the token after tokens[t]."""

    tokens: Tensor
    states: dict[int, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class TargetWeights:
    """The target's embedding and head, which heads read and do not change: float32 [V, hidden] each."""

    embedding: Tensor
    lm_head: Tensor

    @staticmethod
    def of(model: Model) -> TargetWeights:
        """Raises nothing for a head with a bias or a cap, which is not a matrix: what it says of the unit vectors is taken."""
        hidden = model.spec.hidden
        said = model.head_logits(torch.eye(hidden, dtype=model.kernels.activations, device=model.device))
        return TargetWeights(model.embed(range(model.spec.vocabulary)).float(), said.T.contiguous())


def read(model: Model, tokens: Sequence[int], wanted: Sequence[int]) -> Sample:
    """One text through the target, piece by piece; `wanted` as in `Needs.states`."""
    pool, table = model.pool(len(tokens)), array("i", range(len(tokens)))
    kept: dict[int, list[Tensor]] = {which: [] for which in wanted}
    logits = []
    for first in range(0, len(tokens), PIECE):
        step_input, found = StepInput(), dict.fromkeys(wanted, torch.empty(0))
        step_input.chain(table, first, tokens[first : first + PIECE])
        logits.append(
            model.read(
                step_input.build(), pool, [*range(step_input.length)], found, model.kernels.trees()
            ).clone()
        )
        for which in wanted:
            kept[which].append(found[which].float())
    return Sample(
        torch.tensor(tokens), {which: torch.cat(parts) for which, parts in kept.items()}, torch.cat(logits)
    )
