"""Records of one step: its rows, their draft trees, and the hidden states that a drafter uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.device import beside, to_device
from outrider.core.row import LastDraft, Row
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, Budget, Draft, DraftTree, Resume


@dataclass(slots=True)
class RowStep:
    """One row in one step: its known tokens, its draft tree, and the accepted and emitted tokens.

        position   start ... end - 1 | end, end + 1, ...
                   known tokens      | slots of draft nodes 0, 1, ...

    Fields are set by the scheduler (first five), the drafter (`tree`), the controller (`kept`), the
    verification rule (`accepted`, `emitted`) and the forward (`topk`).
    """

    row: Row
    start: int  # position of the first known token
    known: int  # number of known tokens
    emits: bool = True  # the known tokens reach the row's last one, so that a new token can be picked
    budget: Budget = NO_BUDGET
    tree: DraftTree = EMPTY_TREE
    # nodes of the proposed tree left after trimming, ascending: node i of `tree` was node kept[i]; None: all
    kept: Sequence[int] | None = None
    verified: bool = False  # the kernels have set the next two fields (Rule.kernel)
    accepted: Sequence[int] = ()  # path of accepted nodes
    emitted: Sequence[int] = ()  # their tokens and one more; empty unless `emits`
    # the node of the last emitted token, if it was drafted (it ends the row, or the grammar cannot judge what
    # follows): emitted, but not `accepted`, as its K/V is not kept
    closing: Sequence[int] = ()
    # ids of the largest logits (see Needs.topk), best first, after the root and after each node;
    # empty unless `emits`, with an empty entry at a node without a finite logit
    topk: Sequence[list[int]] = ()
    top_logits: Sequence[list[float]] = ()  # those of `topk`, raw, if `Needs.logits`

    @property
    def end(self) -> int:
        """Position of the first draft node: the number of tokens that are known to the forward."""
        return self.start + self.known

    @property
    def decodes(self) -> bool:
        """Whether an earlier step emitted its only known token.

        False right after a prompt, even if its last chunk has one token: chunks depend on the clock and on
        cached pages, and drafts must not.
        """
        return self.known == 1 and len(self.row.tokens) > self.row.prompt

    @property
    def predicted(self) -> list[int]:
        """Tokens that this step predicted, from position start + 1: the known ones, then the emitted ones."""
        return [*self.row.tokens[self.start + 1 : self.end], *self.emitted]

    def shorten(self, count: int) -> None:
        """Keep the first `count` emitted tokens.  The last one becomes the pending token of its row."""
        if count < len(self.emitted):
            self.emitted = self.emitted[:count]
            self.accepted, self.closing = self.accepted[: count - 1], self.accepted[count - 1 : count]

    def count(self, now: float, lossless: bool, sources: Sequence[str]) -> None:
        """Add a step that emitted tokens to the row's statistics.

        now: seconds on the clock of `Row.arrivals`.  sources: the drafters' names (`Joined.sources`).
        """
        row, tree = self.row, self.tree
        row.steps += 1
        if tree.tokens:
            self._count_draft(sources)
        if not self.closing:
            row.sources.append(None)
        row.last_draft = LastDraft(tree, self.accepted, self.emitted, sources)
        row.lossless = lossless
        row.arrivals += [now] * len(self.emitted)

    def _count_draft(self, sources: Sequence[str]) -> None:
        row, tree, accepted = self.row, self.tree, len(self.accepted)
        if not (size := len(tree.tokens) - tree.probes):
            return
        row.drafted += size
        row.accepted += accepted
        row.accepted_lengths[accepted] += 1
        if tree.source:
            row.sources += [sources[tree.source[node]] for node in (*self.accepted, *self.closing)]
            row.drafted_by.update([sources[source] for source in tree.source[:size]])
        else:
            row.sources += [sources[0]] * (accepted + len(self.closing))
            row.drafted_by[sources[0]] += size


class MixBudgets(Protocol):
    """Budgets of the drafters of a mix, which are set for one drafter after the other."""

    @property
    def order(self) -> Sequence[int]:
        """Numbers of the drafters, in the order in which they draft."""

    def budgets_of(self, k: int, batch: Batch, drafts: Mapping[int, Draft]) -> list[Budget]:
        """Budgets of drafter k for the rows of a batch.  drafts: of the drafters before it, by number."""


class Batch(list[RowStep]):
    """The rows of one step.

    failed: rows that ended before their first step.  prefill: some row computes a part of its prompt.
    waiting: rows that wait for their first step and then run beside these.
    mix_budgets: of the drafters of a mix; None: each drafts within its own limits.
    """

    def __init__(self, steps: Iterable[RowStep] = (), prefill: bool = False) -> None:
        super().__init__(steps)
        self.prefill = prefill
        self.failed: list[Row] = []
        self.waiting = 0
        self.resume: Resume | None = None
        self.mix_budgets: MixBudgets | None = None

    def add(self, row: Row, known: int, budget: Budget = NO_BUDGET) -> None:
        """Add a row with its next `known` tokens."""
        end = row.computed + known
        self.append(RowStep(row, row.computed, known, end == len(row.tokens), budget))
        self.prefill |= end <= row.prompt

    @property
    def rows(self) -> list[Row]:
        return [step.row for step in self]

    def within(self, budgets: Sequence[Budget]) -> Batch:
        """The same rows with other budgets, before they have trees."""
        # `dataclasses.replace` takes six times as long as the constructor
        return Batch(
            [RowStep(step.row, step.start, step.known, step.emits, b) for step, b in zip(self, budgets)]
        )

    def cut(self, step: RowStep, nodes: Sequence[int]) -> None:
        """Keep these nodes of a row's tree, ascending and closed under parents, after `take`."""
        if self.resume is not None:
            r = next(r for r, own in enumerate(self) if own is step)
            # K/V of the nodes is in the slots of their numbers, which only the first ones keep
            first = not nodes or nodes[-1] < len(nodes)
            self.resume = self.resume.cut(r, len(nodes)) if first else None
        step.kept = nodes if step.kept is None else [step.kept[i] for i in nodes]
        step.tree = step.tree.only(nodes) if nodes else EMPTY_TREE

    def take(self, draft: Draft) -> None:
        """Assign the draft trees to the rows."""
        self.resume = draft.resume
        for step, tree in zip(self, draft.trees):
            step.tree = tree


