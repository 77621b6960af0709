"""Training samples of heads: texts with the states and logits of the target."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.step_input import StepInput
from outrider.heads.parts import soft_cross_entropy
from outrider.models.base import Model

CHUNK = 256  # tokens in one forward


@dataclass(frozen=True)
class Sample:
    """A text of T tokens, or several that follow one another.

    tokens: int64 [T].
    states: FINAL or a layer -> float32 [T, hidden], as `Needs.states` names them.
    logits: float32 [T, V] of the target; logits[t] are for the token after tokens[t].  Empty for losses
        that do not read them.
    mask: bool [T], whether what place t predicts, the token at t + 1, counts.  None: all places count.
    lengths: tokens of each text, where there are several.
    """

    tokens: Tensor
    states: dict[int, Tensor]
    logits: Tensor
    mask: Tensor | None = None
    lengths: Sequence[int] = ()

    @property
    def offsets(self) -> Tensor:
        """int64 [T]: the number of every place within its text."""
        lengths = self.lengths or [len(self.tokens)]
        return torch.cat([torch.arange(length, device=self.tokens.device) for length in lengths])

    def places(self, first: int, count: int) -> Tensor:
        """int64, ascending: the i < count for which place first + i counts and is of the same text."""
        if self.mask is None:
            return torch.arange(count, device=self.tokens.device)
        counted = self.mask[first : first + count]
        if len(self.lengths) > 1:
            counted = counted & (self.offsets[first : first + count] >= first)
        return counted.nonzero().flatten()

    def text_loss(self, logits: Tensor, places: Tensor) -> Tensor:
        """Mean cross entropy of logits [n, V] with the text's tokens at the places [n]."""
        return mean_loss(F.cross_entropy(logits.float(), self.tokens[places], reduction="none"))

    def target_loss(self, logits: Tensor, places: Tensor) -> Tensor:
        """Mean cross entropy of logits [n, V] with the target's distributions of the places [n]."""
        return mean_loss(soft_cross_entropy(logits, self.logits[places]))


def mean_loss(losses: Tensor) -> Tensor:
    """Mean of losses [n]; 0 if there are none."""
    return losses.sum() / max(1, len(losses))


@dataclass(frozen=True)
class TargetWeights:
    """Embedding and lm_head of the target, float32 [V, hidden], which no head trains; bias [V] or None."""

    embedding: Tensor
    lm_head: Tensor
    bias: Tensor | None = None

    @staticmethod
    def of(model: Model) -> TargetWeights:
        """The bias is the logits of zeros.  An lm_head with a soft cap becomes those of unit vectors."""
        hidden = model.spec.hidden
        unit_vectors = torch.eye(hidden, dtype=model.backend.activations, device=model.device)
        bias = model.head_logits(torch.zeros_like(unit_vectors[:1]))[0].clone()
        lm_head = (model.head_logits(unit_vectors) - bias).T.contiguous()
        embedding = model.embed(range(model.spec.vocabulary)).float()
        return TargetWeights(embedding, lm_head, bias if bias.any() else None)

    def logits(self, x: Tensor) -> Tensor:
        """[n, V] of states [n, hidden] after the last norm."""
        return F.linear(x, self.lm_head, self.bias)


def read_states(model: Model, tokens: Sequence[int], wanted: Collection[int]) -> dict[int, Tensor]:
    """States float32 [T, hidden] of one text, as `Needs.states` names them."""
    pool, table = model.pool(len(tokens)), array("i", range(len(tokens)))
    states: dict[int, list[Tensor]] = {which: [] for which in wanted}
    for first in range(0, len(tokens), CHUNK):
        step_input, found = StepInput(), dict.fromkeys(wanted, torch.empty(0))
        step_input.chain(table, first, tokens[first : first + CHUNK])
        step_input.logits_rows = [step_input.length - 1]
        model.forward_step(step_input.build(), pool, found)
        for which in wanted:
            states[which].append(found[which].float().clone())  # a backend may reuse its memory
    return {which: torch.cat(parts) for which, parts in states.items()}


def target_logits(model: Model, states: Tensor) -> Tensor:
    """Logits float32 [T, V] of states FINAL [T, hidden]."""
    return model.head_logits(states.to(model.device, model.backend.activations)).clone()
