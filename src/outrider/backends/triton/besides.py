"""What a step computes beside the answers to its trees: edits of logits processors, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.backends.triton.edits import ROW, TREE, EditTables, edited
from outrider.backends.triton.plan import aligned
from outrider.backends.triton.values import AskedValues
from outrider.core.device import HostCopy, to_device
from outrider.core.edits import Numbers
from outrider.core.logprobs import TopValues
from outrider.core.processor import edits_of
from outrider.core.row import Row
from outrider.core.tree import DraftTree


class More(NamedTuple):
    """Padded sizes; 0 for what is not computed.

    edits: room of the edits of processors.  values, best: as in `AskedValues`.
    """

    edits: int
    values: int
    best: int

    def length(self, rows: int) -> int:
        """Numbers of both in a step with so many rows of logits."""
        return self.before_edits + ((ROW + TREE) * rows + self.edits if self.edits else 0)

    @property
    def before_edits(self) -> int:
        return aligned(self.values) if self.values else 0


NO_MORE = More(0, 0, 0)


class Besides(NamedTuple):
    """more: what is computed.  numbers: int32, of `Asked.more_numbers`.  mode: one of `logprobs.MODES`."""

    more: More
    numbers: Tensor
    mode: str

    def edited(self, logits: Tensor) -> Tensor:
        """Logits [M, V] after the processors of their rows; the same if no row has any."""
        return edited(logits, self.numbers[self.more.before_edits :]) if self.more.edits else logits

    @property
    def asked(self) -> Tensor:
        """Rows of the logits whose values are asked for."""
        return self.numbers[: self.more.values]


class Asked:
    """What the rows of trees to verify ask for besides, and the answers once they are copied."""

    def __init__(self) -> None:
        self.edits, self.asked = EditTables(), AskedValues()
        self.answers: HostCopy | None = None
        self.data: list[int] = []  # of `answers`
        self.before_values = self.width = 0  # numbers in `data`, and of each row of values

    def takes(self, row: Row, number: int, tree: DraftTree, root: int) -> bool:
        """Note what the processors of a row do, whose tree has this number.

        False if only calls can tell: `verify/` verifies the row then.
        """
        if row.processors:
            if (edits := edits_of(row.processors, row.tokens, tree)) is None:
                return False
            self.edits.add(number, root, edits)
        self.edits.used = root + tree.size + 1
        return True

    @property
    def more(self) -> More:
        return More(self.edits.room, self.asked.size, self.asked.best)

    def more_numbers(self, rows: int, more: More) -> Numbers:
        """What kernels read of `more` for so many rows of logits: rows with values, and the edits."""
        first = np.zeros(more.before_edits, np.int32)
        first[: len(self.asked.rows)] = self.asked.rows
        return np.concatenate([first, self.edits.numbers(rows)]) if more.edits else first

    def besides(self, rows: int, device: torch.device) -> Besides | None:
        """The same on a device; None if it is nothing."""
        if (more := self.more) == NO_MORE:
            return None
        numbers = torch.from_numpy(self.more_numbers(rows, more))
        return Besides(more, to_device(numbers, device), self.asked.mode)

    def answered(self, answers: Tensor, values: Tensor | None = None) -> None:
        """Begin to copy the answers to the host, and the values beside them."""
        if values is not None:
            self.before_values, self.width = len(answers), values.shape[1]
            answers = torch.cat([answers, values.view(-1)])
        self.answers = HostCopy(answers)

    def read_numbers(self) -> list[int]:
        """Wait for the answers."""
        self.data = [] if self.answers is None else self.answers.tolist()
        return self.data

    def values(self, key: int, nodes: Sequence[int]) -> list[TopValues] | None:
        """Log-probabilities of the tokens after these nodes, once `read`; None if they are not here."""
        if key not in self.asked.places:
            return None
        return self.asked.read(key, nodes, self.data, self.before_values, self.width)
