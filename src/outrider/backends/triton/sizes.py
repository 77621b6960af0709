"""Padded sizes of steps of a whole model and of chains (`fused.py`)."""

from __future__ import annotations

from typing import NamedTuple

from outrider.backends.triton.besides import NO_MORE, More
from outrider.backends.triton.jobs import ROWS, padded_rows
from outrider.backends.triton.linear import FEW
from outrider.backends.triton.plan import Sizes
from outrider.core.device import power_of_two

# Rows with logits in graphs of as many rows and more: as fast as one, for the weights of the head are read.
FEW_WANTED = 64


class StepSizes(NamedTuple):
    """step: of the plan.  wanted: rows with logits.  more: of processors and log-probabilities."""

    step: Sizes
    wanted: int
    more: More = NO_MORE

    @staticmethod
    def of(flat: tuple[int, ...]) -> StepSizes:
        n = len(Sizes._fields)
        return StepSizes(Sizes(*flat[:n]), flat[n], More(*flat[n + 1 :]))


class ChainSizes(NamedTuple):
    """step: of the plan of the first forward.  chains: how many."""

    step: Sizes
    levels: int
    chains: int


def padded_wanted(wanted: int, rows: int) -> int:
    """Rows with logits in a graph of so many rows: of few sizes, for a step with a prompt has any number."""
    return min(rows, padded_rows(max(wanted, FEW_WANTED)))


def first_rows(count: int, levels: int) -> int:
    """Rows of the first forward of chains: for each a token, and those of a chain accepted before."""
    return max(padded_rows(min(power_of_two(count) * (1 + levels), ROWS[-1])), FEW.rows)
