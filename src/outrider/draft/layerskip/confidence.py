"""When to stop, and how many siblings to keep, by the confidence of the draft (Draft & Verify, SWIFT)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.threshold import adapted

# By whether the row is greedy.
AUTO = {True: 0.8, False: 0.5}  # initial threshold
SIBLINGS = {True: (3, 5, 8, 10), False: (1, 3, 5, 10)}  # for a confidence above each of BOUNDS, and below all
BOUNDS = (0.95, 0.8, 0.5)
TARGET = 0.9  # Draft & Verify's α


@dataclass
class ExitThreshold:
    """A row's exit threshold.  It adapts so that the share of accepted tokens is about TARGET.

    accepted: that share, smoothed.  depth: the depth that this step's draft may have.
    """

    value: float
    adapts: bool
    accepted: float = 0.0
    depth: int = 0

    def learn(self, drafted: int, accepted: int) -> None:
        if self.adapts:
            full, share = drafted >= self.depth, accepted / drafted
            self.value, self.accepted = adapted(self.value, self.accepted, share, full, TARGET)


def siblings_at(confidence: float, greedy: bool) -> int:
    """Number of siblings to keep for the probability of the best token."""
    return SIBLINGS[greedy][next((i for i, bound in enumerate(BOUNDS) if confidence > bound), len(BOUNDS))]
