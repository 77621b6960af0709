"""Shapes of Medusa trees: by measured accuracy, published, or listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import ConfigError, unknown
from outrider.heads.ranks import RankAccuracy
from outrider.heads.templates import MEDUSA, Path, chain_paths, paths

OWN, CHAIN = "own", "chain"
RANKS = 10  # candidates of every head, as many as the published trees use
MAX_RANKS = 64  # that the kernels find at once


def check_tree(tree: Any) -> None:
    """Raise ConfigError for an unknown name, and for paths that are not a tree."""
    if isinstance(tree, str):
        if tree not in (OWN, CHAIN, *MEDUSA):
            raise ConfigError(unknown("tree", tree, (OWN, CHAIN, *MEDUSA)))
        return
    if not isinstance(tree, (list, tuple)) or not tree or not all(map(_is_path, tree)):
        raise ConfigError(
            "tree must be a name or a list of paths such as [0], [0, 0], [1], of ranks in 0 … "
            f"{MAX_RANKS - 1}, got {tree!r}."
        )
    listed = {(), *map(tuple, tree)}
    for path in map(tuple, tree):
        sibling_before = (*path[:-1], path[-1] - 1) if path[-1] else ()
        for needed in (path[:-1], sibling_before):
            if needed not in listed:
                raise ConfigError(
                    f"tree has the path {list(path)} and not {list(needed)}, without which it cannot be "
                    "reached."
                )


def _is_path(path: Any) -> bool:
    good = isinstance(path, (list, tuple)) and len(path) > 0
    return good and all(
        isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < MAX_RANKS for rank in path
    )


def allowed(tree: str | Sequence[Sequence[int]], heads: int) -> frozenset[Path] | None:
    """The paths that may get a node; None for all of RANKS ranks.  Levels of a published tree beyond the
    heads are left out.
    """
    if tree == OWN:
        return None
    if tree == CHAIN:
        return frozenset(chain_paths(heads))
    if isinstance(tree, str):
        return frozenset(path for path in paths(MEDUSA[tree]) if len(path) <= heads)
    listed = frozenset(map(tuple, tree))
    if (deepest := max(map(len, listed))) > heads:
        raise ConfigError(f"tree has {deepest} levels, and the file has {heads} heads.")
    return listed


def grown(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The best tree of this size, for the option `tree`.  accuracies[i][j]: how often rank j of head i is
    right.
    """
    return RankAccuracy(accuracies).best_paths(nodes, len(accuracies))
