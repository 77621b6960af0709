"""Texts to learn from: the tokens that requests emitted, with the target's states of the same steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.step import FINAL, Commit
from outrider.heads.sample import Sample

CONTEXT = 64  # tokens of a prompt before its output
LONGEST, SHORTEST = 256, 8  # tokens of a text; emitted ones in it
KEPT, HELD = 64, 16  # texts to train on, and to judge by: the latest
EVERY = 4  # one text of so many is held out


@dataclass
class Record:
    """States of the positions first … end - 1 of a row."""

    first: int
    end: int
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Text:
    """tokens int64 [T]; states bfloat16 [T, width]; mask bool [T]: the next token was emitted."""

    tokens: Tensor
    states: Tensor
    mask: Tensor


def teaches(row: Row) -> bool:
    """Whether a row is learned from.

    Not with an adapter, which is another target, nor with a cache_salt, whose texts are kept apart.
    """
    return row.lora is None and row.cache_salt is None


class Texts:
    """The latest texts.

    wanted: the target's states, as in `Needs.states`.
    count, tokens: of the texts so far.
    short, apart: requests with too few tokens, and those that are not learned from.
    """

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = tuple(wanted)
        self.records: dict[Row, Record] = {}
        self.kept, self.held = deque[Text](maxlen=KEPT), deque[Text](maxlen=HELD)
        self.count = self.tokens = self.short = self.apart = 0

    def drop(self) -> None:
        """Keep the counts only."""
        self.records.clear()
        self.kept.clear()
        self.held.clear()

    def observe(self, commit: Commit) -> None:
        for r, step in enumerate(commit.batch):
            row, states = step.row, commit.states.of(r, self.wanted)
            if row.error is not None or not teaches(row):
                continue
            record = self.records.get(row)
            if record is None or record.end != step.start or step.end < row.prompt - CONTEXT:
                record = self.records[row] = Record(step.start, step.start)
            record.states.append(states.to("cpu", torch.bfloat16, copy=True))
            record.end += len(states)
            if record.end - max(record.first, row.prompt) >= LONGEST:
                self.close(row)

    def close(self, row: Row) -> None:
        """Make a text of what is known of a row, if that is enough."""
        record = self.records.pop(row, None)
        if record is None:
            self.apart += not teaches(row)
            return
        end = min(record.end, len(row.tokens))
        first = max(record.first, min(row.prompt, end) - CONTEXT)
        places = torch.arange(first, end)
        mask = (places + 1 >= row.prompt) & (places + 1 < end)
        if int(mask.sum()) < SHORTEST:
            self.short += 1
            return
        states = torch.cat(record.states)[first - record.first : end - record.first].clone()
        text = Text(torch.tensor(row.tokens[first:end]), states, mask)
        (self.held if self.count % EVERY == EVERY - 1 else self.kept).append(text)
        self.count, self.tokens = self.count + 1, self.tokens + int(mask.sum())

    def sample(self, text: Text, logits_of: Callable[[Tensor], Tensor]) -> Sample:
        """The training sample of a text.  logits_of: the target's, of states FINAL [n, hidden]."""
        parts = text.states.float().chunk(len(self.wanted), dim=-1)
        states = {which: part.contiguous() for which, part in zip(self.wanted, parts)}
        rows = logits_of(states[FINAL][text.mask])
        logits = torch.zeros(len(text.tokens), rows.shape[1])
        logits[text.mask] = rows
        return Sample(text.tokens, states, logits, text.mask)
