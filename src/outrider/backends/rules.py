"""Interface of a backend's sampling distributions and of its verification of draft trees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outrider.core.logprobs import TopValues
from outrider.core.noise import key_in
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree

Answer = tuple[list[int], list[int]]  # accepted nodes of a tree, and the tokens to emit


class TreeQuery(NamedTuple):
    """A tree to verify.

    root:     row of the logits after the root; node i has row root + 1 + i
    stream:   RNG stream of the sample
    position: position of the token after the root
    """

    key: int
    root: int
    distribution: DistributionParams
    stream: int
    position: int
    tree: DraftTree

    @staticmethod
    def of(key: int, row: Row, tree: DraftTree, root: int) -> TreeQuery:
        """The tree of a row."""
        return TreeQuery(key, root, row.distribution, row.stream, len(row.tokens), tree)

    @property
    def keys(self) -> list[int]:
        """Of the noise after the root and each node."""
        return keys_of(self.stream, self.position, self.tree)


def keys_of(stream: int, position: int, tree: DraftTree) -> list[int]:
    """RNG keys of the noise after the root of a tree, which has this position, and after each node."""
    if not tree.tokens:  # most rows of plain decoding
        return [key_in(stream, position)]
    depths = [0]
    for parent in tree.parents[: tree.size]:
        depths.append(depths[parent + 1] + 1)
    return [key_in(stream, position + depth) for depth in depths]


class TreeQueries(Protocol):
    """Trees to verify by one rule, and buffers for the results."""

    def add(self, key: int, row: Row, tree: DraftTree, root: int) -> None:
        """Add the tree of a row, without processors unless `TreeVerifier.processes`.

        root: row of the logits after its root.
        """

    def read(self) -> Iterable[tuple[int, Answer | None]]:
        """For each key that was taken: accepted nodes and emitted tokens.

        None if a node on the way has no finite logit, after processors.  `Rule` verifies this row, and rows
        whose keys are missing, because only calls tell what their processors do.
        """

    def values(self, key: int, nodes: Sequence[int]) -> Sequence[TopValues] | None:
        """Log-probabilities of the tokens after these nodes, as their row asks; None if not found here."""


class TreeVerifier(Protocol):
    """Verification of whole trees in one call.

    rules: names of the supported rules.  processes: takes rows with processors, those that it can.
    """

    @property
    def rules(self) -> Collection[str]: ...
    @property
    def processes(self) -> bool: ...
    def queries(self, rule: str) -> TreeQueries: ...
    def verify(self, logits: Tensor, queries: Any) -> None:
        """Answer the queries from logits [M, V]."""


class DistributionOps(Protocol):
    """Sampling distributions q and p, float64 [V] on the CPU."""

    def probabilities(self, logits: Tensor, distribution: DistributionParams, row: int = 0) -> Tensor | None:
        """The sampling distribution of one row of logits, as in `pick`; None if no logit is finite."""

    def sample(self, probs: Tensor, stream: int, step: int, nodes: range, repeats: bool) -> list[int]:
        """Tokens of sibling nodes, as `random_streams.children` samples them."""
