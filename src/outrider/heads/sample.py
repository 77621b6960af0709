"""Training samples of heads: texts with the states and logits of the target."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.step_input import StepInput
from outrider.models.base import Model

CHUNK = 256  # tokens in one forward


@dataclass(frozen=True)
class Sample:
    """One text of T tokens.

    tokens: int64 [T].
    states: FINAL or a layer -> float32 [T, hidden], as `Needs.states` names them.
    logits: float32 [T, V] of the target; logits[t] are for the token after tokens[t].
    """

    tokens: Tensor
    states: dict[int, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class TargetWeights:
    """Embedding and lm_head of the target, float32 [V, hidden] each.  Heads do not train them."""

    embedding: Tensor
    lm_head: Tensor

    @staticmethod
    def of(model: Model) -> TargetWeights:
        """An lm_head with a bias or a soft cap is replaced by its logits of the unit vectors."""
        hidden = model.spec.hidden
        unit_vectors = torch.eye(hidden, dtype=model.backend.activations, device=model.device)
        lm_head = model.head_logits(unit_vectors).T.contiguous()
        return TargetWeights(model.embed(range(model.spec.vocabulary)).float(), lm_head)


def read(model: Model, tokens: Sequence[int], wanted: Sequence[int]) -> Sample:
    """The sample of one text.  wanted: the states, as in `Needs.states`."""
    pool, table = model.pool(len(tokens)), array("i", range(len(tokens)))
    states: dict[int, list[Tensor]] = {which: [] for which in wanted}
    logits = []
    for first in range(0, len(tokens), CHUNK):
        step_input, found = StepInput(), dict.fromkeys(wanted, torch.empty(0))
        step_input.chain(table, first, tokens[first : first + CHUNK])
        step_input.logits_rows = [*range(step_input.length)]
        logits.append(model.forward_step(step_input.build(), pool, found).clone())  # the buffer is reused
        for which in wanted:
            states[which].append(found[which].float())
    joined = {which: torch.cat(parts) for which, parts in states.items()}
    return Sample(torch.tensor(tokens), joined, torch.cat(logits))
