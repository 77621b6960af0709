"""When to stop guessing, and how many siblings to keep: what Draft & Verify and SWIFT read from the confidence of a draft."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.threshold import adapted

AUTO = {True: 0.8, False: 0.5}  # where a threshold begins: greedy, sampled
SIBLINGS = {True: (3, 5, 8, 10), False: (1, 3, 5, 10)}  # by confidence: above 0.95, 0.8, 0.5, and below
STEPS = (0.95, 0.8, 0.5)
TARGET = 0.9  # Draft & Verify's α


@dataclass
class Exit:
    """A row stops after a guess less likely than `threshold`, which moves so that the share of right guesses is about TARGET."""

    threshold: float
    adapts: bool
    right: float = 0.0  # smoothed share of guesses that were right
    depth: int = 0  # levels that this step might have had

    def learn(self, drafted: int, accepted: int) -> None:
        if self.adapts:
            self.threshold, self.right = adapted(
                self.threshold, self.right, accepted / drafted, drafted >= self.depth, TARGET
            )


def siblings_at(confidence: float, greedy: bool) -> int:
    """How many guesses a level keeps, by how likely its best one is."""
    return SIBLINGS[greedy][next((i for i, step in enumerate(STEPS) if confidence > step), len(STEPS))]
