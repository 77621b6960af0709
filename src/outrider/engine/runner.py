"""The target's forward over the known tokens and draft trees of all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.core.logprobs import Logprobs, TopValues
from outrider.core.step import FINAL, Batch, Needs, RowStep, States
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Resume
from outrider.engine.row_states import RowStates
from outrider.errors import OutriderError
from outrider.models.base import Model
from outrider.sampling import random_streams
from outrider.sampling.sampler import Sampler

UNSET = torch.empty(0)  # placeholder for hidden states that the forward fills in
SLICE = 16  # rows of prompt logits in memory at once


@cache
def one_each(rows: int) -> Sequence[Sequence[int]]:
    """Places of states where each row has one."""
    return [(place,) for place in range(rows)]


class Span(NamedTuple):
    """Forward rows of one row of the batch: of its first known token, and of its draft node 0."""

    first: int
    end: int


def spans_of(batch: Batch) -> list[Span]:
    """The forward rows of each row of a batch, which follow one another."""
    spans, first = list[Span](), 0
    for step in batch:
        end = first + step.known
        spans.append(Span(first, end))
        first = end + len(step.tree.tokens)
    return spans


@dataclass(slots=True, eq=False)
class ForwardOutput:
    """Logits and hidden states of a forward.  Implements `Picker`: evaluates nodes lazily.

    logits  float32 [M, V]: after the root of row r in row roots[r], after its node i in row roots[r] + 1 + i
    kept    the hidden states that `needs` names, of all `num_rows` rows of the forward
    found   log-probabilities of the emitted tokens of some rows, computed by the backend
    """

    batch: Batch
    logits: Tensor
    roots: dict[int, int]
    sampler: Sampler
    needs: Needs
    kept: Mapping[int, Tensor]
    num_rows: int
    found: Mapping[int, Sequence[TopValues]]

    def at(self, row: int, node: int) -> int:
        """The row of `logits` after `node` of row `row`."""
        return self.roots[row] + 1 + node

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        return self.sampler.pick(self.batch[row].row, path, self.logits, self.at(row, node))

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.sampler.distribution(self.batch[row].row, path, self.logits, self.at(row, node))

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.batch[row].row, node, probability)

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return random_streams.emit(self.batch[row].row, node, distribution)

    def find_topk(self) -> None:
        """Set `topk` of every row, and `top_logits`."""
        best = self.sampler.best(self.logits, self.needs.topk)
        logits = self.sampler.logits_of(self.logits, best) if self.needs.logits else []
        for r in self.roots:
            step = self.batch[r]
            own = slice(self.at(r, ROOT), self.at(r, len(step.tree.tokens)))
            step.topk, step.top_logits = best[own], logits[own]

    def states(self) -> States:
        """Hidden states of the known tokens and the accepted nodes of every row."""
        if self.num_rows == len(self.batch):
            return States(self.kept, one_each(self.num_rows), self.num_rows)
        places = list[Sequence[int]]()
        for span, step in zip(spans_of(self.batch), self.batch):
            places.append([*range(span.first, span.end), *[span.end + node for node in step.accepted]])
        return States(self.kept, places, self.num_rows)

    def record_logprobs(self) -> None:
        """Append log-probabilities of the emitted tokens for the rows that request them."""
        for r, step in enumerate(self.batch):
            row = step.row
            ended = row.error is not None or row.finish_reason is not None
            if row.logprobs is None or row.logprobs.count is None or ended:
                continue
            del row.logprobs.sampled[len(row.tokens) - row.prompt :]  # entries of an interrupted step
            if r in self.found:
                for token, found in zip(step.emitted, self.found[r]):
                    row.logprobs.add_found(token, found)
                continue
            try:
                self._record(r, step, row.logprobs)
            except OutriderError as error:  # a logits processor that fails in its second call
                row.error = error.with_traceback(None)  # its frames hold the row, which holds it

    def _record(self, r: int, step: RowStep, logprobs: Logprobs) -> None:
        for i, (node, token) in enumerate(zip([ROOT, *step.accepted], step.emitted)):
            logits = self.logits[self.at(r, node)]
            logprobs.add(token, self.sampler.values(step.row, step.emitted[:i], logits, logprobs.mode))


class Runner:
    """Runner of the target's forward.

    rule: the rule by which the forward also verifies trees if the backend supports it (see Rule.kernel).
    states: of a model with recurrent layers
    """

    def __init__(
        self, decoder: Model, pool: Pool, sampler: Sampler, rule: str, states: RowStates | None = None
    ) -> None:
        self.decoder, self.pool, self.sampler = decoder, pool, sampler
        verifier = decoder.backend.verifier
        self.verifier = verifier if verifier is not None and rule in verifier.rules else None
        self.processes = self.verifier is not None and self.verifier.processes
        self.rule, self.states = rule, states

    def begin(self, batch: Batch, needs: Needs) -> Callable[[], ForwardOutput]:
        """Begin the forward.  The result waits for it; until then, the host reads nothing of a device."""
        step_input = StepInput()
        logits_rows = step_input.logits_rows
        queries = None if self.verifier is None else self.verifier.queries(self.rule)
        roots: dict[int, int] = {}
        scored: list[tuple[RowStep, int]] = []  # rows with prompt_logprobs, and their first forward row
        step_input.recurrent = None if self.states is None else self.states.begin(batch)
        for r, step in enumerate(batch):
            row, first = step.row, step_input.length
            add_row(step_input, step)
            if row.logprobs is not None and row.logprobs.prompt_pending(row.prompt):
                scored.append((step, first))
            if row.adapter is not None:
                step_input.adapt(first, row.adapter)
            if step.emits:
                root = roots[r] = len(logits_rows)
                if queries is not None and (self.processes or not row.processors):
                    queries.add(r, row, step.tree, root)
                if step.tree.tokens:
                    logits_rows += range(first + step.known - 1, step_input.length)
                else:
                    logits_rows.append(step_input.length - 1)
        kept = dict.fromkeys(needs.states, UNSET)
        if scored:
            kept[FINAL] = UNSET
        run, num_rows = self._begin(batch, step_input.build(), kept, queries), step_input.length

        def complete() -> ForwardOutput:
            logits = run()
            for step, first in scored:
                self._score_prompt(step, kept[FINAL], first)
            found = {} if queries is None else self._set_verified(batch, queries)
            return ForwardOutput(batch, logits, roots, self.sampler, needs, kept, num_rows, found)

        return complete

    def _set_verified(self, batch: Batch, queries: TreeQueries) -> dict[int, Sequence[TopValues]]:
        """Store the paths that the backend has verified.  Returns log-probabilities that it found, by row.

        The rule verifies the other rows, and raises the error of a failed pick.
        """
        values = dict[int, Sequence[TopValues]]()
        for r, found in queries.read():
            if found is not None:
                step = batch[r]
                step.accepted, step.emitted = found
                step.verified = True
                if step.row.logprobs is not None:
                    own = queries.values(r, [ROOT, *step.accepted])
                    if own is not None:
                        values[r] = own
        return values

    def _begin(
        self, batch: Batch, step_input: StepInput, kept: dict[int, Tensor], queries: TreeQueries | None
    ) -> Callable[[], Tensor]:
        """Begin the forward.  The result waits for it, fills `kept` and returns the logits of some rows.

        Rows in `batch.resume` start at its layer, unless hidden states of other inner layers are needed.
        """
        resume = batch.resume
        if resume is None or kept.keys() - {FINAL, resume.layer}:
            return self.decoder.begin_step(step_input, self.pool, kept, queries)
        x = self._resume(step_input, resume, spans_of(batch), kept)
        logits = self.decoder.finish_step(step_input, x, kept, queries)
        return lambda: logits

    def _resume(
        self, step_input: StepInput, resume: Resume, spans: list[Span], kept: dict[int, Tensor]
    ) -> Tensor:
        """Hidden states [n, hidden] after the last layer, of which the drafter has computed a part."""
        done = [span.end + node for span, nodes in zip(spans, resume.nodes) for node in nodes]
        rest = sorted({*range(step_input.length)}.difference(done))
        lower = self.decoder.layer_range(0, resume.layer)
        upper = self.decoder.layer_range(resume.layer, self.decoder.spec.layers)
        x = resume.states.new_empty(step_input.length, resume.states.shape[1])
        x[done] = resume.states
        if rest:
            x[rest] = self.decoder.forward(step_input.only(rest), self.pool, lower)
        if resume.layer in kept:
            kept[resume.layer] = x.clone()  # x is changed in place
        return self.decoder.forward(step_input, self.pool, upper, x)

    def _score_prompt(self, step: RowStep, states: Tensor, first: int) -> None:
        """Append log-probabilities of the prompt tokens that the known tokens of this step predict.

        states: FINAL hidden states of all forward rows.  first: the first forward row of this row.
        A replay after preemption appends no entry twice.  Logits are computed for `SLICE` rows at a time.
        """
        row, logprobs = step.row, step.row.logprobs
        assert logprobs is not None
        todo = range(len(logprobs.prompt) - 1, min(step.end, row.prompt - 1))
        assert not todo or todo.start >= step.start, "positions whose logits are needed were not computed"
        mode = logprobs.mode.replace("processed", "raw")
        offset = first - step.start  # from a position to its forward row
        for i in range(0, len(todo), SLICE):
            positions = todo[i : i + SLICE]
            part = states[offset + positions.start : offset + positions.stop]
            rows = self.decoder.head_logits(part.contiguous())  # they may be columns beside other states
            for position, logits in zip(positions, rows):
                logprobs.add_prompt(row.tokens[position + 1], self.sampler.values(row, (), logits, mode))


def add_row(step_input: StepInput, step: RowStep) -> None:
    """Add the known tokens of a row and its tree; draft node i takes slot `step.end` + i of the row."""
    row, tree, start = step.row, step.tree, step.start
    assert row.table is not None
    slots = row.table.slots
    if step.known == 1 and not tree.tokens:
        step_input.token(slots, start, row.tokens[start])
        return
    end = start + step.known
    known = row.tokens[start:end]
    if not tree.tokens or tree.chained:  # the slots of a chain are in position order
        step_input.chain(slots, start, known + tree.tokens)
        return
    step_input.chain(slots, start, known)
    paths: list[list[int]] = []
    for slot, parent in zip(slots[end : end + len(tree.parents)], tree.parents):
        paths.append([*paths[parent], slot] if parent >= 0 else [slot])
    step_input.nodes(slots, end, paths, tree.tokens)
