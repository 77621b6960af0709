"""A draft model that is sped up itself: something cheaper guesses ahead of it (staged speculation, Spector and Ré 2023, arXiv 2308.04623).

The draft model looks at the cheaper guesses in the forward that it needs anyway, picks its own token at each, with the noise of that
position, and walks on where a guess holds it.  So its chain is the one that it would have made alone, in fewer forwards.

    forward 1    known known │ a  b  c  d        guesses of the cheaper drafter; the draft model says a b x
    forward 2                │       x  y  z     … and looks further behind x, with new guesses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor

from outrider.cache.pool import Pool
from outrider.control import fixed
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import Window
from outrider.errors import ConfigError, unknown
from outrider.sampling.sampler import Sampler


def opened(config: Mapping[str, Any], target: Target) -> tuple[Drafter, fixed.Options]:
    """The drafter that `config`, a speculative_config of its own, asks for, and how much it may guess."""
    from outrider import draft

    given = dict(config)
    able = ", ".join(
        name for name, kind in sorted(draft.methods().items()) if kind.after is not Drafter.after
    )
    if "method" not in given:
        raise ConfigError(f"drafter needs a 'method', one of {able}: got {given!r}.")
    method = draft.method(given.pop("method"))
    if method.after is Drafter.after:
        raise ConfigError(
            f"drafter {config['method']!r} cannot speed up a draft model: it does not guess from the text alone.  Choose one of {able}."
        )
    parts = []
    for kind in (fixed.Options, method.Options):
        names = {f.name for f in fields(kind)}
        parts.append(kind(**{key: given.pop(key) for key in list(given) if key in names}))
    for key in given:
        known = {"method"}.union(
            *({f.name for f in fields(kind)} for kind in (fixed.Options, method.Options))
        )
        raise ConfigError(unknown("key", key, known, f"'drafter', method {config['method']!r}"))
    return method.create(parts[1], target), parts[0]


class StagedHost(Protocol):
    """What a draft model offers to the stage below it."""

    target: Target
    vocabulary: int
    pool: Pool
    sampler: Sampler
    window: Window

    def look(self, step_input: StepInput, rows: Sequence[int]) -> Tensor: ...
    def extend(self, tree: Tree, places: list[tuple[int, int]], logits: Tensor) -> None: ...


@dataclass
class Stage:
    """A chain in one forward.  The logits behind it are in row `at`, those behind guess i of `draft_tree` in row first + i; it had
    `before` tokens."""

    tree: Tree
    at: int
    draft_tree: DraftTree
    first: int
    before: int


class Staged:
    """forwards: of the draft model, so far."""

    def __init__(self, config: Mapping[str, Any], host: StagedHost) -> None:
        self.drafter, options = opened(config, host.target)
        self.host, self.forwards = host, 0
        self.control = fixed.FixedController(options, self.drafter.depth, self.drafter.size, host.vocabulary)

    def grow(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Makes the chains of `tips` as long as they may be; the tip of each is a row of the plan."""
        while tips:
            stages = self._stages(step_input, tips)
            rows = [at for _, at in tips]
            for stage in stages:
                count = len(stage.draft_tree.tokens)
                rows.extend(range(stage.first, stage.first + count))
                stage.first = len(rows) - count
            logits = self.host.look(step_input, rows)
            self.forwards += 1
            paths = [self._walk(stage, logits) for stage in stages]
            self._settle(stages, paths)
            self._teach(stages, paths, logits)
            step_input, growing = (
                StepInput(self.host.window.sink),
                [stage.tree for stage in stages if stage.tree.growing],
            )
            tips = []
            for tree in growing:
                tree.add_to(step_input)
                tips.append((tree, step_input.length - 1))

    def _stages(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> list[Stage]:
        """The guesses behind each tip, put into the plan behind all tips; `first` is a row of the plan yet."""
        stages = []
        for i, (tree, _) in enumerate(tips):
            base = tree.base + len(tree.tokens)
            draft_tree, first = self._guess(tree, len(tips)), step_input.length
            paths: dict[int, list[int]] = {ROOT: []}
            for node, (token, parent) in enumerate(zip(draft_tree.tokens, draft_tree.parents)):
                paths[node] = [*paths[parent], node]
                tree.view.node(step_input, base, paths[node], token)
            stages.append(Stage(tree, i, draft_tree, first, len(tree.tokens)))
        return stages

    def _guess(self, tree: Tree, rows: int) -> DraftTree:
        """One level less than there is room for: behind the last guess the draft model picks a token itself."""
        said = tree.tokens
        depth = min(tree.budget.depth - len(said) - 1, self.control.depth_for(rows))
        nodes = min(tree.budget.nodes - len(said), self.control.size(depth)) if depth > 0 else 0
        if nodes <= 0:
            return EMPTY_TREE
        budget = Budget(depth, nodes)
        draft_tree = self.drafter.after(tree.row, said, budget)
        return draft_tree.only(self.control.kept(draft_tree, budget))

    def _walk(self, stage: Stage, logits: Tensor) -> list[int]:
        """Lets the chain grow along the guesses that hold what the draft model says; the nodes of these."""
        tree, draft_tree, at = stage.tree, stage.draft_tree, stage.at
        child = {pair: node for node, pair in enumerate(zip(draft_tree.parents, draft_tree.tokens))}
        path: list[int] = []
        while True:
            before = len(tree.tokens)
            self.host.extend(tree, [(tree.frontier[0], at)], logits)
            held = (
                child.get((path[-1] if path else ROOT, tree.tokens[-1]))
                if len(tree.tokens) > before
                else None
            )
            if held is None:
                return path
            path.append(held)
            at = stage.first + held
            if not tree.growing:
                return path

    def _settle(self, stages: Sequence[Stage], paths: Sequence[list[int]]) -> None:
        """Moves the K/V of the guesses that were right to where the chain's own would be."""
        sources, targets = [], []
        for stage, path in zip(stages, paths):
            view = stage.tree.view
            slots, base = view.slots, stage.tree.base + stage.before - view.shift
            for place, node in enumerate(path):
                if node != place:
                    sources.append(slots[base + node])
                    targets.append(slots[base + place])
        if sources:
            self.host.pool.move(sources, targets)

    def _teach(self, stages: Sequence[Stage], paths: Sequence[list[int]], logits: Tensor) -> None:
        """What became of the guesses that stood directly behind what is certain."""
        taught = [(stage, path) for stage, path in zip(stages, paths) if not stage.before]
        if not taught:
            return
        batch = Batch()
        for stage, path in taught:
            step = RowStep(stage.tree.row, stage.tree.base - 1, 1, tree=stage.draft_tree)
            step.accepted, step.emitted = path, stage.tree.tokens[: len(path) + 1]
            if wanted := self.drafter.needs.topk:
                seen = [stage.at, *range(stage.first, stage.first + len(stage.draft_tree.tokens))]
                step.topk = self.host.sampler.best(logits[seen], wanted)
            batch.steps.append(step)
        self.drafter.observe(Commit(batch))

    def observe(self, commit: Commit) -> None:
        """What became certain; the trees of the commit are none of its drafter's."""
        blank = [replace(step, tree=EMPTY_TREE, kept=None, accepted=[], topk=[]) for step in commit.batch]
        self.drafter.observe(commit._replace(batch=Batch(blank)))

    def forget(self, row: Row, reason: str) -> None:
        self.drafter.forget(row, reason)
