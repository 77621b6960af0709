"""Several methods at once: their trees become one, with shared beginnings once, and the likeliest nodes of all are kept.

Each method gets a budget of its own, and learns from its own part of the tree as if it had guessed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider import draft
from outrider.draft.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.types import ROOT, Batch, Budget, Commit, Draft, Guesses, Needs, Row, Verdict

LEVELS = "num_speculative_tokens"


def read(config: Any) -> tuple[type[Drafter], Any, int | None]:
    """(method, its options, levels) of one of `drafters`: a speculative_config of which only the method's keys and the levels count."""
    if not isinstance(config, Mapping) or "method" not in config:
        raise ConfigError(f"each of 'drafters' must be a dict with a 'method', got {config!r}.")
    given = dict(config)
    name, levels = given.pop("method"), given.pop(LEVELS, None)
    if levels is not None and (not isinstance(levels, int) or isinstance(levels, bool) or levels < 1):
        raise ConfigError(f"{LEVELS} must be a whole number of at least 1, got {levels!r}.")
    return draft.method(name), draft.options(name, given, {"method", LEVELS}), levels


class Union(Drafter):
    @dataclass(frozen=True)
    class Options:
        """drafters: a list of {"method": …, "num_speculative_tokens": …, and the method's own keys}."""

        drafters: Sequence[Mapping[str, Any]] = ()

        def __post_init__(self) -> None:
            if not isinstance(self.drafters, (list, tuple)):
                raise ConfigError(f"drafters must be a list of dicts with a 'method', got {self.drafters!r}.")
            for config in self.drafters:
                read(config)

    def __init__(self, options: Any, target: Target, drafters: Sequence[Drafter] = ()) -> None:
        """`drafters`: instead of those that the options describe."""
        super().__init__(options, target)
        self.drafters, self.levels = list(drafters), [drafter.depth for drafter in drafters]
        for method, own, levels in map(read, options.drafters):
            self.drafters.append(method(own, target))
            self.levels.append(levels or self.drafters[-1].depth)
        if not self.drafters:
            raise ConfigError("the method needs 'drafters', a list of dicts with a 'method'.")
        self.depth = max(self.levels)
        self.slot_bytes = sum(drafter.slot_bytes for drafter in self.drafters)
        self.needs = Needs(topk=max(drafter.needs.topk for drafter in self.drafters))
        self.drafts: list[Draft] = []  # of each drafter, in this step

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """All methods that guess for themselves."""
        single = [method for _, method in sorted(draft.methods().items()) if not issubclass(method, Union)]
        return cls(cls.Options(), target, [method.example(target) for method in single])

    @property
    def memory(self) -> list[Any]:  # type: ignore[override]
        return [drafter.memory for drafter in self.drafters]

    @memory.setter
    def memory(self, values: list[Any]) -> None:
        for drafter, value in zip(self.drafters, values):
            drafter.memory = value

    def allocate(self, slots: int) -> list[Any]:
        return [pool for drafter in self.drafters for pool in drafter.allocate(slots)]

    def size(self, depth: int) -> int:
        return sum(self.sizes(depth))

    def sizes(self, depth: int) -> list[int]:
        return [drafter.size(min(depth, levels)) for drafter, levels in zip(self.drafters, self.levels)]

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        self.drafts = [self.ask(i, batch, budgets) for i in range(len(self.drafters))]
        return Draft([merged(trees, budget) for *trees, budget in zip(*(draft.trees for draft in self.drafts), budgets)])

    def ask(self, i: int, batch: Batch, budgets: list[Budget]) -> Draft:
        """What drafter i says within its own levels and nodes."""
        drafter, levels = self.drafters[i], self.levels[i]
        own = [Budget(depth := min(b.depth, levels), min(b.nodes, drafter.size(depth))) if b.nodes else b for b in budgets]
        return drafter.propose(batch, own)

    def observe(self, commit: Commit) -> None:
        for drafter, own in zip(self.drafters, self.drafts):
            drafter.observe(part(commit, own, drafter.needs.topk))

    def forget(self, row: Row, reason: str) -> None:
        for drafter in self.drafters:
            drafter.forget(row, reason)

    def filled(self, row: Row) -> int:
        return min(drafter.filled(row) for drafter in self.drafters)


def merged(trees: Sequence[Guesses], budget: Budget) -> Guesses:
    """One tree of all: a node that several trees have is as likely as the most hopeful of them says; best nodes first."""
    children: dict[int, dict[int, int]] = {ROOT: {}}  # node -> token -> node, before the choice
    likely: list[float] = []
    for tree in trees:
        place = {ROOT: ROOT}
        for i, (token, parent, confidence) in enumerate(zip(*tree)):
            below = children[place[parent]]
            if token not in below:
                below[token] = len(likely)
                children[len(likely)] = {}
                likely.append(confidence)
            place[i] = below[token]
            likely[place[i]] = max(likely[place[i]], confidence)
    made = Guesses([], [], [])
    waiting = [(-likely[node], node, token, ROOT) for token, node in children[ROOT].items()]
    heapq.heapify(waiting)
    while waiting and len(made.tokens) < budget.nodes:
        joint, node, token, parent = heapq.heappop(waiting)
        made.tokens.append(token)
        made.parents.append(parent)
        made.confidence.append(likely[node])
        for token, child in children[node].items():
            heapq.heappush(waiting, (joint * likely[child], child, token, len(made.tokens) - 1))
    return made


def part(commit: Commit, own: Draft, topk: int) -> Commit:
    """The commit as a drafter sees it whose draft was `own`: its nodes that were verified, its accepted ones, all tokens."""
    trees: list[Guesses] = []
    accepted: list[list[int]] = []
    best: list[list[list[int]]] = []
    for r, (tree, whole) in enumerate(zip(own.trees, commit.draft.trees)):
        where = {pair: i for i, pair in enumerate(zip(whole.parents, whole.tokens))}
        place, theirs = {ROOT: ROOT}, {ROOT: ROOT}  # node of `tree` -> in `kept`, and -> in `whole`
        kept = Guesses([], [], [])
        for i, (token, parent, confidence) in enumerate(zip(*tree)):
            if (theirs.get(parent), token) in where:
                place[i], theirs[i] = len(kept.tokens), where[theirs[parent], token]
                kept.tokens.append(token)
                kept.parents.append(place[parent])
                kept.confidence.append(confidence)
        mine = {node: place[i] for i, node in theirs.items()}
        trees.append(kept)
        accepted.append([mine[node] for node in commit.verdict.nodes[r] if node in mine])
        if commit.topk and topk:
            best.append([commit.topk[r][1 + theirs[i]][:topk] for i in place] if commit.topk[r] else [])
    return replace(commit, draft=Draft(trees), verdict=Verdict(accepted, commit.verdict.tokens), topk=best)
