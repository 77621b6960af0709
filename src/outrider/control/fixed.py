"""A fixed number of draft tokens, or one from a table by batch size (vLLM's names)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any

from outrider.core.clock import Times
from outrider.core.step import Batch, Commit
from outrider.core.tree import NO_BUDGET, ROOT, Budget, DraftTree
from outrider.core.validate import Checked, is_whole, whole
from outrider.errors import ConfigError

MAX_DEPTH = 1024


@dataclass(frozen=True)
class Options(Checked):
    """Keys of speculative_config for the number of draft tokens.

    num_speculative_tokens                 depth of the tree; None: the method's default
    disable_by_batch_size                  draft nothing while more rows than this run
    num_speculative_tokens_per_batch_size  [[smallest, largest, depth], ...]; overrides the other two
    """

    num_speculative_tokens: Annotated[int, whole(0, MAX_DEPTH)] | None = None
    disable_by_batch_size: Annotated[int, whole(1, MAX_DEPTH)] | None = None
    num_speculative_tokens_per_batch_size: list[list[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        table = self.num_speculative_tokens_per_batch_size
        for entry in table if isinstance(table, (list, tuple)) else [] if table is None else [table]:
            triple = isinstance(entry, (list, tuple)) and len(entry) == 3
            if not (triple and all(is_whole(x, 0, MAX_DEPTH) for x in entry[2:]) and _is_range(*entry[:2])):
                raise ConfigError(
                    "num_speculative_tokens_per_batch_size must be a list of [smallest, largest, levels] "
                    f"with 1 <= smallest <= largest, got {entry!r}."
                )
        for entry, after in pairwise(sorted(map(list, table or ()))):
            if after[0] <= entry[1]:
                raise ConfigError(
                    "num_speculative_tokens_per_batch_size must have ranges that do not overlap, "
                    f"got {entry!r} and {after!r}."
                )


def _is_range(smallest: object, largest: object) -> bool:
    return is_whole(smallest, 1) and is_whole(largest, 1) and smallest <= largest  # type: ignore[operator]


class FixedController:
    """Controller with a depth from the options.

    depth: the method's default.  size: the method's node count for a depth.
    vocabulary: size of the target's vocabulary; draft tokens beyond it are trimmed.
    """

    def __init__(self, options: Options, depth: int, size: Callable[[int], int], vocabulary: int) -> None:
        given = options.num_speculative_tokens
        self.options, self.depth, self.size = options, depth if given is None else given, size
        self.vocabulary = vocabulary
        self._budget = lru_cache(lambda depth: Budget(depth, size(depth)))

    @property
    def max_depth(self) -> int:
        """The largest depth for any batch size."""
        table = self.options.num_speculative_tokens_per_batch_size or ()
        return max([self.depth, *(entry[2] for entry in table)])

    def nodes(self, rows: int) -> int:
        """The largest number of draft nodes that one of so many rows may get."""
        return self.size(self.depth_for(rows))

    def likely(self, rows: int) -> int:
        return self.nodes(rows)

    def depth_for(self, rows: int) -> int:
        for smallest, largest, depth in self.options.num_speculative_tokens_per_batch_size or ():
            if smallest <= rows <= largest:
                return depth
        limit = self.options.disable_by_batch_size
        return 0 if limit is not None and rows > limit else self.depth

    def budget(self, batch: Batch) -> list[Budget]:
        rows = len(batch)
        most = self.depth_for(rows)
        if not most:
            return [NO_BUDGET] * rows
        return [self._budget(min(most, step.row.draft_depth)) if step.emits else NO_BUDGET for step in batch]

    def trim(self, batch: Batch) -> None:
        for step in batch:
            tree = step.tree
            if tree.tokens and len(kept := self.kept(tree, step.budget)) < len(tree.tokens):
                batch.cut(step, kept)

    def learn(self, commit: Commit, times: Times) -> None:
        """Does nothing: the depth is fixed."""

    def forced(self, r: int) -> bool:
        """Forced text is always welcome."""
        return True

    def report(self) -> dict[str, Any]:
        """Nothing is chosen."""
        return {}

    def kept(self, tree: DraftTree, budget: Budget) -> Sequence[int]:
        """Nodes of a tree within its budget, ascending.  Probes are kept if their parents are.

        A prefix of the nodes is closed under ancestors, and so is a cut by depth.  Apart from ids outside the
        vocabulary, the choice depends on positions only, not on tokens: rejection rules require that of
        sampled trees.
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
