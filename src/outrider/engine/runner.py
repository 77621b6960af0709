"""The target's forward: known tokens and guesses of all rows at once, and the laws at the nodes that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.backends.base import Answer, TreeQueries
from outrider.cache.pool import Pool
from outrider.core.logprobs import Logprobs
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Needs, RowStep, States
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, DraftTree, Resume
from outrider.errors import OutriderError
from outrider.models.base import Model
from outrider.models.steps import behind
from outrider.sampling import random_streams
from outrider.sampling.sampler import Sampler

NONE = torch.empty(0)  # where a state will be
SLICE = 16  # rows of prompt logits that are held at once


class ForwardOutput:
    """What a forward saw.  Laws are evaluated when the verifier asks: along the path, level by level."""

    __slots__ = ("answers", "batch", "kept", "logits", "needs", "roots", "sampler", "spans")

    def __init__(
        self, batch: Batch, logits: Tensor, roots: dict[int, int], sampler: Sampler, needs: Needs,
        kept: Mapping[int, Tensor], spans: list[tuple[int, int]], answers: Mapping[int, Answer | None],
    ) -> None:  # fmt: skip
        """logits float32 [M, V]; the law after the root of row r is in row roots[r], that after node i in roots[r] + 1 + i.

        kept: the states that `needs` names, of all rows of the forward; spans[r]: where the tokens of row r begin, and its guesses.
        answers: what `match` says, of rows where that is known.
        """
        self.batch, self.logits, self.roots, self.sampler, self.needs = batch, logits, roots, sampler, needs
        self.kept, self.spans, self.answers = kept, spans, answers

    def at(self, row: int, node: int) -> int:
        """Where the logits after `node` of row `row` stand."""
        return self.roots[row] + 1 + node

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        return self.sampler.pick(self.batch[row].row, path, self.logits, self.roots[row] + 1 + node)

    def follow(self, row: int) -> Answer | None:
        return self.answers.get(row)

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.sampler.distribution(self.batch[row].row, path, self.logits, self.at(row, node))

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.batch[row].row, node, probability)

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return random_streams.emit(self.batch[row].row, node, distribution)

    def find_topk(self) -> None:
        """Set `topk` of every row."""
        best = self.sampler.best(self.logits, self.needs.topk)
        for r in self.roots:
            step = self.batch[r]
            step.topk = best[self.at(r, ROOT) : self.at(r, len(step.tree.tokens))]

    def states(self) -> States:
        """Hidden states of the known tokens and the accepted nodes of every row."""
        places = [
            [*range(first, end), *(end + node for node in step.accepted)]
            for (first, end), step in zip(self.spans, self.batch)
        ]
        return States(self.kept, places)

    def record_logprobs(self) -> None:
        """Log-probabilities of what is emitted, for rows that ask; what the scheduler cuts off later is cut from these, too."""
        for r, step in enumerate(self.batch):
            row = step.row
            if row.logprobs is None or row.logprobs.count is None or row.error is not None:
                continue
            del row.logprobs.sampled[len(row.tokens) - row.prompt :]  # of a step that was interrupted
            try:
                self._record(r, step, row.logprobs)
            except OutriderError as error:  # a processor that fails when it is asked again
                row.error = error

    def _record(self, r: int, step: RowStep, kept: Logprobs) -> None:
        for i, (node, token) in enumerate(zip([ROOT, *step.accepted], step.emitted)):
            logits = self.logits[self.at(r, node)]
            kept.add(token, self.sampler.values(step.row, step.emitted[:i], logits, kept.mode))


class Runner:
    """same: the verification rule is `match`, so that its answers can be found in the forward."""

    def __init__(self, decoder: Model, pool: Pool, sampler: Sampler, same: bool) -> None:
        self.decoder, self.pool, self.sampler, self.same = decoder, pool, sampler, same

    def forward(self, batch: Batch, needs: Needs) -> ForwardOutput:
        step_input = StepInput()
        wanted: list[int] = []
        roots: dict[int, int] = {}
        trees = self.decoder.kernels.trees()
        asking: list[tuple[int, int]] = []
        spans: list[tuple[int, int]] = []  # where the tokens of each row begin, and its guesses
        for r, step in enumerate(batch):
            row, first = step.row, step_input.length
            end = first + step.known
            add_row(step_input, row, step.start, step.end, step.tree)
            spans.append((first, end))
            asked = row.logprobs
            if asked is not None and asked.prompt_count is not None and len(asked.prompt) < row.prompt:
                asking.append((r, first))
            if row.adapter is not None:
                step_input.adapt(first, row.adapter)
            if step.emits:
                roots[r] = len(wanted)
                if self.same:
                    self.sampler.ask(trees, r, row, step.tree, roots[r])
                wanted += range(end - 1, step_input.length)
        kept = dict.fromkeys(needs.states, NONE)
        if asking:
            kept[FINAL] = NONE
        logits = self._read(step_input.build(), wanted, kept, trees, batch.resume, spans)
        for r, first in asking:
            self._score(batch[r].row, kept[FINAL], first, batch[r].start, batch[r].end)
        return ForwardOutput(batch, logits, roots, self.sampler, needs, kept, spans, trees.read())

    def _read(
        self,
        step_input: StepInput,
        wanted: list[int],
        kept: dict[int, Tensor],
        trees: TreeQueries,
        resume: Resume | None,
        spans: list[tuple[int, int]],
    ) -> Tensor:
        """Where a drafter has computed the lower layers of some rows, only the others go through these, unless somebody wants to see what
        enters a layer."""
        if resume is None or kept.keys() - {FINAL}:
            return self.decoder.read(step_input, self.pool, wanted, kept, trees)
        return behind(self.decoder, self._resumed(step_input, resume, spans), wanted, kept, trees)

    def _resumed(self, step_input: StepInput, resume: Resume, spans: list[tuple[int, int]]) -> Tensor:
        done = [end + node for (_, end), nodes in zip(spans, resume.nodes) for node in nodes]
        rest = sorted({*range(step_input.length)}.difference(done))
        x = resume.states.new_empty(step_input.length, resume.states.shape[1])
        x[done] = resume.states
        if rest:
            x[rest] = self.decoder.forward(
                step_input.only(rest).build(), self.pool, self.decoder.between(0, resume.layer)
            )
        return self.decoder.forward(
            step_input, self.pool, self.decoder.between(resume.layer, self.decoder.spec.layers), x
        )

    def _score(self, row: Row, states: Tensor, first: int, start: int, end: int) -> None:
        """Log-probabilities of the prompt's tokens that its positions start … end - 1 predict; that of `start` is row `first` of what the
        head reads.

        A replay after preemption scores nothing twice.  The logits are read a few rows at a time: those of a prompt are never held.
        """
        kept = row.logprobs
        assert kept is not None
        todo = range(len(kept.prompt) - 1, min(end, row.prompt - 1))
        assert not todo or todo.start >= start, "positions whose logits are wanted were not computed"
        for places in (todo[i : i + SLICE] for i in range(0, len(todo), SLICE)):
            for p, logits in zip(
                places,
                self.decoder.head_logits(states[first + places.start - start : first + places.stop - start]),
            ):
                values = self.sampler.values(row, (), logits, kept.mode.replace("processed", "raw"))
                kept.add_prompt(row.tokens[p + 1], values)


def add_row(step_input: StepInput, row: Row, start: int, end: int, draft_tree: DraftTree) -> None:
    """The known tokens start … end - 1 of a row and the tree that hangs from the last of them; node i lies in slot end + i."""
    assert row.table is not None
    slots, known = row.table.slots, row.tokens[start:end]
    if draft_tree.chained:  # a chain lies in its natural slots
        step_input.chain(slots, start, known + draft_tree.tokens)
        return
    step_input.chain(slots, start, known)
    paths: list[list[int]] = []
    for slot, parent in zip(slots[end : end + len(draft_tree.parents)], draft_tree.parents):
        paths.append([*paths[parent], slot] if parent >= 0 else [slot])
    step_input.nodes(slots, end, paths, draft_tree.tokens)
