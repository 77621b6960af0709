"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), and Arctic's variants of it.

A small recurrent network with its own embeddings and heads, started from the state that gave the pending
token:

    position   … e-2     e-1 │  e      e+1        e: the first draft token
    target     f_e-2         │                    its last state
    token            x_e-1   │  d_e    d_e+1      x: emitted, d: draft
    step 0 reads f_e-2 and x_e-1, its logits give d_e;  step 1 reads the state of step 0 and d_e, and gives
    d_e+1;  …

A chain by default, as in vLLM; `top_k_tokens_per_head` makes it IBM's tree.  A level is one pass over all
nodes of all rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.core.validate import check_fields, is_whole, optional, whole
from outrider.draft.mlp_speculator import layouts, steps
from outrider.draft.mlp_speculator.tree import best_nodes, likeliest, product
from outrider.drafting.base import Drafter, Target
from outrider.drafting.options import refuse_idle
from outrider.errors import ConfigError
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.trees import RankTree, grow_level

MAX_NODES = 1024  # of a product


def _check(top_k: Any, where: str = "") -> tuple[int, ...]:
    """Raise ConfigError unless it lists a number of children for each step."""
    if not isinstance(top_k, (list, tuple)) or not top_k or not all(is_whole(k, 1, 64) for k in top_k):
        raise ConfigError(
            f'top_k_tokens_per_head{where} must be a list of whole numbers in 1 … 64, or "config", '
            f"got {top_k!r}."
        )
    if (nodes := sum(math.prod(top_k[:level]) for level in range(1, len(top_k) + 1))) > MAX_NODES:
        raise ConfigError(
            f"top_k_tokens_per_head{where} {list(top_k)} makes {nodes} nodes, at most {MAX_NODES} are grown: "
            "choose less."
        )
    return tuple(top_k)


class MlpSpeculator(StateDrafter):
    demo: ClassVar = {"MLP speculator": {"model": "builtin-mlp_speculator", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """top_k_tokens_per_head: children of a node, step by step, such as [4, 3, 2, 2]; "config" for the
        checkpoint's value (None: one, a chain).  n_candidates: paths of that tree to keep (None: the
        checkpoint's value, or all). nodes: of a tree at most (None: all, but 8 on a CPU, where every node
        costs time).
        """

        top_k_tokens_per_head: Sequence[int] | str | None = None
        n_candidates: int | None = None
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.top_k_tokens_per_head not in (None, "config"):
                _check(self.top_k_tokens_per_head)
            count = optional(whole(1, MAX_NODES))
            check_fields(self, {"n_candidates": count, "nodes": count})
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
        self.nodes = self.depth if chain else target.nodes(options.nodes, MAX_NODES)

    def _branches(self, options: Options) -> tuple[tuple[int, ...], int]:
        """(children of a node, level by level; number of paths to keep)."""
        asked, config = options.top_k_tokens_per_head, self.head.config
        if asked is None:
            return (1,) * self.depth, 1
        own = asked == "config"
        top_k = (
            _check(config.get("top_k_tokens_per_head"), f" of {self.head.name!r}") if own else _check(asked)
        )
        if len(top_k) != self.depth:
            raise ConfigError(
                f"top_k_tokens_per_head {list(top_k)} is for {len(top_k)} steps, and {self.head.name!r} has "
                f"{self.depth}."
            )
        kept: Any = options.n_candidates or config.get("n_candidates")
        return top_k, kept if is_whole(kept, 1, MAX_NODES) else math.prod(top_k)

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
        """Raise ConfigError for more levels than the network has steps."""
        if depth > self.depth:
            raise ConfigError(
                f"num_speculative_tokens {depth} is more than the {self.depth} steps (n_predict) of "
                f"{self.head.name!r}."
            )
        return min(
            self.nodes,
            sum(min(math.prod(self.top_k[: level + 1]), self.candidates) for level in range(depth)),
        )

    def propose(self, batch: Batch) -> Draft:
        trees: list[DraftTree] = [EMPTY_TREE] * len(batch)
        rows = self.ready(batch)
        if rows:
            grown = [self._tree(batch[r].row, batch[r].budget) for r in rows]
            self._grow(grown, self.speculator.begin(self.states(batch, rows)))
            for r, tree in zip(rows, grown):
                trees[r] = self._cut(tree, batch[r].budget) if _greedy(tree.row) else tree.draft_tree
        return Draft(trees)

    def _tree(self, row: Row, budget: Budget) -> RankTree:
        top_k = self.top_k[: budget.depth]
        if _greedy(row):
            return RankTree(row, product(top_k))
        sampled = self.samples(row)
        shape = likeliest(top_k, self.candidates, min(self.nodes, budget.nodes), sampled)
        return RankTree(row, shape, sampled=sampled, stream_id=self.target.stream_id)

    def _grow(self, trees: list[RankTree], state: steps.State) -> None:
        """Grow all trees, one step of the network a level.  state: a row for every node of the frontiers'
        parents.
        """
        for step in itertools.count():
            tokens = [tree.token(node) for tree in trees for node in tree.frontier]
            state, logits = self.speculator(step, state, tokens)
            trees, sources = grow_level(trees, self.choose, logits)
            if not trees:
                return
            state = tuple(part[sources] for part in state)

    def _cut(self, tree: RankTree, budget: Budget) -> DraftTree:
        """The likeliest paths of a whole product, by the network's probabilities."""
        nodes = min(self.nodes, budget.nodes)
        joint = [tree.joint[node] for node in range(len(tree.tokens))]
        return tree.draft_tree.only(best_nodes(tree.parents, joint, self.candidates, nodes))


def _greedy(row: Row) -> bool:
    return row.distribution.temperature == 0
