"""The target drafts for itself with some of its own sublayers left out; no weights of its own, no K/V of its own.

Draft & Verify (arXiv 2309.08168): a set of attentions and a set of MLPs is skipped.  LayerSkip (arXiv 2404.16710): the first layers,
then the model's own norm and head.  SWIFT (arXiv 2410.06916): the set is found while the model answers.

It computes in the target's own pool, on the slots of this step's guesses, which verification writes again:

    position            … e-2   e-1   │ e      e+1        e = step.end: the pending token is at e-1
    pass 1 takes                token │                   in its own slot; says the guess for e
    pass 2 takes                      │ guess             in the slot of node 0; says the guess for e+1

Verified K/V before e-1 is the target's, so there is nothing to catch up with: a row whose prompt is still being computed is not
guessed for.  After an early exit the first layers of these tokens are computed once: verification resumes behind them (`Resume`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain
from outrider.cache.pool import Pool
from outrider.core.noise import stream_of
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule
from outrider.core.tree import EMPTY_TREE, ROOT, Draft, DraftTree, Resume
from outrider.draft.layerskip.comb import Comb
from outrider.draft.layerskip.confidence import AUTO, SIBLINGS, Exit, siblings_at
from outrider.draft.layerskip.search import Search
from outrider.draft.layerskip.sets import Skip, known, named
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError, OutriderError
from outrider.sampling import random_streams

SHARED = 0.7  # what a guess is worth that was picked with the noise of the target's own pick: more than its probability


class Passed(NamedTuple):
    """What the draft passes of a row gave: guesses; the nodes (ROOT, too) that went through them, and their states [m, hidden]."""

    draft_tree: DraftTree
    nodes: list[int]
    states: Tensor


class LayerSkip(Drafter):
    depth = 8
    demo: ClassVar = {"layer skipping": {}, "early exit": {"early_exit": 6, "num_speculative_tokens": 1}}

    @dataclass(frozen=True)
    class Options:
        """skip_attention, skip_mlp: numbers of layers, from 0.  layers: a published set, or a file of `outrider tune layerskip`.
        early_exit: only the first so many layers guess.  Without any of these: the published set of this very model, if there is one,
        otherwise every second layer between the first and the last.

        exit_threshold: stop after a guess less likely than this, where it begins; "auto": at 0.8 greedy, 0.5 sampled; None: never stop.
        adapt_threshold: it follows the share of right guesses.  siblings: guesses a level, of which one is extended; "confidence": the
        more, the less sure the draft is.

        search: find the set while answering, from the last context_window tokens of a request, beginning with the set given, or
        with every second layer.  skip_ratio: of the sublayers between the first and the last layer.  One candidate every opt_interval
        steps, every bayes_interval-th by Bayesian optimisation, until one scores above max_score, max_tolerance_iter in a row are no
        better, or max_opt_iter were tried.
        """

        skip_attention: Sequence[int] | None = None
        skip_mlp: Sequence[int] | None = None
        layers: str | None = None
        early_exit: int | None = None
        exit_threshold: float | str | None = "auto"
        adapt_threshold: bool = True
        siblings: int | str = 1
        search: bool = False
        skip_ratio: float = 0.45
        context_window: int = 32
        opt_interval: int = 1
        bayes_interval: int = 25
        max_opt_iter: int = 1000
        max_tolerance_iter: int = 300
        max_score: float = 0.95

        def __post_init__(self) -> None:
            given = {
                "skip_attention and skip_mlp": self.skip_attention is not None or self.skip_mlp is not None,
                "layers": self.layers is not None,
                "early_exit": self.early_exit is not None,
            }
            if sum(given.values()) > 1:
                raise ConfigError(
                    f"{' / '.join(name for name, is_given in given.items() if is_given)}: give one of these."
                )
            if self.search and given["early_exit"]:
                raise ConfigError("search looks for sublayers to skip: give it no early_exit.")
            if self.layers is not None and not isinstance(self.layers, str):
                raise ConfigError(f"layers must be the name of a set or a file, got {self.layers!r}.")
            for name in ("adapt_threshold", "search"):
                if not isinstance(getattr(self, name), bool):
                    raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
            for name in (
                "context_window",
                "opt_interval",
                "bayes_interval",
                "max_opt_iter",
                "max_tolerance_iter",
            ):
                if not _whole(getattr(self, name), 1):
                    raise ConfigError(
                        f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}."
                    )
            for name in ("skip_ratio", "max_score"):
                if not _share(getattr(self, name)):
                    raise ConfigError(f"{name} must be a number in [0, 1], got {getattr(self, name)!r}.")
            if self.exit_threshold not in (None, "auto") and not _share(self.exit_threshold):
                raise ConfigError(
                    f'exit_threshold must be a number in [0, 1], "auto" or None, got {self.exit_threshold!r}.'
                )
            if self.siblings != "confidence" and not (_whole(self.siblings, 1) and int(self.siblings) <= 64):
                raise ConfigError(
                    f'siblings must be a whole number in 1 … 64 or "confidence", got {self.siblings!r}.'
                )

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        self.decoder, self.sampler = target.decoder, target.sampler
        self.skip = self._skip()
        self.blocks = self._blocks(self.skip)
        self.depth = self.skip.depth or self.depth
        self.exits: dict[Row, Exit] = {}
        if options.search:
            self.memory = self._search()

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The first half of the layers, whose states verification goes on with."""
        return cls(cls.Options(early_exit=max(1, target.decoder.spec.layers // 2)), target)

    def _skip(self) -> Skip:
        given, layers, what = self.options, self.decoder.spec.layers, repr(self.target.checkpoint.name)
        if given.early_exit is not None:
            if not _whole(given.early_exit, 1) or given.early_exit >= layers:
                raise ConfigError(
                    f"early_exit must be in 1 … {layers - 1}, as {what} has {layers} layers: got {given.early_exit!r}."
                )
            rest = range(given.early_exit, layers)
            return Skip.of(rest, rest, layers, what)
        if given.skip_attention is not None or given.skip_mlp is not None:
            attention, mlp = (() if part is None else part for part in (given.skip_attention, given.skip_mlp))
            return Skip.of(attention, mlp, layers, what)
        name = given.layers or (None if given.search else known(self.target.checkpoint.name, layers))
        return named(name, layers, what) if name else Skip.alternating(layers)

    def _blocks(self, skip: Skip) -> Any:
        return self.decoder.skip_sublayers(skip.attention, skip.mlp)

    def _search(self) -> Search:
        given, layers = self.options, self.decoder.spec.layers
        size = round(given.skip_ratio * 2 * (layers - 2))
        if size < 1:
            raise ConfigError(
                f"search skips none of the {2 * max(0, layers - 2)} sublayers between first and last layer at skip_ratio "
                f"{given.skip_ratio}: {self.target.checkpoint.name!r} is too shallow, or the ratio too small."
            )
        return Search(
            layers, size, self.skip, given.bayes_interval, given.max_opt_iter, given.max_tolerance_iter, given.max_score
        )  # fmt: skip

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        self.pool = pool
        return []

    def size(self, depth: int) -> int:
        siblings: int = (
            max(max(kind) for kind in SIBLINGS.values())
            if self.options.siblings == "confidence"
            else self.options.siblings
        )
        return depth * siblings

    def propose(self, batch: Batch) -> Draft:
        trees = [EMPTY_TREE] * len(batch)
        wanted = [r for r, step in enumerate(batch) if step.budget.nodes and step.known == 1]
        steps = [batch[r] for r in wanted]
        if not wanted:
            return Draft(trees)
        if self.memory is not None:
            self._look(steps)
        for step in steps:
            self._exit(step.row).depth = step.budget.depth
        one_call = self.decoder.fuses_chains and self.options.siblings == 1
        one_call = one_call and not any(self._slow(step.row) for step in steps)
        passed = self._chains(steps) if one_call else self._combs(steps)
        for r, found in zip(wanted, passed):
            trees[r] = found.draft_tree
        if not self.options.early_exit:
            return Draft(trees)
        nodes: list[list[int]] = [[]] * len(batch)
        for r, found in zip(wanted, passed):
            nodes[r] = found.nodes
        return Draft(
            trees, Resume(self.options.early_exit, torch.cat([found.states for found in passed]), nodes)
        )

    def _slow(self, row: Row) -> bool:
        """Whether there is something to do between the levels of a row."""
        return bool(row.processors) or row.adapter is not None or self.draws(row)

    def _exit(self, row: Row) -> Exit:
        begin = self.options.exit_threshold
        if row not in self.exits:
            threshold = AUTO[row.distribution.temperature == 0] if begin == "auto" else begin or 0.0
            self.exits[row] = Exit(threshold, begin is not None and self.options.adapt_threshold)
        return self.exits[row]

    def _chains(self, steps: Sequence[RowStep]) -> list[Passed]:
        """All levels of all rows in one call."""
        step_input, chains = StepInput(), []
        for i, step in enumerate(steps):
            row = step.row
            assert row.table is not None
            step_input.chain(row.table.slots, step.end - 1, row.tokens[-1:])
            chains.append(
                Chain(
                    i,
                    step.budget.depth,
                    row.distribution,
                    stream_of(row.seed, row.index),
                    self._exit(row).threshold,
                )
            )
        states = torch.empty(0, 0, 0)
        if self.options.early_exit:
            states = torch.empty(len(chains), max(chain.levels for chain in chains), self.decoder.spec.hidden)
        asked = states if len(states) else None
        stop_rule = StopRule() if any(chain.floor for chain in chains) else None
        found = self.decoder.draft_chain(
            step_input.build(), self.pool, chains, self.target.vocabulary, stop_rule, self.blocks, asked
        )
        passed = []
        for i, tokens in enumerate(found[0]):
            nodes = list(range(ROOT, max(1, len(tokens)) - 1))  # nothing was read from the last guess
            draft_tree = DraftTree.chain(tokens, [SHARED] * len(tokens))
            passed.append(Passed(draft_tree, nodes, states[i, : len(nodes)] if len(states) else states))
        return passed

    def _combs(self, steps: Sequence[RowStep]) -> list[Passed]:
        """Level by level."""
        combs = [Comb(step.row, step.end, step.budget, self._exit(step.row).threshold) for step in steps]
        while growing := [comb for comb in combs if comb.growing]:
            step_input = StepInput()
            for comb in growing:
                comb.add_to(step_input)
            x = self.decoder.forward(step_input.build(), self.pool, self.blocks)
            logits = self.decoder.logits(x, list(range(len(growing))))
            for i, comb in enumerate(growing):
                comb.states.append(x[i])
                self._level(comb, logits, i)
        return [
            Passed(comb.draft_tree, [ROOT, *comb.trunk][: len(comb.states)], torch.stack(comb.states))
            for comb in combs
        ]

    def _level(self, comb: Comb, logits: Tensor, at: int) -> None:
        row, path, given = comb.row, comb.path, self.options.siblings
        greedy = row.distribution.temperature == 0
        if self.draws(row):
            try:
                distribution = self.sampler.distribution(row, path, logits, at)
            except OutriderError:  # the target's own law will say why
                comb.growing = False
                return
            count = min(
                comb.room, siblings_at(float(distribution.max()), greedy) if given == "confidence" else given
            )
            first = self.stream_id + len(comb.tokens)
            tokens = random_streams.children(row, distribution, range(first, first + count))
            shares = distribution[tokens].tolist()
            comb.add(tokens, shares, shares[0] if tokens else 0.0, distribution)
            return
        tokens, shares = self.sampler.top(
            row, path, logits, max(SIBLINGS[greedy]) if given == "confidence" else given, True, at
        )
        sure = 0.0
        if tokens and (comb.floor or given == "confidence"):  # as the kernels' loop decides
            sure = self.sampler.should_stop(row, path, logits, tokens[0], StopRule(), at)[1][0]
        count = min(comb.room, siblings_at(sure, greedy) if given == "confidence" else given)
        worth = shares if greedy else [SHARED * 0.3**i for i in range(len(tokens))]
        comb.add(tokens[:count], worth[:count], sure)

    def _look(self, steps: Sequence[RowStep]) -> None:
        """One step of the search, in the slots that guesses will have."""
        search: Search = self.memory
        if search.best is not self.skip:
            self.skip, self.blocks = search.best, self._blocks(search.best)
        window = self.options.context_window
        step = next((step for step in steps if step.end - step.row.prompt >= window), None)
        if search.done or step is None:
            return
        search.steps += 1
        if search.steps % self.options.opt_interval == 0:
            skip = search.suggest()
            search.learn(skip, self._score(step.row, step.end, step.budget.nodes, self._blocks(skip)))

    def _score(self, row: Row, end: int, nodes: int, blocks: Any) -> float:
        """How many of the row's last tokens the skipped model says; each forward guesses `nodes` of them, as drafting would."""
        assert row.table is not None
        slots, right = row.table.slots, 0
        window: int = self.options.context_window
        scratch, begin = list(slots[end : end + nodes]), end - 1 - window
        for first in range(begin, end - 1, nodes):
            tokens, step_input = row.tokens[first : min(first + nodes, end - 1)], StepInput()
            for i, token in enumerate(tokens):
                step_input.node(slots, first, scratch[: i + 1], token)
            if row.adapter is not None:
                step_input.adapt(0, row.adapter)
            x = self.decoder.forward(step_input.build(), self.pool, blocks)
            best = self.sampler.best(self.decoder.logits(x, list(range(len(tokens)))), 1)
            right += sum(ids[:1] == [said] for ids, said in zip(best, row.tokens[first + 1 :]))
        return right / window

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and step.row in self.exits:
                self.exits[step.row].learn(len(set(step.tree.parents)), len(step.accepted))

    def forget(self, row: Row, reason: str) -> None:
        self.exits.pop(row, None)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
