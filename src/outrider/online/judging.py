"""Whether weights are better: by the tokens of held-out texts that they draft, and by accepted drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, NamedTuple

MOST_DRAFTS = 1600  # at the last look at new weights
SIGMAS = 2.0  # by which acceptance must fall


@dataclass
class Acceptance:
    """Drafts, and those whose first token was accepted.

    squares, products, accepted_squares: sums, over requests, of drafts², drafts · accepted and accepted².
    """

    drafts: int = 0
    accepted: int = 0
    squares: int = 0
    products: int = 0
    accepted_squares: int = 0

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.drafts)

    def add(self, drafts: int, accepted: int) -> None:
        """Count a request."""
        self.drafts += drafts
        self.accepted += accepted
        self.squares += drafts * drafts
        self.products += drafts * accepted
        self.accepted_squares += accepted * accepted

    @property
    def variance(self) -> float:
        """Of the share, as that of a ratio of sums over requests: drafts of one request are alike."""
        share = self.share
        residuals = self.accepted_squares - 2 * share * self.products + share * share * self.squares
        return max(0.0, residuals) / max(1, self.drafts) ** 2

    def fell_since(self, before: Acceptance) -> bool:
        """Whether it is lower by more than chance explains."""
        if not before.drafts or not self.drafts:
            return False
        mean = (self.accepted + before.accepted) / (self.drafts + before.drafts)
        independent = mean * (1 - mean) * (1 / self.drafts + 1 / before.drafts)
        spread = math.sqrt(max(independent, self.variance + before.variance))
        return before.share - self.share > SIGMAS * spread


@dataclass
class Drafted:
    """Drafts for a request, and those whose first token was accepted.

    weights: which ones were in use at the first.
    """

    weights: int
    drafts: int = 0
    accepted: int = 0


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


class Score(NamedTuple):
    """Of weights on a text: the loss, and the share of first draft tokens that are the text's."""

    loss: float
    right: float


class Difference(NamedTuple):
    """Of paired numbers: their mean, and its standard error."""

    mean: float
    error: float

    @staticmethod
    def of(numbers: Sequence[float]) -> Difference:
        if not all(map(math.isfinite, numbers)):
            return Difference(-math.inf, math.inf)
        return Difference(mean(numbers), stdev(numbers) / math.sqrt(len(numbers)))

    @property
    def certain(self) -> bool:
        """Whether it is positive by more than the numbers differ by chance."""
        return self.mean > self.error


@dataclass(frozen=True)
class Judgement:
    """A candidate compared with the weights in use.

    texts: seen so far.  steps: of the optimizer.  held: held-out texts.
    loss, right: means on them.  loss_in_use, right_in_use: those of the weights in use.
    needed: how much more of the tokens have to be right, the standard error of the mean difference.
    better: they are.  learning: the loss is lower, by more than chance explains.
    """

    texts: int
    steps: int
    held: int
    loss: float
    loss_in_use: float
    right: float
    right_in_use: float
    needed: float
    better: bool
    learning: bool

    @staticmethod
    def of(texts: int, steps: int, scores: Sequence[Score], in_use: Sequence[Score]) -> Judgement:
        """scores, in_use: of each held-out text, at least two."""
        pairs = list(zip(scores, in_use, strict=True))
        lower = Difference.of([old.loss - new.loss for new, old in pairs])
        risen = Difference.of([new.right - old.right for new, old in pairs])
        return Judgement(
            texts=texts,
            steps=steps,
            held=len(pairs),
            loss=mean(new.loss for new in scores),
            loss_in_use=mean(old.loss for old in in_use),
            right=mean(new.right for new in scores),
            right_in_use=mean(old.right for old in in_use),
            needed=risen.error,
            better=math.isfinite(lower.mean) and risen.certain,
            learning=lower.certain,
        )

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)

    def about(self) -> dict[str, Any]:
        """For a report; None for numbers that are not finite."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}
