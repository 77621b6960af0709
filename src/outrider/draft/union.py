"""Several methods at once: their trees become one, with shared beginnings once, and the likeliest nodes of all are kept.

Each method is asked within its own levels, and learns from its own part of the tree as if it had guessed alone.  Guesses that were
drawn (see Guesses) stay what they are: none is merged with another that holds the same token, and whether one is kept depends on
its place among its siblings, never on its token.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider import draft
from outrider.cache.pool import Pool
from outrider.core.noise import mix
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import ROOT, Draft, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError, unknown
from outrider.sampling.random_streams import without

LEVELS = "num_speculative_tokens"
FIRST_DRAW, NEXT_DRAW = (
    0.7,
    0.3,
)  # how likely the first of drawn siblings is right, and each further one over the one before


def read(config: Any) -> tuple[type[Drafter], Any, int | None]:
    """(method, its options, levels) of one of `drafters`."""
    if not isinstance(config, Mapping) or not {"method", "model"} & config.keys():
        raise ConfigError(
            f"each of 'drafters' must be a dict with a 'method' or a draft 'model', got {config!r}."
        )
    given = dict(config)
    name, levels = given.pop("method", None), given.pop(LEVELS, None)
    name = draft.detect(given["model"], given.get("revision")) if name is None else name
    method = draft.method(name)
    known = {option.name for option in fields(method.Options)}
    for key in given:
        if key not in known:
            raise ConfigError(unknown("key", key, {"method", LEVELS, *known}, f"'drafters', method {name!r}"))
    if levels is not None and (not isinstance(levels, int) or isinstance(levels, bool) or levels < 1):
        raise ConfigError(f"{LEVELS} must be a whole number of at least 1, got {levels!r}.")
    return method, method.Options(**given), levels


@dataclass
class Merged:
    """One tree of several; where[k][i]: the node that node i of tree k has become, for those that are in it."""

    tree: DraftTree
    where: list[dict[int, int]]


class Union(Drafter):
    demo: ClassVar = {
        "n-gram with recycling": {"drafters": [{"method": "ngram"}, {"method": "recycle"}], "nodes": 8}
    }

    @dataclass(frozen=True)
    class Options:
        """drafters: a list of {"method": …, "num_speculative_tokens": …, and the method's own keys}.  nodes: of the tree at most
        (None: as many as all of them may guess).
        """

        drafters: Sequence[Mapping[str, Any]] = ()
        nodes: int | None = None

        def __post_init__(self) -> None:
            if not isinstance(self.drafters, (list, tuple)):
                raise ConfigError(f"drafters must be a list of dicts with a 'method', got {self.drafters!r}.")
            for config in self.drafters:
                read(config)
            if self.nodes is not None and (
                not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or self.nodes < 1
            ):
                raise ConfigError(f"nodes must be a whole number of at least 1, got {self.nodes!r}.")

    def __init__(self, options: Any, target: Target, drafters: Sequence[Drafter] = ()) -> None:
        """`drafters`: these, in front of those that the options describe."""
        super().__init__(options, target)
        self.drafters, self.levels = list(drafters), [drafter.depth for drafter in drafters]
        for method, own, levels in map(read, options.drafters):
            self.drafters.append(method.create(own, target))
            self.levels.append(levels or self.drafters[-1].depth)
        if not self.drafters:
            raise ConfigError("the method needs 'drafters', a list of dicts with a 'method'.")
        self.depth = max(self.levels)
        self.needs = reduce(or_, (drafter.needs for drafter in self.drafters), Needs())
        self.slot_bytes = sum(drafter.slot_bytes for drafter in self.drafters)
        self.stream_id = 0
        self.drafts: list[Draft] = []  # of each drafter, in this step
        self.merged: list[Merged] = []  # of each row

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

    def draft_by_sampling(self, on: bool) -> None:
        super().draft_by_sampling(on)
        for drafter in self.drafters:
            drafter.draft_by_sampling(on)

    @property
    def stream_id(self) -> int:  # type: ignore[override]
        return self._lot

    @stream_id.setter
    def stream_id(self, value: int) -> None:
        """Far apart, so that no two drafters, however they are nested, ever roll the same die."""
        self._lot = value
        for i, drafter in enumerate(self.drafters):
            drafter.stream_id = mix(value + i + 1)

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return sum((drafter.footprint(device) for drafter in self.drafters), Counter())

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        pools = [own for drafter in self.drafters for own in drafter.allocate(slots, pool)]
        self.caches = [cache for drafter in self.drafters for cache in drafter.caches]
        return pools

    def size(self, depth: int) -> int:
        return min(sum(self._sizes(depth)), self.options.nodes or 1 << 30)

    def _sizes(self, depth: int) -> list[int]:
        return [drafter.size(min(depth, levels)) for drafter, levels in zip(self.drafters, self.levels)]

    def propose(self, batch: Batch) -> Draft:
        self.drafts = [self._ask(i, batch) for i in range(len(self.drafters))]
        return self._merge(batch)

    def _ask(self, i: int, batch: Batch) -> Draft:
        """What drafter i says within its own levels and nodes."""
        drafter, levels = self.drafters[i], self.levels[i]
        own = [step.budget.within(depth=levels) for step in batch]
        return drafter.propose(
            batch.within([budget.within(nodes=drafter.size(budget.depth)) for budget in own])
        )

    def _merge(self, batch: Batch) -> Draft:
        each = zip(*(said.trees for said in self.drafts))
        self.merged = [merge(trees, step.budget.nodes) for trees, step in zip(each, batch)]
        return Draft([merged.tree for merged in self.merged])

    def observe(self, commit: Commit) -> None:
        alive = []
        for merged, step in zip(self.merged, commit.batch):
            kept = range(len(merged.tree.tokens)) if step.kept is None else step.kept
            alive.append({node: now for now, node in enumerate(kept)})
        for k, drafter in enumerate(self.drafters):
            where = [
                {i: now[node] for i, node in merged.where[k].items() if node in now}
                for merged, now in zip(self.merged, alive)
            ]
            drafter.observe(part(commit, self.drafts[k], where, drafter.needs.topk))

    def forget(self, row: Row, reason: str) -> None:
        for drafter in self.drafters:
            drafter.forget(row, reason)

    def filled(self, row: Row) -> int:
        return min(drafter.filled(row) for drafter in self.drafters)


def merge(trees: Sequence[DraftTree], nodes: int) -> Merged:
    """One tree of at most so many nodes, best first; then the probes of each tree, where all of them fit."""
    speaking = [k for k, tree in enumerate(trees) if tree.tokens]
    if len(speaking) == 1 and len(trees[speaking[0]].tokens) <= nodes:
        tree = trees[speaking[0]]
        return Merged(
            tree,
            [{i: i for i in range(len(tree.tokens))} if k in speaking else {} for k in range(len(trees))],
        )
    if len({tree.repeats for tree in trees if tree.distributions}) > 1:
        trees = [independent(tree) for tree in trees]
    growing = _Merging()
    for tree in trees:
        growing.take(tree)
    where = growing.grow(nodes)
    for tree, places in zip(trees, where):
        growing.probe(tree, places, nodes)
    return Merged(growing.made, where)


@dataclass
class _Node:
    """A node before the choice: what it holds, and which nodes of which trees it stands for."""

    token: int
    confidence: float
    distribution: int
    owners: list[tuple[int, int]]
    children: list[_Node] = field(default_factory=list)
    chosen: dict[int, _Node] = field(
        default_factory=dict
    )  # those of `children` that were chosen, by their token
    draws: Counter[int] = field(default_factory=Counter)  # law -> how many of `children` were drawn from it


class _Merging:
    def __init__(self) -> None:
        self.root = _Node(ROOT, 1.0, -1, [])
        self.distributions: list[Tensor] = []
        self.trees = 0
        self.repeats = False
        self.made = DraftTree([], [], [])

    def take(self, tree: DraftTree) -> None:
        """Adds the guesses of a tree, probes aside.  A chosen node that several trees have is as likely as the most hopeful says."""
        nodes = {ROOT: self.root}
        for i in range(tree.size):
            above, token, confidence = nodes[tree.parents[i]], tree.tokens[i], tree.confidence[i]
            distribution = (
                tree.probs_of[i] + len(self.distributions) if tree.distribution(i) is not None else -1
            )
            node = above.chosen.get(token) if distribution < 0 else None
            if distribution >= 0:
                confidence = FIRST_DRAW * NEXT_DRAW ** above.draws[distribution]
                above.draws[distribution] += 1
            if node is None:
                node = _Node(token, confidence, distribution, [])
                above.children.append(node)
                if distribution < 0:
                    above.chosen[token] = node
            node.confidence = max(node.confidence, confidence)
            node.owners.append((self.trees, i))
            nodes[i] = node
        self.distributions.extend(tree.distributions)
        self.repeats |= tree.repeats
        self.trees += 1

    def grow(self, nodes: int) -> list[dict[int, int]]:
        """Makes the tree, by the product of confidences; siblings that were drawn from one law stay in order."""
        where: list[dict[int, int]] = [{} for _ in range(self.trees)]
        probs_of: list[int] = []
        waiting: list[tuple[float, int, int, _Node]] = []
        count = 0

        def open_children(node: _Node, place: int, joint: float) -> None:
            nonlocal count
            for child in node.children:
                count += 1  # of equal ones the first
                heapq.heappush(waiting, (-joint * child.confidence, count, place, child))

        open_children(self.root, ROOT, 1.0)
        while waiting and len(probs_of) < nodes:
            joint, _, parent, node = heapq.heappop(waiting)
            place = len(probs_of)
            self.made.tokens.append(node.token)
            self.made.parents.append(parent)
            self.made.confidence.append(node.confidence)
            probs_of.append(node.distribution)
            for k, i in node.owners:
                where[k][i] = place
            open_children(node, place, -joint)
        if self.distributions:
            self.made = self.made._replace(
                distributions=self.distributions, probs_of=probs_of, repeats=self.repeats
            )
        return where

    def probe(self, tree: DraftTree, where: dict[int, int], nodes: int) -> None:
        """Appends the probes of a tree, all or none."""
        made, probes = self.made, range(tree.size, len(tree.tokens))
        rooted = all(
            parent in where or parent == ROOT or parent >= tree.size for parent in tree.parents[tree.size :]
        )
        if not probes or not rooted or len(made.tokens) + len(probes) > nodes:
            return
        for i in probes:
            where[i] = len(made.tokens)
            made.tokens.append(tree.tokens[i])
            made.parents.append(where.get(tree.parents[i], ROOT))
            made.confidence.append(tree.confidence[i])
        probs_of = [*made.probs_of, *[-1] * len(probes)] if made.probs_of else ()
        self.made = made._replace(probs_of=probs_of, probes=made.probes + len(probes))


def independent(tree: DraftTree) -> DraftTree:
    """The same tree with a law of its own for every draw, so that it may stand beside one with independent draws."""
    if tree.repeats or not tree.distributions:
        return tree
    distributions: list[Tensor] = []
    probs_of: list[int] = []
    left: dict[
        tuple[int, int], Tensor
    ] = {}  # several parents may have one law, and draw from it each for itself
    for token, parent, distribution in zip(tree.tokens, tree.parents, tree.probs_of):
        if distribution >= 0:
            distributions.append(left.get((parent, distribution), tree.distributions[distribution]))
            left[parent, distribution] = without(distributions[-1], token)
        probs_of.append(len(distributions) - 1 if distribution >= 0 else -1)
    return tree._replace(distributions=distributions, probs_of=probs_of, repeats=True)


def part(commit: Commit, own: Draft, where: Sequence[dict[int, int]], topk: int) -> Commit:
    """The commit as a drafter sees it whose draft was `own`: its nodes that were verified, in its own numbers, and all tokens.

    where[r][i]: the node of the verified tree that its node i was; those that are missing were dropped.
    """
    steps = []
    for step, tree, theirs in zip(commit.batch, own.trees, where):
        keep = sorted(theirs)
        mine = {theirs[i]: place for place, i in enumerate(keep)}
        nodes = [ROOT, *(theirs[i] for i in keep)] if step.topk and topk else []
        steps.append(
            replace(
                step,
                tree=tree if len(keep) == len(tree.tokens) else tree.only(keep),
                kept=keep,
                accepted=[mine[node] for node in step.accepted if node in mine],
                topk=[step.topk[1 + node][:topk] for node in nodes],
            )
        )
    return commit._replace(batch=Batch(steps, prefill=commit.batch.prefill))
