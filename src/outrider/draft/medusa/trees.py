"""Which ranks of which head get a node: measured while serving, published, or given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import ConfigError, unknown
from outrider.heads.ranks import Worth
from outrider.heads.templates import MEDUSA, Path, paths

OWN, CHAIN = "own", "chain"
RANKS = 10  # what every head is asked for: the published trees have no node of more
MOST = 64  # ranks that the kernels find at once


def check_tree(tree: Any) -> None:
    """Raises ConfigError for a name that there is not, and for paths that are no tree."""
    if isinstance(tree, str):
        if tree not in (OWN, CHAIN, *MEDUSA):
            raise ConfigError(unknown("tree", tree, (OWN, CHAIN, *MEDUSA)))
        return
    if not isinstance(tree, (list, tuple)) or not tree or not all(map(_is_path, tree)):
        raise ConfigError(
            f"tree must be a name or a list of paths such as [0], [0, 0], [1], of ranks in 0 … {MOST - 1}, got {tree!r}."
        )
    there = {(), *map(tuple, tree)}
    for path in map(tuple, tree):
        for needed in (path[:-1], (*path[:-1], path[-1] - 1) if path[-1] else ()):
            if needed not in there:
                raise ConfigError(
                    f"tree has the path {list(path)} and not {list(needed)}, without which it cannot be reached."
                )


def _is_path(path: Any) -> bool:
    good = isinstance(path, (list, tuple)) and len(path) > 0
    return good and all(
        isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < MOST for rank in path
    )


def allowed(tree: str | Sequence[Sequence[int]], heads: int) -> frozenset[Path] | None:
    """The paths that may be guessed; None for all of RANKS ranks.  What a published tree has beyond the heads is left out."""
    if tree == OWN:
        return None
    if tree == CHAIN:
        return frozenset((0,) * level for level in range(1, heads + 1))
    if isinstance(tree, str):
        return frozenset(path for path in paths(MEDUSA[tree]) if len(path) <= heads)
    given = frozenset(map(tuple, tree))
    if (deepest := max(map(len, given))) > heads:
        raise ConfigError(f"tree has {deepest} levels, and the file has {heads} heads.")
    return given


def grown(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The best tree of so many nodes, for the option `tree`: accuracies[i][j] is how often rank j of head i is right."""
    return Worth(accuracies).best(nodes, len(accuracies))
