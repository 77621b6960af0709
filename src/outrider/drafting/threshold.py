"""The adaptive confidence threshold of Draft & Verify (Zhang et al. 2023, arXiv 2309.08168)."""

from __future__ import annotations

SMOOTH, STEP, KEEP = 0.5, 0.01, 0.9  # the paper's β₁, ε and β₂


def adapted(threshold: float, mean: float, share: float, full: bool, target: float) -> tuple[float, float]:
    """Return (threshold, smoothed acceptance) after a round with this share of accepted draft tokens.

    The threshold rises if the acceptance is below its target.  It falls if the acceptance suffices and the
    round was not `full`, as deep as it might have been.
    """
    mean = SMOOTH * mean + (1 - SMOOTH) * share
    moved = threshold + STEP if mean < target else threshold if full else threshold - STEP
    return min(1.0, max(0.0, KEEP * threshold + (1 - KEEP) * moved)), mean
