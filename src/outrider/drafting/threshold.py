"""The threshold below which methods stop guessing, as Draft & Verify moves it (Zhang et al. 2023, arXiv 2309.08168)."""

from __future__ import annotations

SMOOTH, STEP, KEEP = 0.5, 0.01, 0.9  # its β₁, ε and β₂


def adapted(threshold: float, mean: float, share: float, full: bool, target: float) -> tuple[float, float]:
    """(threshold, smoothed share of right guesses) after a round in which a share of them was right: up where too few are, down where
    enough are and the round was not `full`, as long as it might have been."""
    mean = SMOOTH * mean + (1 - SMOOTH) * share
    moved = threshold + STEP if mean < target else threshold if full else threshold - STEP
    return min(1.0, max(0.0, KEEP * threshold + (1 - KEEP) * moved)), mean
