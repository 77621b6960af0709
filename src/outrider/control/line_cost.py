"""What one more token of a chunk of a prompt takes, or one more level of a draft, which counts as a token."""

from __future__ import annotations

import operator
from dataclasses import dataclass

RIDGE = 0.02
MIN_SLOPE = 0.25  # least per_token, as a part of the seconds per token: noise must not make tokens look free
ALIKE = 1e-6  # rounding of the variance of sizes that are all the same
SIMILAR = 0.04  # variance of sizes, over the square of their mean, up to which they tell little
FREE = 1e-9  # seconds of a token that costs nothing measurable


@dataclass(frozen=True)
class LineCost:
    """Least-squares line: seconds = fixed + per_token * tokens.  Exponentially weighted, 20 observations
    deep.

    Residuals grow with the chunk, so an observation weighs 1 / tokens.  A slight ridge on `fixed` makes the
    line pass through the origin while all chunks have the same size.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_tokens: float = 0.0
    tokens_seconds: float = 0.0

    def scaled(self, factor: float) -> LineCost:
        return LineCost(*[factor * part for part in vars(self).values()])

    def after(self, tokens: int, step: float, decode: float) -> LineCost:
        """The cost after a step of `step` seconds, `decode` of which it would have taken without the chunk.

        Clips an outlier at three times the prediction, so that one slow step does not change the estimate
        much.
        """
        if self.weight:
            step = min(step, 3 * (decode + self.predict(tokens)))
        weight, seconds = 1 / tokens, step - decode
        new = weight, weight * tokens, weight * seconds, weight * tokens**2, weight * tokens * seconds
        return LineCost(*map(operator.add, vars(self.scaled(0.95)).values(), new))

    @property
    def alike(self) -> bool:
        """Whether all chunks had the same size, which does not tell what a token more costs."""
        return self._varies_less(ALIKE)

    @property
    def similar(self) -> bool:
        """Whether their sizes tell little of it."""
        return self._varies_less(SIMILAR)

    def _varies_less(self, variance: float) -> bool:
        return self.weight * self.tokens_tokens < (1 + variance) * self.tokens**2

    def predict(self, tokens: int) -> float:
        fixed, per_token = self.line()
        return fixed + per_token * tokens

    def line(self) -> tuple[float, float]:
        """(fixed, per_token) in seconds: fixed >= 0, per_token > 0."""
        weight = self.weight * (1 + RIDGE)
        if self.tokens_seconds <= 0:
            return 0.0, FREE
        mean = self.tokens_seconds / self.tokens_tokens  # of a line through the origin
        determinant = weight * self.tokens_tokens - self.tokens**2
        slope = (weight * self.tokens_seconds - self.tokens * self.seconds) / determinant
        per_token = min(max(slope, MIN_SLOPE * mean), mean)
        return max(0.0, (self.seconds - per_token * self.tokens) / self.weight), max(per_token, FREE)
