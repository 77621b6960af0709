"""The adaptive confidence threshold of Draft & Verify (Zhang et al. 2023, arXiv 2309.08168)."""

from __future__ import annotations

SMOOTH, STEP, KEEP = 0.5, 0.01, 0.9  # the paper's β₁, ε and β₂


def adapt_threshold(
    threshold: float, mean: float, share: float, full: bool, target: float
) -> tuple[float, float]:
    """Threshold and smoothed acceptance after a draft of which this share of tokens was accepted.

    The threshold rises if the smoothed acceptance is below its target.  It falls if the acceptance suffices
    and the draft was not `full`, as deep as it might have been.  mean: the smoothed acceptance before.
    """
    mean = SMOOTH * mean + (1 - SMOOTH) * share
    moved = threshold
    if mean < target:
        moved += STEP
    elif not full:
        moved -= STEP
    return min(1.0, max(0.0, KEEP * threshold + (1 - KEEP) * moved)), mean
