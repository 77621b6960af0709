"""Several drafters at once: their trees are merged into one, and the most probable nodes of all are kept.

Each drafter drafts within its own depth and size, and observes its own part of the tree as if it had
drafted alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from outrider import draft
from outrider.cache.pages import Cache
from outrider.cache.pool import Pool
from outrider.control.plan import Arm
from outrider.core.noise import mix
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs, RowStep
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, ROOT, Draft, DraftTree
from outrider.core.validate import Checked, Count, Kind, made_of, optional, whole
from outrider.draft.union.merge import Merged, merge
from outrider.drafting.base import Drafter, Storage, Target, TextDrafter
from outrider.errors import ConfigError

DEPTH = "num_speculative_tokens"
Factory = Callable[[Target], Drafter]


class RowDrafts(NamedTuple):
    """The trees that the drafters proposed for a row, by drafter, and the merged one."""

    trees: Sequence[DraftTree]
    merged: Merged


class Member(NamedTuple):
    """One of `drafters`: its method, the method's options, and its maximum depth (None: its default)."""

    method: type[Drafter]
    options: Any
    depth: int | None


def parse(config: Any) -> Member:
    """Parse one of `drafters`.  Raises ConfigError."""
    if not isinstance(config, Mapping) or not {"method", "model"} & config.keys():
        raise ConfigError(
            f"each of 'drafters' must be a dict with a 'method' or a draft 'model', got {config!r}."
        )
    rest = dict(config)
    name, depth = rest.pop("method", None), rest.pop(DEPTH, None)
    name = draft.detect(rest["model"], rest.get("revision")) if name is None else name
    method = draft.method(name)
    (own,) = made_of(rest, [method.Options], f"'drafters', method {name!r}", ("method", DEPTH))
    optional(whole(1)).check(depth, DEPTH)
    return Member(method, own, depth)


LISTED = Kind("a list of dicts with a 'method'", lambda value: isinstance(value, (list, tuple)))


