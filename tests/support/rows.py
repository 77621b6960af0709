"""Rows without an engine: what the tests of drafters that look text up have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from outrider import SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.base import Drafter


@dataclass(frozen=True)
class AnyTarget:
    """The attributes of a target that a drafter without weights reads."""

    vocabulary: int = 1000
    max_len: int = 10_000
    decoder: Any = field(default_factory=lambda: SimpleNamespace(device=torch.device("cpu")))
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(tokenizer=None))
    needs_probs: bool = False
    stream_id: int = 0


def make(method: type[Drafter], **options: Any) -> Any:
    return method(method.Options(**options), AnyTarget())  # type: ignore[arg-type]


def make_row(tokens: list[int], prompt: int | None = None, limit: int = 10_000) -> Row:
    params = SamplingParams(max_tokens=1000)
    return Row(
        id="0", index=0, tokens=list(tokens), prompt=len(tokens) if prompt is None else prompt, params=params, distribution=params.distribution, seed=0,
        processors=(), limit=limit, ending=frozenset(),
    )  # fmt: skip


def guess(drafter: Drafter, row: Row, depth: int, nodes: int | None = None) -> DraftTree:
    """The guesses for one row; a proper tree within its budget."""
    budget = Budget(depth, drafter.size(depth) if nodes is None else nodes)
    tree = proposed(drafter, row, budget)
    proper(tree, budget)
    return tree


def proposed(drafter: Drafter, row: Row, budget: Budget) -> DraftTree:
    """The tree for one row with one pending token."""
    return drafter.propose(Batch([RowStep(row, len(row.tokens) - 1, 1, budget=budget)])).trees[0]


def drafted(drafter: Drafter, row: Row, budget: Budget) -> Batch:
    """A step of one row with one pending token, which has its draft tree."""
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1, budget=budget)])
    batch.take(drafter.propose(batch))
    return batch


def proper(tree: DraftTree, budget: Budget) -> None:
    levels = {ROOT: 0}
    for i, parent in enumerate(tree.parents):
        assert parent < i
        levels[i] = levels[parent] + 1
    assert len(tree.tokens) == len(tree.parents) == len(tree.confidence) <= budget.nodes
    assert max(levels.values()) <= budget.depth
    assert len(set(zip(tree.parents, tree.tokens))) == len(tree.tokens), "siblings hold distinct tokens"
    assert all(0 < c <= 1 for c in tree.confidence)


def walked(tree: DraftTree, text: list[int]) -> list[int]:
    """The path of the tree that `text` takes."""
    child = {pair: i for i, pair in enumerate(zip(tree.parents, tree.tokens))}
    path: list[int] = []
    for token in text:
        if (path[-1] if path else ROOT, token) not in child:
            break
        path.append(child[path[-1] if path else ROOT, token])
    return path


def follow(drafter: Drafter, row: Row, text: list[int], depth: int) -> list[int]:
    """Lets a row say `text`, with guesses.  Returns how many nodes were guessed in each step."""
    sizes = []
    while text:
        batch = drafted(drafter, row, Budget(depth, drafter.size(depth)))
        step = batch[0]
        path = walked(step.tree, text)
        step.emitted, text = text[: len(path) + 1], text[len(path) + 1 :]
        step.accepted = path[: len(step.emitted) - 1]
        row.tokens.extend(step.emitted)
        drafter.observe(Commit(batch))
        sizes.append(len(step.tree.tokens))
    return sizes
