"""A fixed number of guesses, or one that a table gives for the size of the batch (vLLM's names)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outrider.core.clock import Times
from outrider.core.step import Batch, Commit
from outrider.core.tree import NO_BUDGET, ROOT, Budget, DraftTree
from outrider.errors import ConfigError

MOST = 1024


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Options:
    """num_speculative_tokens: levels to guess (None: the method's own default).  disable_by_batch_size: no guesses while
    more rows than this run.  num_speculative_tokens_per_batch_size: [[smallest, largest, levels], …], before the other two.
    """

    num_speculative_tokens: int | None = None
    disable_by_batch_size: int | None = None
    num_speculative_tokens_per_batch_size: list[list[int]] | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_speculative_tokens", 0), ("disable_by_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and not (_whole(value, least) and value <= MOST):
                raise ConfigError(f"{name} must be a whole number in {least} … {MOST}, got {value!r}.")
        table = self.num_speculative_tokens_per_batch_size
        for entry in table if isinstance(table, (list, tuple)) else [] if table is None else [table]:
            good = (
                isinstance(entry, (list, tuple))
                and len(entry) == 3
                and all(_whole(x, 0) for x in entry)
                and entry[2] <= MOST
            )
            if not (good and 1 <= entry[0] <= entry[1]):
                raise ConfigError(
                    "num_speculative_tokens_per_batch_size must be a list of [smallest, largest, levels] with "
                    f"1 <= smallest <= largest, got {entry!r}."
                )
        for entry, after in pairwise(sorted(map(list, table or ()))):
            if after[0] <= entry[1]:
                raise ConfigError(
                    f"num_speculative_tokens_per_batch_size must have ranges that do not overlap, got {entry!r} and {after!r}."
                )


class FixedController:
    def __init__(self, options: Options, depth: int, size: Callable[[int], int], vocabulary: int) -> None:
        """`depth` is the method's default, `size` its node count for a depth, `vocabulary` the target's: nothing else can be right."""
        given = options.num_speculative_tokens
        self.options, self.depth, self.size = options, depth if given is None else given, size
        self.vocabulary = vocabulary

    @property
    def max_depth(self) -> int:
        """The largest depth for any batch size."""
        return max(
            [self.depth, *(entry[2] for entry in self.options.num_speculative_tokens_per_batch_size or ())]
        )

    def nodes(self, rows: int) -> int:
        """The most guesses that one of so many rows may get."""
        return self.size(self.levels(rows))

    def levels(self, rows: int) -> int:
        for smallest, largest, levels in self.options.num_speculative_tokens_per_batch_size or ():
            if smallest <= rows <= largest:
                return levels
        limit = self.options.disable_by_batch_size
        return 0 if limit is not None and rows > limit else self.depth

    def budget(self, batch: Batch) -> list[Budget]:
        levels = self.levels(len(batch.rows))
        budgets = []
        for step in batch:
            # the last token of a row is never a guess: it is emitted by the step that verifies the ones before it
            depth = (
                min(levels, step.row.remaining - 1)
                if levels and step.emits and step.row.params.speculate
                else 0
            )
            budgets.append(Budget(depth, self.size(depth)) if depth else NO_BUDGET)
        return budgets

    def trim(self, batch: Batch) -> None:
        for step in batch:
            kept = self.kept(step.tree, step.budget)
            if len(kept) < len(step.tree.tokens):
                step.tree, step.kept = step.tree.only(kept), kept
                batch.resume = None  # its nodes are those of the whole trees

    def learn(self, commit: Commit, times: Times) -> None:
        """A fixed length learns nothing."""

    def kept(self, tree: DraftTree, budget: Budget) -> Sequence[int]:
        """The nodes of a tree that its budget allows, ascending; probes stay while their parents do.

        A prefix of the nodes is closed under ancestors, and so is a cut by depth.  Apart from ids outside the vocabulary,
        the choice depends on positions only, never on tokens: rejection rules need that of sampled trees.
        """
        tokens, vocabulary = tree.tokens, self.vocabulary
        if not tokens:
            return ()
        if len(tokens) <= budget.depth and tree.chained and min(tokens) >= 0 and max(tokens) < vocabulary:
            return range(len(tokens))
        depth = {ROOT: 0}  # of the nodes that stay
        for node, (token, parent) in enumerate(zip(tokens, tree.parents)):
            if len(depth) > budget.nodes:
                break
            shallow = parent in depth and (depth[parent] < budget.depth or node >= tree.size)
            if shallow and 0 <= token < vocabulary:
                depth[node] = depth[parent] + 1
        return [node for node in depth if node != ROOT]
