"""Medusa (arXiv 2401.10774): heads beside the target's own say the tokens after the next one, all from the same state.

    position            t        t+1      t+2      t+3             t = e-2, e = step.end
    state               f_t                                        the target said x_t+1, which is pending, from it
    head i: logits_i = W_i · ResBlock(… ResBlock(f_t))
                                 x_t+1    head 0   head 1 …        guesses for e, e+1 …

A head does not know what the heads before it guessed, so all nodes of a level have the same candidates, and a tree is about ranks
only: how often rank j of head i was right decides which paths are worth a node.  Medusa-1 trains the heads alone, Medusa-2 the target
with them; to us they differ in their files (see layouts.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.types import EMPTY_TREE, ROOT, Batch, Commit, Draft, DraftTree, Row
from outrider.draft.medusa.layouts import claims_of, translate
from outrider.draft.medusa.network import Network
from outrider.draft.medusa.packed import Packed
from outrider.draft.medusa.trees import CHAIN, RANKS, allowed, check_tree
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.choose import Chooser
from outrider.heads.ranks import Worth
from outrider.heads.templates import Path
from outrider.sampling import random_streams

PUBLISHED, FEW = 63, 8  # nodes of the published trees; what pays on a CPU, where every node costs time


class Medusa(StateDrafter):
    demo: ClassVar = {"Medusa": {"model": "builtin-medusa", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """tree: "own" (the paths that turn out to be worth most), "chain" (vLLM's: the best of each head), a published one by name, or a
        list of paths of ranks, as Medusa's medusa_choices (`trees.grown` makes one from accuracies).  nodes: of a tree at most (None:
        all of one that is named or listed; of "own" as many as the published have, but 8 on a CPU).
        """

        tree: str | Sequence[Sequence[int]] = "own"
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_tree(self.tree)
            if self.nodes is not None and (
                not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or not 1 <= self.nodes <= 1024
            ):
                raise ConfigError(f"nodes must be a whole number in 1 … 1024, got {self.nodes!r}.")
            if self.nodes is not None and self.tree == CHAIN:
                raise ConfigError(
                    f'nodes = {self.nodes} has no effect with tree "chain", which has one a level: leave it out.'
                )

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.head = translate(self.head)
        self.heads = Packed(replace(self.reader, head=self.head), target)
        self.choose = Chooser(target, self.heads.ids)
        self.paths = allowed(options.tree, self.heads.heads)
        self.depth = self.heads.heads if self.paths is None else max(map(len, self.paths))
        ranks = RANKS if self.paths is None else 1 + max(path[-1] for path in self.paths)
        self.ranks = min(ranks, self.heads.outputs)
        on_cpu = target.decoder.device.type == "cpu"
        self.nodes: int = options.nodes or (
            len(self.paths) if self.paths is not None else FEW if on_cpu else PUBLISHED
        )
        self.memory = Worth.fading(self.heads.heads, self.ranks)
        self.trees: Sequence[
            DraftTree
        ] = ()  # of this step, as proposed: what is verified may be a part of them

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Four random heads of two blocks, and a tree that is wide and deep."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network(target.decoder.spec.hidden, target.vocabulary, heads=4, blocks=2)
        return cls(cls.Options(nodes=24), target, Head.of("example", network.config(), network.state_dict()))

    def size(self, depth: int) -> int:
        if depth > self.heads.heads:
            raise ConfigError(
                f"num_speculative_tokens is {depth}, and {self.head.name!r} has {self.heads.heads} heads: one for each level."
            )
        if self.paths is None:
            possible: int = sum(self.ranks**level for level in range(1, depth + 1))
        else:
            possible = sum(len(path) <= depth for path in self.paths)
        return min(self.nodes, possible)

    def propose(self, batch: Batch) -> Draft:
        trees, ready = [EMPTY_TREE] * len(batch), self.ready(batch)
        best = {
            budget: self.memory.best(budget.nodes, budget.depth, self.paths)
            for budget in {batch[r].budget for r in ready}
        }
        levels = max((len(path) for order in best.values() for path in order), default=0)
        if levels:
            logits = self.heads(self.states(batch, ready), levels)
            for r, said in zip(ready, logits):
                trees[r] = self._guess(batch[r].row, best[batch[r].budget], said)
        self.trees = trees
        return Draft(trees)

    def _guess(self, row: Row, order: Sequence[Path], logits: Tensor) -> DraftTree:
        """The nodes of these paths, a parent before its children; logits [levels, Vd] of the heads."""
        logits = logits[: max(map(len, order))]
        if not self.draws(row):
            ranked = self._ranked(row, logits, 1 + max(path[-1] for path in order))
            return self._filled(
                order, {path: token for path in order if (token := _at(ranked, path)) >= 0}, []
            )
        distributions = self._distributions(row, logits)
        return self._filled(order, self._drawn(row, order, distributions), distributions)

    def _ranked(self, row: Row, logits: Tensor, k: int) -> list[list[int]]:
        """The k best tokens of each head, -1 where there are fewer.  Processors look at the best of the levels before."""
        if not row.processors:
            tokens: list[list[int]] = self.choose.best(
                row, [[0] * level for level in range(len(logits))], logits, k
            )[0].tolist()
            return tokens
        path, found = list[int](), list[list[int]]()
        for level in range(len(logits)):
            found += self.choose.best(row, [path], logits[level : level + 1], k)[0].tolist()
            if found[-1][0] < 0:
                break
            path = [*path, found[-1][0]]
        return found

    def _distributions(self, row: Row, logits: Tensor) -> list[Tensor]:
        """q of each head, behind all nodes of its level: processors look at the likeliest tokens, whatever is drawn."""
        path, distributions = list[int](), list[Tensor]()
        for said in logits:
            distribution = self.choose.distribution(row, path, said)
            if distribution is None:
                break
            distributions.append(distribution)
            path = [*path, int(distribution.argmax())]
        return distributions

    def _drawn(self, row: Row, order: Sequence[Path], distributions: Sequence[Tensor]) -> dict[Path, int]:
        """A token for each path; how many children a node gets was decided before any was drawn."""
        tokens, number = dict[Path, int](), self.stream_id
        for parent, count in Counter(path[:-1] for path in order if len(path) <= len(distributions)).items():
            for rank, token in enumerate(
                random_streams.children(row, distributions[len(parent)], range(number, number + count))
            ):
                tokens[(*parent, rank)] = token
            number += count
        return tokens

    def _filled(
        self, order: Sequence[Path], tokens: Mapping[Path, int], distributions: Sequence[Tensor]
    ) -> DraftTree:
        place: dict[Path, int] = {(): ROOT}
        tree, levels = DraftTree([], [], []), list[int]()
        for path in order:
            if path in tokens and path[:-1] in place:
                place[path] = len(tree.tokens)
                tree.tokens.append(tokens[path])
                tree.parents.append(place[path[:-1]])
                tree.confidence.append(self.memory.worth[len(path) - 1][path[-1]])
                levels.append(len(path) - 1)
        return tree._replace(distributions=distributions, probs_of=levels) if distributions else tree

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        for tree, step in zip(self.trees, commit.batch):
            if tree.tokens:
                self.memory.learn(tree, step.emitted)


def _at(ranked: Sequence[Sequence[int]], path: Path) -> int:
    return ranked[len(path) - 1][path[-1]] if len(path) <= len(ranked) else -1