class Union(Drafter):
    demo: ClassVar = {
        "n-gram with recycling": {"drafters": [{"method": "ngram"}, {"method": "recycle"}], "nodes": 8}
    }

    @dataclass(frozen=True)
    class Options(Checked):
        """drafters: dicts with "method", "num_speculative_tokens" and the method's own keys.
        nodes: maximum size of the merged tree; None means no limit but those of the drafters.
        """

        drafters: Annotated[Sequence[Mapping[str, Any]], LISTED] = ()
        nodes: Count | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for config in self.drafters:
                parse(config)

    def __init__(self, options: Any, target: Target, factories: Sequence[Factory] = ()) -> None:
        """Make the drafters of `factories`, then those of the options, each with its own RNG streams."""
        super().__init__(options, target)
        self.drafters: list[Drafter] = []
        self.depths: list[int] = []
        for factory in factories:
            self._add(factory)
        for method, own, depth in map(parse, options.drafters):
            self._add(partial(method.create, own), depth)
        if not self.drafters:
            raise ConfigError("the method needs 'drafters', a list of dicts with a 'method'.")
        self.depth = max(self.depths)
        self.needs = reduce(or_, (drafter.needs for drafter in self.drafters), Needs())
        self.proposed: dict[Row, RowDrafts] = {}  # of batches with drafts that are not observed yet

    def _add(self, factory: Factory, depth: int | None = None) -> None:
        """Add a drafter.  Mixing the number keeps the streams of nested drafters apart, too."""
        stream_id = mix(self.target.stream_id + len(self.drafters) + 1)
        self.drafters.append(factory(replace(self.target, stream_id=stream_id)))
        self.depths.append(depth or self.drafters[-1].depth)

    @property
    def sources(self) -> Sequence[str]:
        return [name for drafter in self.drafters for name in drafter.sources]

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """All methods that are no mixes themselves."""
        single = [method for _, method in sorted(draft.methods().items()) if not issubclass(method, Union)]
        return cls(cls.Options(), target, [method.example for method in single])

    @property
    def memory(self) -> list[Any]:  # type: ignore[override]
        return [drafter.memory for drafter in self.drafters]

    @memory.setter
    def memory(self, values: list[Any]) -> None:
        for drafter, value in zip(self.drafters, values):
            drafter.memory = value

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return sum((drafter.footprint(device) for drafter in self.drafters), Counter())

    def state_bytes(self, device: torch.device) -> Counter[torch.device]:
        return sum((drafter.state_bytes(device) for drafter in self.drafters), Counter())

    def allocate(self, slots: int, pool: Pool) -> Storage:
        pools, caches = list[Pool](), list[Cache]()
        for drafter in self.drafters:
            storage = drafter.allocate(slots, pool)
            pools += storage.pools
            caches += storage.caches
        return Storage(pools, caches)

    def reserve_states(self, rows: int) -> None:
        for drafter in self.drafters:
            drafter.reserve_states(rows)

    def arms(self, depth: int) -> list[Arm]:
        pairs = zip(self.drafters, self.depths)
        return [arm for drafter, own in pairs for arm in Drafter.arms(drafter, min(depth, own))]

    def size(self, depth: int) -> int:
        return self._capped(sum(self._sizes(depth)))

    def _capped(self, nodes: int) -> int:
        return nodes if self.options.nodes is None else min(nodes, self.options.nodes)

    def _sizes(self, depth: int) -> list[int]:
        return [drafter.size(min(depth, own)) for drafter, own in zip(self.drafters, self.depths)]

    def propose(self, batch: Batch) -> Draft:
        if not sum([step.budget.nodes for step in batch]):
            for drafter in self.drafters:
                if not isinstance(drafter, TextDrafter):
                    drafter.propose(batch)  # it may compute what was committed
            return Draft([EMPTY_TREE] * len(batch))
        mix_budgets, drafts = batch.mix_budgets, dict[int, Draft]()
        for i in range(len(self.drafters)) if mix_budgets is None else mix_budgets.order:
            if mix_budgets is None:
                drafts[i] = self._ask(i, batch)
            else:
                budgets = mix_budgets.budgets_of(i, batch, drafts)
                drafts[i] = self.drafters[i].propose(batch.within(budgets))
        return self._merge(batch, [drafts[i] for i in range(len(self.drafters))])

    def _ask(self, i: int, batch: Batch) -> Draft:
        """The draft of drafter i, within its own depth and size."""
        drafter, depth = self.drafters[i], self.depths[i]
        own = [
            step.budget.within(depth=depth) if step.row.drafts_with(drafter.sources) else NO_BUDGET
            for step in batch
        ]
        budgets = [budget.within(nodes=drafter.size(budget.depth)) for budget in own]
        return drafter.propose(batch.within(budgets))

    def _merge(self, batch: Batch, drafts: Sequence[Draft]) -> Draft:
        """The draft of merged trees.  Keeps what each drafter proposed until it is observed."""
        if not any(tree.tokens for own in drafts for tree in own.trees):
            return Draft([EMPTY_TREE] * len(batch))
        first_sources = [0, *itertools.accumulate(len(drafter.sources) for drafter in self.drafters)]
        merged_trees: list[DraftTree] = []
        for r, step in enumerate(batch):
            trees = [own.trees[r] for own in drafts]
            merged = merge(trees, step.budget.nodes, first_sources)
            self.proposed[step.row] = RowDrafts(trees, merged)
            merged_trees.append(merged.tree)
        return Draft(merged_trees)

    def observe(self, commit: Commit) -> None:
        proposed: list[RowDrafts | None] = [None] * len(commit.batch)
        if self.proposed:
            proposed = [self.proposed.pop(step.row, None) for step in commit.batch]
        plain = not any(proposed)
        for k, drafter in enumerate(self.drafters):
            if plain and not drafter.sees_plain:
                continue
            if plain and drafter.needs.topk == self.needs.topk:
                drafter.observe(commit)  # of no drafts every drafter sees the same
                continue
            steps = [self._part(k, step, drafts) for step, drafts in zip(commit.batch, proposed)]
            drafter.observe(commit._replace(batch=Batch(steps, prefill=commit.batch.prefill)))

    def _part(self, k: int, step: RowStep, drafts: RowDrafts | None) -> RowStep:
        """A row's step as drafter k sees it."""
        tree: DraftTree = EMPTY_TREE
        verified: Mapping[int, int] = {}
        if drafts is not None:
            tree, verified = drafts.trees[k], after_trim(step, drafts.merged.node_of[k])
        return part(step, tree, verified, self.drafters[k].needs.topk)

    def forget(self, row: Row, reason: str) -> None:
        self.proposed.pop(row, None)
        for drafter in self.drafters:
            drafter.forget(row, reason)

    def behind(self, row: Row) -> int:
        return max(drafter.behind(row) for drafter in self.drafters)

    def filled(self, row: Row) -> int:
        return min([drafter.filled(row) for drafter in self.drafters])


def after_trim(step: RowStep, node_of: Mapping[int, int]) -> Mapping[int, int]:
    """`node_of`, from nodes of a part to nodes of the proposed tree, with the numbers after trimming."""
    if step.kept is None:
        return node_of
    place = {node: now for now, node in enumerate(step.kept)}
    return {i: place[node] for i, node in node_of.items() if node in place}


def part(step: RowStep, tree: DraftTree, verified: Mapping[int, int], topk: int) -> RowStep:
    """A row's step as the drafter of `tree` sees it, in its own node numbers.

    verified: node of `tree` -> node of the verified tree, for those that were neither dropped nor trimmed.
    """
    kept = sorted(verified)
    own_number = {verified[i]: place for place, i in enumerate(kept)}
    nodes = [ROOT, *(verified[i] for i in kept)] if step.topk and topk else []
    return RowStep(
        step.row,
        step.start,
        step.known,
        step.emits,
        step.budget,
        tree=tree if len(kept) == len(tree.tokens) else tree.only(kept),
        kept=kept,
        accepted=[own_number[node] for node in step.accepted if node in own_number],
        emitted=step.emitted,
        topk=[step.topk[1 + node][:topk] for node in nodes],
        top_logits=[step.top_logits[1 + node][:topk] for node in nodes] if step.top_logits else [],
    )
