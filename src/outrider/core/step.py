"""Records of one step: its rows, and what a drafter learns from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, Budget, Draft, DraftTree, Resume


@dataclass(slots=True)
class RowStep:
    """One row in one step: what it computes, which draft tokens it gets, and what becomes of them.

        position   start ... end - 1 | end, end + 1, ...
                   known tokens      | slots of draft nodes 0, 1, ...

    The scheduler fills in the first five fields, the drafter `tree`, the controller `kept`, the verification rule
    `accepted` and `emitted`, the forward `topk`.
    """

    row: Row
    start: int  # position of the first known token
    known: int  # number of known tokens
    emits: bool = True  # the known tokens reach the row's last one, so that a new token can be picked
    budget: Budget = NO_BUDGET
    tree: DraftTree = EMPTY_TREE
    # ascending nodes of the proposed tree that a cut has left: node i of `tree` was node kept[i]; None: all
    kept: Sequence[int] | None = None
    verified: bool = (
        False  # the next two are known already: the kernels compared picks with the tree (Rule.fused_match)
    )
    accepted: list[int] = field(default_factory=list)  # path of accepted nodes
    emitted: list[int] = field(default_factory=list)  # their tokens and one more; empty unless `emits`
    # ids of the largest logits (see Needs.topk), best first, after the root and after each node; empty unless `emits`,
    # and none at a node without a finite logit
    topk: list[list[int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position of the first draft node: the number of tokens that are known to the forward."""
        return self.start + self.known

    @property
    def predicted(self) -> list[int]:
        """The tokens from position start + 1 on that this step predicted: known ones, then the emitted ones."""
        return self.row.tokens[self.start + 1 : self.end] + self.emitted

    def count(self, now: float, lossless: bool) -> None:
        """Add a step that emitted tokens to the row's statistics.  now: seconds, on the clock of `Row.arrivals`."""
        row = self.row
        row.steps += 1
        row.drafted += self.tree.size
        row.accepted += len(self.accepted)
        row.lossless = lossless
        row.arrivals += [now] * len(self.emitted)


@dataclass(slots=True)
class Batch:
    """The rows of one step.  failed: rows that ended before they began.  prefill: some row computes a part of its prompt."""

    steps: list[RowStep] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    prefill: bool = False
    resume: Resume | None = None

    def add(self, row: Row, known: int, budget: Budget = NO_BUDGET) -> None:
        """Let `row` compute its next `known` tokens."""
        end = row.computed + known
        self.steps.append(RowStep(row, row.computed, known, end == len(row.tokens), budget))
        self.prefill |= end <= row.prompt

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RowStep]:
        return iter(self.steps)

    def __getitem__(self, r: int) -> RowStep:
        return self.steps[r]

    @property
    def rows(self) -> list[Row]:
        return [step.row for step in self.steps]

    def within(self, budgets: Sequence[Budget]) -> Batch:
        """The same rows with other budgets."""
        return Batch([replace(step, budget=budget) for step, budget in zip(self.steps, budgets)])

    def take(self, draft: Draft) -> None:
        """Give every row its draft tree."""
        self.resume = draft.resume
        for step, tree in zip(self.steps, draft.trees):
            step.tree = tree


FINAL = -1  # the states that the head reads, after the last norm


class Needs(NamedTuple):
    """What a drafter wants to see of the target's forward.

    topk: so many ids with the largest logits (64 at most), at the root and at every guess.
    states: hidden states, at every token that becomes certain: FINAL, or the number of the layer that they enter.
    lookbehind: how many of the tokens that the prefix cache, or another sample, gives are computed again, for their states.
    """

    topk: int = 0
    states: tuple[int, ...] = ()
    lookbehind: int = 0

    def __or__(self, other: Needs) -> Needs:  # type: ignore[override]
        states = tuple(sorted({*self.states, *other.states}))
        return Needs(max(self.topk, other.topk), states, max(self.lookbehind, other.lookbehind))


class States(NamedTuple):
    """Hidden states of the target where tokens became certain.

    kept: what `Needs.states` names -> [n, hidden] for the n rows of the forward.  places[r]: which of these are the positions
    batch[r].start, … of row r, its chunk and then the path that was accepted.
    """

    kept: Mapping[int, Tensor]
    places: list[list[int]]

    def of(self, r: int, wanted: Sequence[int], last: bool = False) -> Tensor:
        """[positions, len(wanted) * hidden]: side by side, in this order; of the last position only, if asked for."""
        places = self.places[r][-1:] if last else self.places[r]
        return torch.cat([self.kept[which][places] for which in wanted], dim=-1)


NO_STATES = States({}, [])


class Commit(NamedTuple):
    """What is certain after a step: the only thing a drafter learns from.  A replay after preemption is recognised by `start`.

    states: the hidden states that `Needs.states` names.
    """

    batch: Batch
    states: States = NO_STATES
