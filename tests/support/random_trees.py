"""Random draft trees, and batches of rows without an engine."""

from __future__ import annotations

from hypothesis import strategies as st

from outrider import SamplingParams, testing
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import ROOT, DraftTree


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> DraftTree:
    """A random tree with distinct siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, i - 1))
        taken = [t for t, p in zip(tokens, parents) if p == parent]
        tokens.append(draw(st.integers(0, 30).filter(lambda t, taken=taken: t not in taken)))
        parents.append(parent)
    return DraftTree(tokens, parents, [0.5] * len(tokens))


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`, the root left out."""
    return [] if node == ROOT else [*path_to(parents, parents[node]), node]


def make_row(tokens: list[int], new: int = 16, speculate: bool = True) -> Row:
    params = SamplingParams(max_tokens=new, speculate=speculate)
    return testing.make_row(tokens, params=params, limit=len(tokens) + new)


def batch_of(*rows: Row, known: int = 1) -> Batch:
    batch = Batch()
    for row in rows:
        row.computed = len(row.tokens) - known
        batch.add(row, known)
    return batch


def chunk(row: Row, known: int) -> Batch:
    """The first `known` tokens of a row that has nothing computed."""
    batch = Batch()
    batch.add(row, known)
    return batch
