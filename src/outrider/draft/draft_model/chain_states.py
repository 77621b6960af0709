"""Recurrent states of a hybrid draft model, which drafts chains.

A row has two state slots: after the committed tokens that the draft model has computed, and after its chain.

    slot 2i       ── known ── known ●                ● is saved, and copied to slot 2i + 1
    slot 2i + 1                     └── x ── y       one forward each

So a rejected token leaves no trace.  The accepted ones are computed again when the row catches up.
"""

from __future__ import annotations

from collections import Counter

import torch

from outrider.cache.pool import Pool
from outrider.core.recurrent import RecurrentRows
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.errors import ConfigError
from outrider.models.base import Model


class ChainStates:
    """State slots of all rows.  row_bytes: of the slots of a row, by device."""

    def __init__(self, row_bytes: Counter[torch.device]) -> None:
        self.row_bytes = row_bytes
        self.numbers: dict[Row, int] = {}
        self.free: list[int] = []

    @classmethod
    def of(cls, model: Model, options: DraftModelOptions) -> ChainStates | None:
        """None for a model without recurrent layers.  Raises ConfigError for options of other drafts."""
        if not model.state_bytes(0):
            return None
        others = {
            "siblings": options.siblings > 1,
            "draft_kv_budget": options.draft_kv_budget is not None,
            "drafter": options.drafter is not None,
            "vocab_mismatch": options.vocab_mismatch in ("intersect", "retokenize"),
        }
        if options.parallel_drafting:
            raise ConfigError(
                f"{model.spec.architecture} has recurrent layers, and drafts token by token: "
                "give a PARD model with attention in every layer, or choose the method 'draft_model' without "
                "parallel_drafting."
            )
        if given := [name for name, asked in others.items() if asked]:
            raise ConfigError(
                f"{model.spec.architecture} has recurrent layers, and drafts plain chains of the target's "
                f"tokens: leave {', '.join(given)} out, or give a draft model with attention in every layer."
            )
        return cls(model.state_bytes(0) + model.state_bytes(0))

    def reserve(self, pool: Pool, rows: int) -> None:
        """Allocate the slots of so many rows, so that no step copies the states to grow the pool."""
        assert pool.states is not None
        pool.states.grow(2 * rows)

    def read(self, step_input: StepInput, row: Row, drafts: bool) -> None:
        """Add a row of the first forward, behind its last known token.  drafts: a chain begins there."""
        if row not in self.numbers:
            self.numbers[row] = self.free.pop() if self.free else len(self.numbers)
        slot, last = 2 * self.numbers[row], step_input.length - 1
        recurrent = _recurrent(step_input)
        recurrent.add(slot, last)
        if drafts:
            recurrent.copies[last] = slot + 1

    def grow(self, step_input: StepInput, row: Row) -> None:
        """Add the row of a chain, behind its next token."""
        _recurrent(step_input).add(2 * self.numbers[row] + 1, step_input.length - 1)

    def forget(self, row: Row) -> None:
        if row in self.numbers:
            self.free.append(self.numbers.pop(row))


def _recurrent(step_input: StepInput) -> RecurrentRows:
    if step_input.recurrent is None:
        step_input.recurrent = RecurrentRows()
    return step_input.recurrent
