"""Medusa (arXiv 2401.10774): further heads beside the target's own predict the tokens after the next, from
one state.

    position            t        t+1      t+2      t+3             t = e-2, e = step.end
    state               f_t                                        the target emitted x_t+1, the pending
    token, from it head i: logits_i = W_i · ResBlock(… ResBlock(f_t))
                                 x_t+1    head 0   head 1 …        drafts for e, e+1 …

A head does not read the drafts of the heads before it.  All nodes of a level have the same candidates, and
a tree is a set of paths of ranks: how often rank j of head i was right decides which paths get a node.
Medusa-1 trains the heads alone, Medusa-2 the target with them; here they differ only in their files (see
layouts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from outrider.checkpoints.heads import Head
from outrider.core.step import Batch, Commit
from outrider.core.tree import EMPTY_TREE, Draft, DraftTree
from outrider.core.validate import check_fields, optional, whole
from outrider.draft.medusa.layouts import claims_of, translate
from outrider.draft.medusa.network import Network
from outrider.draft.medusa.packed import Packed
from outrider.draft.medusa.trees import CHAIN, RANKS, allowed, check_tree
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.choose import Chooser
from outrider.heads.ranks import RankAccuracy
from outrider.heads.trees import BlockTree

PUBLISHED_NODES = 63


class Medusa(StateDrafter):
    demo: ClassVar = {"Medusa": {"model": "builtin-medusa", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """tree: "own" (the paths that are right most often), "chain" (vLLM: the best token of each head),
        the name of a published tree, or a list of paths of ranks, as Medusa's medusa_choices
        (`trees.grown` makes one from accuracies). nodes: of a tree at most (None: all of a named or listed
        tree; of "own" as many as published, but 8 on a CPU).
        """

        tree: str | Sequence[Sequence[int]] = "own"
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_tree(self.tree)
            check_fields(self, {"nodes": optional(whole(1, 1024))})
            if self.nodes is not None and self.tree == CHAIN:
                raise ConfigError(
                    f'nodes = {self.nodes} has no effect with tree "chain", which has one a level: '
                    "leave it out."
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
        if self.paths is None:
            self.nodes = target.nodes(options.nodes, PUBLISHED_NODES)
        else:
            self.nodes = options.nodes or len(self.paths)
        self.memory = RankAccuracy.prior(self.heads.heads, self.ranks)
        self.trees: Sequence[DraftTree] = ()  # of this step as proposed; only a part may be verified

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Four random heads of two blocks, and a wide and deep tree."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network(target.decoder.spec.hidden, target.vocabulary, heads=4, blocks=2)
        return cls(cls.Options(nodes=24), target, Head.of("example", network.config(), network.state_dict()))

    def size(self, depth: int) -> int:
        if depth > self.heads.heads:
            raise ConfigError(
                f"num_speculative_tokens is {depth}, and {self.head.name!r} has {self.heads.heads} heads: "
                "one for each level."
            )
        if self.paths is None:
            possible: int = sum(self.ranks**level for level in range(1, depth + 1))
        else:
            possible = sum(len(path) <= depth for path in self.paths)
        return min(self.nodes, possible)

    def propose(self, batch: Batch) -> Draft:
        trees, rows = [EMPTY_TREE] * len(batch), self.ready(batch)
        shapes = {
            budget: self.memory.best_paths(budget.nodes, budget.depth, self.paths)
            for budget in {batch[r].budget for r in rows}
        }
        levels = max((len(path) for shape in shapes.values() for path in shape), default=0)
        if levels:
            for r, logits in zip(rows, self.heads(self.states(batch, rows), levels)):
                row, shape = batch[r].row, shapes[batch[r].budget]
                tree = BlockTree(
                    row, logits, shape, self.samples(row), self.target.stream_id, self.memory.accuracy
                )
                trees[r] = tree.grow(self.choose)
        self.trees = trees
        return Draft(trees)

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        for tree, step in zip(self.trees, commit.batch):
            if tree.tokens:
                self.memory.update(tree, step.emitted)
