"""Mixes of scripted drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.draft.union import Union
from outrider.drafting.base import Drafter, Storage, Target
from outrider.testing import FakeTarget


class Fixed(Drafter):
    """Proposes one tree, and records what it is given."""

    def __init__(self, tree: DraftTree, topk: int = 0, depth: int = 3) -> None:
        self.tree, self.needs, self.depth = tree, Needs(topk), depth
        self.budgets: list[Budget] = []
        self.seen: list[Commit] = []
        self.gone: list[tuple[Row, str]] = []
        self.slot_bytes, self.memory = 10 * topk, topk

    def size(self, depth: int) -> int:
        return 2 * depth

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter({device: self.slot_bytes})

    def allocate(self, slots: int, pool: Any) -> Storage:
        return Storage([(slots, pool)] * (self.slot_bytes > 0))  # type: ignore[list-item]

    def propose(self, batch: Batch) -> Draft:
        self.budgets = [step.budget for step in batch]
        return Draft([self.tree if step.budget.nodes else EMPTY_TREE for step in batch])

    def observe(self, commit: Commit) -> None:
        self.seen.append(commit)

    def forget(self, row: Row, reason: str) -> None:
        self.gone.append((row, reason))

    def filled(self, row: Row) -> int:
        return self.slot_bytes


def factory(drafter: Drafter) -> Callable[[Target], Drafter]:
    """Returns the drafter, with the target that it is given."""

    def make(target: Target) -> Drafter:
        drafter.target = target
        return drafter

    return make


def together(method: type[Union], *drafters: Drafter, target: Any = None, nodes: int | None = None) -> Union:
    factories = [factory(drafter) for drafter in drafters]
    return method(method.Options(nodes=nodes), target or FakeTarget(), factories)


def every(node: Any) -> list[Any]:
    return [below for child in node.children for below in (child, *every(child))]
