"""Training samples of heads: texts with the states and logits of the target."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.checkpoints.spec import Spec
from outrider.core.device import to_device
from outrider.core.ragged import Ragged
from outrider.core.recurrent import RecurrentRows
from outrider.core.step_input import StepInput
from outrider.heads.parts import soft_cross_entropy
from outrider.models.base import Model

HOST_CHUNK, CHUNK = 256, 8192  # tokens in one forward, on a CPU and on another device


@dataclass
class Agreement:
    """Places, and those where the likeliest first draft token is the text's."""

    places: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        return self.right / max(1, self.places)


@dataclass(frozen=True)
class Sample:
    """A text of T tokens, or several that follow one another.

    tokens: int64 [T].
    states: FINAL or a layer -> float32 [T, hidden], as `Needs.states` names them.
    logits: float32 [T, V] of the target; logits[t] are for the token after tokens[t].  Empty for losses
        that do not read them.
    mask: bool [T], on the host, whether what place t predicts, the token at t + 1, counts.  None: all places
        count.
    lengths: tokens of each text, where there are several.
    seeds: of the random numbers of each text.  Empty: those of the default generator.
    agreement: counts the first draft tokens that are the text's, if wanted.

    Places are chosen on the host, without a wait for the device.
    """

    tokens: Tensor
    states: dict[int, Tensor]
    logits: Tensor
    mask: Tensor | None = None
    lengths: Sequence[int] = ()
    seeds: Sequence[int] = ()
    agreement: Agreement | None = None

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [T], on the host: the number of every place within its text."""
        return torch.cat([torch.arange(length) for length in self.lengths or [len(self.tokens)]])

    @cached_property
    def texts(self) -> Ragged:
        """The places as rows of their texts."""
        return Ragged.of(self.lengths or [len(self.tokens)], self.tokens.device)

    def host_places(self, first: int, count: int) -> Tensor:
        """`places`, on the host."""
        if self.mask is None:
            return torch.arange(count)
        counted = self.mask[first : first + count]
        if len(self.lengths) > 1:
            counted = counted & (self.offsets[first : first + count] >= first)
        return counted.nonzero().flatten()

    def places(self, first: int, count: int) -> Tensor:
        """int64, ascending: the i < count for which place first + i counts and is of the same text."""
        return to_device(self.host_places(first, count), self.tokens.device)

    def uniforms(self, width: int) -> Tensor:
        """Random numbers in [0, 1), float32 [T, width].  Those of a text depend on its seed alone."""
        device = self.tokens.device
        if not self.seeds:
            return torch.rand(len(self.tokens), width, device=device)
        rows = zip(self.lengths or [len(self.tokens)], self.seeds)
        generators = ((length, torch.Generator(device).manual_seed(seed)) for length, seed in rows)
        return torch.cat([torch.rand(n, width, device=device, generator=each) for n, each in generators])

    def record(self, logits: Tensor, places: Tensor, ids: Tensor | None = None) -> None:
        """Count the places [n] whose token is the likeliest of the logits [n, V].

        ids: int64 [V], the target's tokens; None: all
        """
        if self.agreement is not None:
            likeliest = logits.argmax(-1)
            chosen = likeliest if ids is None else ids[likeliest]
            self.agreement.places += len(places)
            self.agreement.right += int((chosen == self.tokens[places]).sum())

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
    """Embedding and lm_head of the target, float32 [V, hidden], which no head trains.

    bias: [V] or None.  cap: soft cap of the logits, or 0.
    """

    embedding: Tensor
    lm_head: Tensor
    bias: Tensor | None = None
    cap: float = 0.0

    @staticmethod
    def of(model: Model) -> TargetWeights:
        """The bias is the logits of zeros, the lm_head those of unit vectors before the cap.

        The caps of other families than the lean decoder's are not known: theirs stay in the lm_head.
        """
        hidden, cap = model.spec.hidden, model.spec.variant.logit_cap if isinstance(model.spec, Spec) else 0.0
        unit_vectors = torch.eye(hidden, dtype=model.backend.activations, device=model.device)
        bias = _uncapped(model.head_logits(torch.zeros_like(unit_vectors[:1]))[0], cap).clone()
        lm_head = (_uncapped(model.head_logits(unit_vectors), cap) - bias).T.contiguous()
        embedding = model.embed(range(model.spec.vocabulary)).float()
        return TargetWeights(embedding, lm_head, bias if bias.any() else None, cap)

    def logits(self, x: Tensor) -> Tensor:
        """[n, V] of states [n, hidden] after the last norm."""
        logits = F.linear(x, self.lm_head, self.bias)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def _uncapped(logits: Tensor, cap: float) -> Tensor:
    """What a soft cap made these logits of.  cap: 0 for none."""
    if not cap:
        return logits
    most = 1.0 - torch.finfo(torch.float32).eps  # of 1 the inverse is infinite
    return cap * torch.atanh((logits / cap).clamp(-most, most))


def read_states(model: Model, texts: Sequence[Sequence[int]], wanted: Collection[int]) -> dict[int, Tensor]:
    """States float32 [T, hidden] of texts, one behind the other, as `Needs.states` names them."""
    states: dict[int, list[Tensor]] = {which: [] for which in wanted}
    pool = model.pool(sum(map(len, texts)))
    for step_input in _chunks(texts, HOST_CHUNK if model.device.type == "cpu" else CHUNK):
        found = dict.fromkeys(wanted, torch.empty(0))
        model.forward_step(step_input, pool, found)
        for which in wanted:
            states[which].append(found[which].float().clone())  # a backend may reuse its memory
    return {which: torch.cat(parts) for which, parts in states.items()}


def _chunks(texts: Sequence[Sequence[int]], most: int) -> Iterator[StepInput]:
    """Steps of at most so many tokens for all texts.  K/V of a text follows that of the text before.

    Every text has a state slot of its own, as it may go on in the next step, at another place among the
    requests.
    """
    rows, filled = RecurrentRows(), 0
    step_input = StepInput(recurrent=rows)
    for number, tokens in enumerate(texts):
        table, first = array("i", range(filled, filled + len(tokens))), 0
        filled += len(tokens)
        while first < len(tokens):
            part = tokens[first : first + most - step_input.length]
            step_input.chain(table, first, part)
            rows.add(number, step_input.length - 1)
            first += len(part)
            if step_input.length == most:
                yield _built(step_input)
                rows = RecurrentRows()
                step_input = StepInput(recurrent=rows)
    if step_input.length:
        yield _built(step_input)


def _built(step_input: StepInput) -> StepInput:
    """Build a step with the logits of one row, since there is no step without any."""
    step_input.logits_rows = [step_input.length - 1]
    return step_input.build()


def target_logits(model: Model, states: Tensor) -> Tensor:
    """Logits float32 [T, V] of states FINAL [T, hidden]."""
    return model.head_logits(states.to(model.device, model.backend.activations)).clone()
