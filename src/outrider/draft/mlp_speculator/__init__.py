"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), and Arctic's variants of it.

A small recurrent network with embeddings and heads of its own.  It begins with the state from which the target said the pending token:

    position   … e-2     e-1 │  e      e+1        e: the first guess
    target     f_e-2         │                    its last state
    token            x_e-1   │  g_e    g_e+1      x: said, g: guessed
    step 0 reads f_e-2 and x_e-1, and guesses g_e;  step 1 reads the state of step 0 and g_e, and guesses g_e+1;  …

A chain by default, as in vLLM; `top_k_tokens_per_head` makes it IBM's tree.  Each level is one pass over all nodes of all rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from outrider.checkpoints.heads import Head
from outrider.core.types import EMPTY_TREE, ROOT, Batch, Budget, Draft, DraftTree, Row
from outrider.draft.mlp_speculator import layouts, steps
from outrider.draft.mlp_speculator.tree import Tree, likely, product
from outrider.drafting.base import Drafter, Target, refuse_idle
from outrider.errors import ConfigError
from outrider.heads.base import HeadOptions, StateDrafter

MOST = 1024  # nodes of a product


def _whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check(top_k: Any, where: str = "") -> tuple[int, ...]:
    """Raises ConfigError unless it is a whole number of children for each step."""
    if not isinstance(top_k, (list, tuple)) or not top_k or not all(_whole(k, 64) for k in top_k):
        raise ConfigError(
            f'top_k_tokens_per_head{where} must be a list of whole numbers in 1 … 64, or "config", got {top_k!r}.'
        )
    if (nodes := sum(math.prod(top_k[:level]) for level in range(1, len(top_k) + 1))) > MOST:
        raise ConfigError(
            f"top_k_tokens_per_head{where} {list(top_k)} makes {nodes} nodes, at most {MOST} are grown: choose less."
        )
    return tuple(top_k)


class MlpSpeculator(StateDrafter):
    demo: ClassVar = {"MLP speculator": {"model": "builtin-mlp_speculator", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """top_k_tokens_per_head: how many children a node has, step by step, such as [4, 3, 2, 2]; "config" for what the checkpoint
        says (None: one, a chain).  n_candidates: how many paths of that tree are kept (None: what the checkpoint says, or all).
        nodes: of a tree at most (None: all, but 8 on a CPU, where every node costs time).
        """

        top_k_tokens_per_head: Sequence[int] | str | None = None
        n_candidates: int | None = None
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.top_k_tokens_per_head not in (None, "config"):
                _check(self.top_k_tokens_per_head)
            for name in ("n_candidates", "nodes"):
                value = getattr(self, name)
                if value is not None and not _whole(value, MOST):
                    raise ConfigError(f"{name} must be a whole number in 1 … {MOST}, got {value!r}.")
            refuse_idle(
                self, self.top_k_tokens_per_head is not None, "top_k_tokens_per_head", "n_candidates", "nodes"
            )

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        layout = layouts.SpeculatorLayout.of(self.head)
        self.speculator = steps.load(self.reader, layout, self.hidden, target.vocabulary)
        self.depth = layout.steps
        self.top_k, self.candidates = self._branches(options)
        chain = options.top_k_tokens_per_head is None
        self.nodes = (
            self.depth if chain else options.nodes or (8 if target.decoder.device.type == "cpu" else MOST)
        )

    def _branches(self, options: Options) -> tuple[tuple[int, ...], int]:
        """(children of a node, level by level; how many paths are kept)."""
        asked, config = options.top_k_tokens_per_head, self.head.config
        if asked is None:
            return (1,) * self.depth, 1
        own = asked == "config"
        top_k = (
            _check(config.get("top_k_tokens_per_head"), f" of {self.head.name!r}") if own else _check(asked)
        )
        if len(top_k) != self.depth:
            raise ConfigError(
                f"top_k_tokens_per_head {list(top_k)} is for {len(top_k)} steps, and {self.head.name!r} has {self.depth}."
            )
        kept: Any = options.n_candidates or config.get("n_candidates")
        return top_k, kept if _whole(kept, MOST) else math.prod(top_k)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        from outrider.draft.mlp_speculator.network import Network

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network.like(target, 32)
        options = cls.Options(top_k_tokens_per_head=[3, 2, 2], n_candidates=5)
        return cls(options, target, Head.of("example", network.config(), network.state_dict()))

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        layouts.SpeculatorLayout.of(head)

    @classmethod
    def claims(cls, head: Head) -> int:
        return layouts.claims_of(head)

    def size(self, depth: int) -> int:
        """Raises ConfigError for more levels than the network was made for."""
        if depth > self.depth:
            raise ConfigError(
                f"num_speculative_tokens {depth} is more than the {self.depth} steps (n_predict) of {self.head.name!r}."
            )
        return min(
            self.nodes,
            sum(min(math.prod(self.top_k[: level + 1]), self.candidates) for level in range(depth)),
        )

    def propose(self, batch: Batch) -> Draft:
        found: list[DraftTree] = [EMPTY_TREE] * len(batch)
        rows = self.ready(batch)
        if rows:
            trees = [self._tree(batch[r].row, batch[r].budget) for r in rows]
            self._grow(trees, self.speculator.begin(self.states(batch, rows)))
            for r, tree in zip(rows, trees):
                whole = batch[r].row.distribution.temperature == 0
                found[r] = (
                    tree.cut(self.candidates, min(self.nodes, batch[r].budget.nodes))
                    if whole
                    else tree.draft_tree
                )
        return Draft(found)

    def _tree(self, row: Row, budget: Budget) -> Tree:
        top_k = self.top_k[: budget.depth]
        if row.distribution.temperature == 0:
            return Tree(row, product(top_k))
        drawn = self.draws(row)
        return Tree(
            row, likely(top_k, self.candidates, min(self.nodes, budget.nodes), drawn), drawn, self.stream_id
        )

    def _grow(self, trees: Sequence[Tree], state: steps.State) -> None:
        """Level by level; the row of `state` behind each tip (number of the tree, node)."""
        tips = [(t, ROOT) for t in range(len(trees))]
        for step in itertools.count():
            state, logits = self.speculator(step, state, [trees[t].token(node) for t, node in tips])
            at, last = 0, [len(tree.tokens) for tree in trees]
            for t, group in itertools.groupby(tips, key=lambda tip: tip[0]):
                level = [node for _, node in group]
                trees[t].grow(level, logits[at : at + len(level)], self.choose)
                at += len(level)
            behind = {tip: i for i, tip in enumerate(tips)}
            tips = [
                (t, node)
                for t, tree in enumerate(trees)
                for node in range(last[t], len(tree.tokens))
                if tree.open(node)
            ]
            if not tips:
                return
            state = tuple(part[[behind[t, trees[t].parents[node]] for t, node in tips]] for part in state)