FINAL = -1  # states after the last norm, the input of the language model head


class Needs(NamedTuple):
    """Outputs of the target's forward that a drafter needs.

    topk        number of ids with the largest logits at the root and at every draft node, at most 64
    states      hidden states of known and accepted tokens: FINAL, or the number of the layer that they enter
    lookbehind  number of cached prefix tokens that are recomputed for their hidden states
    logits      whether `topk` comes with these logits
    """

    topk: int = 0
    states: tuple[int, ...] = ()
    lookbehind: int = 0
    logits: bool = False

    def __or__(self, other: Needs) -> Needs:  # type: ignore[override]
        states = tuple(sorted({*self.states, *other.states}))
        lookbehind, logits = max(self.lookbehind, other.lookbehind), self.logits or other.logits
        return Needs(max(self.topk, other.topk), states, lookbehind, logits)


MAX_GATHERED = 64  # positions of a row at most that are gathered together with those of other rows


@dataclass(slots=True)
class States:
    """Hidden states of the target at known and accepted tokens.

    kept: entry of `Needs.states` -> [num_rows, hidden] for the rows of the forward.
    places[r]: forward rows of the positions batch[r].start, … of row r: its known tokens, then the accepted
    path.
    """

    kept: Mapping[int, Tensor]
    places: Sequence[Sequence[int]]
    num_rows: int  # not asked of a tensor: right behind a forward that takes 20 µs
    _gathered: dict[object, dict[int, Tensor]] = field(default_factory=dict)

    def all(self, wanted: Sequence[int]) -> Tensor:
        """The wanted states of all forward rows side by side, [n, len(wanted) * hidden]."""
        return self._at(range(self.num_rows), wanted)

    def of(self, r: int, wanted: Sequence[int]) -> Tensor:
        """The wanted states of row r side by side, [positions, len(wanted) * hidden].

        Rows of few positions are gathered together: on a device a call costs more than what it copies.
        """
        if len(own := self.places[r]) > MAX_GATHERED:
            consecutive = own[-1] - own[0] < len(own)  # those of a prompt are
            return self._at(range(own[0], own[-1] + 1) if consecutive else own, wanted)
        if (key := ("all", *wanted)) not in self._gathered:
            self._gathered[key] = self._gather(self.places, wanted)
        return self._gathered[key][r]

    def of_all(self, wanted: Sequence[int]) -> Sequence[Tensor]:
        """`of` every row."""
        if max(map(len, self.places)) > MAX_GATHERED:
            return [self.of(r, wanted) for r in range(len(self.places))]
        return [*self._gather(self.places, wanted).values()]

    def only(self, rows: Sequence[int], wanted: Sequence[int]) -> States:
        """The wanted states of these rows: a copy, of at least one state."""
        index = [place for r in rows for place in self.places[r]]
        consecutive = index[-1] - index[0] < len(index)
        states = self._at(range(index[0], index[-1] + 1) if consecutive else index, wanted)
        if states.untyped_storage().nbytes() > states.nbytes:  # those of other rows would be kept, too
            states = states.clone()
        parts = states.chunk(len(wanted), dim=-1)
        ends = [0, *accumulate([len(self.places[r]) for r in rows])]
        return States(dict(zip(wanted, parts)), [range(*span) for span in pairwise(ends)], len(index))

    def last_of(self, r: int, wanted: Sequence[int]) -> Tensor:
        """The wanted states of the last position of row r, [1, len(wanted) * hidden]."""
        if (key := ("last", *wanted)) not in self._gathered:
            self._gathered[key] = self._gather([own[-1:] for own in self.places], wanted)
        return self._gathered[key][r]

    def _gather(self, places: Sequence[Sequence[int]], wanted: Sequence[int]) -> dict[int, Tensor]:
        """The wanted states of all rows with few places, by row, in one call."""
        short = {r: own for r, own in enumerate(places) if len(own) <= MAX_GATHERED}
        flat = [place for own in short.values() for place in own]
        parts = torch.split(self._at(flat, wanted), [len(own) for own in short.values()])
        return dict(zip(short, parts))

    def _at(self, places: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """The wanted states of some forward rows, ascending.  A range needs no index on the device."""
        parts = [self.kept[which] for which in wanted]
        if (whole := beside(parts)) is not None:
            parts = [whole]
        if isinstance(places, range) and len(places) < len(parts[0]):
            parts = [part[places.start : places.stop] for part in parts]
        elif len(places) < len(parts[0]):
            index = to_device(torch.tensor(places, dtype=torch.int64), parts[0].device)
            parts = [part.index_select(0, index) for part in parts]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=-1)


NO_STATES = States({}, [], 0)


class Commit(NamedTuple):
    """Result of a step as passed to the drafter: the known and accepted tokens.

    states: the hidden states that `Needs.states` names.  A replay after preemption is recognised by `start`.
    """

    batch: Batch
    states: States = NO_STATES

    def only(self, rows: Sequence[int], wanted: Sequence[int]) -> Commit:
        """Some rows, with the wanted states."""
        states = self.states.only(rows, wanted) if rows else NO_STATES
        return Commit(Batch([self.batch[r] for r in rows]), states)
