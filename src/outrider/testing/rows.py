"""Rows and proposals without an engine, for unit tests of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.base import Drafter, Target


@dataclass(frozen=True)
class FakeTarget(Target):
    """The part of a target that a drafter without weights reads."""

    decoder: Any = field(default_factory=lambda: SimpleNamespace(device=torch.device("cpu")))
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(tokenizer=None))
    sampler: Any = None
    vocabulary: int = 1000
    max_len: int = 10_000


def make_drafter(method: type[Drafter], **options: Any) -> Any:
    """A drafter of this class for a `FakeTarget`; options are the fields of its `Options`."""
    return method(method.Options(**options), FakeTarget())


def make_row(tokens: Sequence[int], prompt: int | None = None, **fields: Any) -> Row:
    """A row with these tokens, whose first `prompt` are the prompt (all by default).

    fields: further fields of `Row`. The default is greedy, without processors, with a limit of 10,000 tokens.
    """
    params = SamplingParams(max_tokens=1000)
    defaults: dict[str, Any] = {
        "id": "0",
        "index": 0,
        "params": params,
        "distribution": params.distribution,
        "seed": 0,
        "processors": (),
        "limit": 10_000,
        "ending": frozenset(),
    }
    count = len(tokens) if prompt is None else prompt
    return Row(tokens=list(tokens), prompt=count, **{**defaults, **fields})


def proposed_tree(drafter: Drafter, row: Row, budget: Budget) -> DraftTree:
    """The tree that a drafter proposes for one row whose last token is pending. It is not checked."""
    return drafter.propose(Batch([RowStep(row, len(row.tokens) - 1, 1, budget=budget)])).trees[0]


def propose_tree(drafter: Drafter, row: Row, depth: int, nodes: int | None = None) -> DraftTree:
    """A row's tree by a drafter, checked by `check_tree`.  nodes: `drafter.size(depth)` by default."""
    budget = Budget(depth, drafter.size(depth) if nodes is None else nodes)
    tree = proposed_tree(drafter, row, budget)
    check_tree(tree, budget)
    return tree


def drafted_batch(drafter: Drafter, row: Row, budget: Budget) -> Batch:
    """A decode step of one row, with the draft tree that a drafter proposes for it."""
    batch = Batch([RowStep(row, len(row.tokens) - 1, 1, budget=budget)])
    batch.take(drafter.propose(batch))
    return batch


def check_tree(tree: DraftTree, budget: Budget) -> None:
    """Raise AssertionError unless the tree is well formed and within its budget.

    Parents come before their children, siblings hold distinct tokens, confidences are in (0, 1].
    """
    for i, parent in enumerate(tree.parents):
        assert parent < i, f"node {i} has the parent {parent}, which comes later"
    depth = max(tree.depths, default=0)
    sizes = len(tree.tokens), len(tree.parents), len(tree.confidence)
    assert len({*sizes}) == 1, f"tokens, parents and confidence differ in length: {sizes}"
    assert len(tree.tokens) <= budget.nodes, f"{len(tree.tokens)} nodes in a budget of {budget.nodes}"
    assert depth <= budget.depth, f"depth {depth} in a budget of {budget.depth}"
    assert len(set(zip(tree.parents, tree.tokens))) == len(tree.tokens), "siblings hold distinct tokens"
    assert all(0 < c <= 1 for c in tree.confidence), "confidences lie in (0, 1]"


def accepted_path(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes of the tree that `text` runs through, from the root down."""
    child = {pair: i for i, pair in enumerate(zip(tree.parents, tree.tokens))}
    path: list[int] = []
    for token in text:
        node = child.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    return path


def replay(drafter: Drafter, row: Row, text: Sequence[int], depth: int) -> list[int]:
    """Extend a row by `text` in speculative steps; return the number of draft tokens of each step."""
    sizes, text = [], list(text)
    while text:
        batch = drafted_batch(drafter, row, Budget(depth, drafter.size(depth)))
        step = batch[0]
        path = accepted_path(step.tree, text)
        step.emitted, text = text[: len(path) + 1], text[len(path) + 1 :]
        step.accepted = path[: len(step.emitted) - 1]
        row.tokens.extend(step.emitted)
        drafter.observe(Commit(batch))
        sizes.append(len(step.tree.tokens))
    return sizes
