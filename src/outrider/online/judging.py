"""Whether weights are better: by their losses on held-out texts, and by the drafts that are accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

MOST_DRAFTS = 1600  # at the last look at new weights
SIGMAS = 2.0  # by which acceptance must fall


@dataclass
class Acceptance:
    """Drafts, and those whose first token was accepted."""

    drafts: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.drafts)

    def fell_since(self, before: Acceptance) -> bool:
        """Whether it is lower by more than chance explains."""
        if not before.drafts or not self.drafts:
            return False
        mean = (self.accepted + before.accepted) / (self.drafts + before.drafts)
        spread = math.sqrt(mean * (1 - mean) * (1 / self.drafts + 1 / before.drafts))
        return before.share - self.share > SIGMAS * spread


@dataclass
class Trial:
    """The trial of new weights.  It ends at a look, after 200, 400, 800 or 1,600 drafts.

    before: the acceptance of the old weights.
    look: drafts at the next look.
    """

    before: Acceptance
    look: int

    def fallen(self, now: Acceptance) -> bool | None:
        """At a look: True if acceptance fell, False if it did not; None to go on."""
        if now.drafts < self.look:
            return None
        self.look *= 2
        if now.fell_since(self.before):
            return True
        risen = now.share >= self.before.share or not self.before.drafts
        return False if risen or now.drafts >= MOST_DRAFTS else None


@dataclass(frozen=True)
class Judgement:
    """A candidate compared with the weights in use.

    texts: seen so far.  steps: of the optimizer.  held: held-out texts.
    loss, in_use: mean losses on them.  needed: how much lower that of the candidate has to be, the standard
    error of the mean difference.
    """

    texts: int
    steps: int
    held: int
    loss: float
    in_use: float
    needed: float

    @staticmethod
    def of(texts: int, steps: int, losses: Sequence[float], in_use: Sequence[float]) -> Judgement:
        """losses, in_use: of each held-out text, at least two."""
        differences = [old - new for new, old in zip(losses, in_use, strict=True)]
        finite = all(map(math.isfinite, differences))
        needed = stdev(differences) / math.sqrt(len(differences)) if finite else math.inf
        return Judgement(texts, steps, len(losses), mean(losses), mean(in_use), needed)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def better(self) -> bool:
        """Whether the losses fell by more than they differ from text to text by chance."""
        return self.in_use - self.loss > self.needed

    def about(self) -> dict[str, float | bool | None]:
        """For a report; None for numbers that are not finite."""
        numbers = {name: value if math.isfinite(value) else None for name, value in vars(self).items()}
        return {**numbers, "better": self.better}
