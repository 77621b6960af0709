"""A cheaper drafter for the draft model: staged speculation (Spector and Ré 2023, arXiv 2308.04623).

The draft model computes the cheaper drafter's tokens in the forward that it needs anyway.  It picks its own
token after each, with the noise of that position, and continues along the nodes that hold its picks.  So its
chain is the one that it would have drafted alone, in fewer forwards.

    forward 1    known known │ a  b  c  d        tokens of the cheaper drafter; the draft model picks a b x
    forward 2                │       x  y  z     … and continues after x, with new ones

Where the cheaper drafter has no token for any chain, one call of the backend completes the chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from outrider import draft
from outrider.backends.base import Chain, Chains
from outrider.cache.pool import Pool
from outrider.control import fixed
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, DraftTree
from outrider.core.validate import made_of
from outrider.drafting.base import Target, TextDrafter
from outrider.drafting.stop import Stop
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import Window
from outrider.errors import ConfigError
from outrider.sampling.sampler import Sampler


def create(config: Mapping[str, Any], target: Target) -> tuple[TextDrafter, fixed.Options]:
    """The drafter of `config`, a speculative_config, and the limits of its trees.  Raises ConfigError."""
    rest = dict(config)
    able = ", ".join(name for name, kind in sorted(draft.methods().items()) if issubclass(kind, TextDrafter))
    if "method" not in rest:
        raise ConfigError(f"drafter needs a 'method', one of {able}: got {rest!r}.")
    method = draft.method(rest.pop("method"))
    if not issubclass(method, TextDrafter):
        raise ConfigError(
            f"drafter {config['method']!r} cannot speed up a draft model: it does not draft from the text "
            f"alone.  Choose one of {able}."
        )
    where = f"'drafter', method {config['method']!r}"
    control, own = made_of(rest, [fixed.Options, method.Options], where, ("method",))
    drafter = method.create(own, target)
    assert isinstance(drafter, TextDrafter)
    return drafter, control


class StagedHost(Protocol):
    """Interface of the draft model to its staged drafter."""

    target: Target
    vocabulary: int
    pool: Pool
    sampler: Sampler
    window: Window
    decoder: Any
    stop: Stop

    def samples(self, row: Row) -> bool: ...
    def fuses(self, chains: Sequence[Tree]) -> bool: ...
    def logits_after(self, step_input: StepInput, rows: Sequence[int]) -> Tensor: ...
    def extend(self, tree: Tree, frontier: list[tuple[int, int]], logits: Tensor) -> None: ...


@dataclass
class Stage:
    """One chain in one forward.

    tree: the draft model's chain.  length: its number of tokens before this forward.
    draft_tree: the cheaper drafter's tree after it.
    row: row of the logits after the chain.  first_row: that after node 0 of `draft_tree`, the others
        follow.
    """

    tree: Tree
    length: int
    draft_tree: DraftTree
    row: int
    first_row: int


class Staged:
    """Cheaper drafter of a draft model.  forwards: of the draft model, so far."""

    def __init__(self, config: Mapping[str, Any], host: StagedHost) -> None:
        self.drafter, options = create(config, host.target)
        self.host, self.forwards = host, 0
        self.control = fixed.FixedController(options, self.drafter.depth, self.drafter.size, host.vocabulary)

    def grow(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Grow chains to their full length.  tips: each chain, and the row of the forward that it follows."""
        while tips:
            stages, rows = self._stages(step_input, tips)
            drafted = any(stage.draft_tree.tokens for stage in stages)
            if not drafted and not self.drafter.needs.topk and self._finish(step_input, tips):
                self.forwards += max(len(stage.tree.tokens) - stage.length for stage in stages)
                return
            logits = self.host.logits_after(step_input, rows)
            self.forwards += 1
            paths = [self._walk(stage, logits) for stage in stages]
            self._move(stages, paths)
            self._observe_stages(stages, paths, logits)
            step_input, tips = StepInput(self.host.window.sink), []
            for stage in stages:
                if stage.tree.growing:
                    stage.tree.add_to(step_input)
                    tips.append((stage.tree, step_input.length - 1))

    def _finish(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> bool:
        """Complete chains in one call of the backend.  Returns False, without effect, where it cannot."""
        host, chains = self.host, list[Chain]()
        sampled = any(host.samples(tree.row) for tree, _ in tips)
        if sampled or host.stop.active or not host.fuses([tree for tree, _ in tips]):
            return False
        for tree, at in tips:
            row, depth = tree.row, tree.budget.depth - len(tree.tokens)
            chains.append(Chain(at, depth, row.distribution, row.stream))
        found, _ = host.decoder.draft_chain(step_input.build(), host.pool, Chains(chains, host.vocabulary))
        for (tree, _), tokens in zip(tips, found):
            for token in tokens:
                tree.choose([(tree.frontier[0], token, RANK_CONFIDENCE[0])])
        return True

    def _stages(
        self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]
    ) -> tuple[list[Stage], list[int]]:
        """Append the cheaper drafter's nodes after each tip to the forward.

        Returns the stages, and the rows of the forward whose logits they need: those of all tips, then those
        of the nodes.
        """
        stages, rows = [], [row for _, row in tips]
        for i, (tree, _) in enumerate(tips):
            draft_tree = self._propose(tree, len(tips))
            stages.append(Stage(tree, len(tree.tokens), draft_tree, i, len(rows)))
            base = tree.base + len(tree.tokens)
            paths: dict[int, list[int]] = {ROOT: []}
            for node, (token, parent) in enumerate(zip(draft_tree.tokens, draft_tree.parents)):
                paths[node] = [*paths[parent], node]
                rows.append(step_input.length)
                tree.view.node(step_input, base, paths[node], token)
        return stages, rows

    def _propose(self, tree: Tree, rows: int) -> DraftTree:
        """The cheaper drafter's tree, one level short: after its last node the draft model picks a token."""
        length = len(tree.tokens)
        depth = min(tree.budget.depth - length - 1, self.control.depth_for(rows))
        nodes = min(tree.budget.nodes - length, self.control.size(depth)) if depth > 0 else 0
        if nodes <= 0:
            return EMPTY_TREE
        budget = Budget(depth, nodes)
        draft_tree = self.drafter.after(tree.row, tree.tokens, budget)
        kept = self.control.kept(draft_tree, budget)
        return draft_tree if len(kept) == len(draft_tree.tokens) else draft_tree.only(kept)

    def _walk(self, stage: Stage, logits: Tensor) -> list[int]:
        """Extend the chain by the draft model's picks; the nodes that hold them, up to one without a node."""
        tree, draft_tree, row = stage.tree, stage.draft_tree, stage.row
        child = {pair: node for node, pair in enumerate(zip(draft_tree.parents, draft_tree.tokens))}
        path: list[int] = []
        while True:
            length = len(tree.tokens)
            self.host.extend(tree, [(tree.frontier[0], row)], logits)
            if len(tree.tokens) == length:
                return path
            node = child.get((path[-1] if path else ROOT, tree.tokens[-1]))
            if node is None:
                return path
            path.append(node)
            row = stage.first_row + node
            if not tree.growing:
                return path

    def _move(self, stages: Sequence[Stage], paths: Sequence[list[int]]) -> None:
        """Move K/V of the nodes on the paths to the slots of the chain."""
        sources, targets = [], []
        for stage, path in zip(stages, paths):
            view = stage.tree.view
            slots, base = view.slots, stage.tree.base + stage.length - view.shift
            for place, node in enumerate(path):
                if node != place:
                    sources.append(slots[base + node])
                    targets.append(slots[base + place])
        if sources:
            self.host.pool.move(sources, targets)

    def _observe_stages(self, stages: Sequence[Stage], paths: Sequence[list[int]], logits: Tensor) -> None:
        """Report the draft model's picks to the cheaper drafter, for trees right after committed tokens."""
        first = [(stage, path) for stage, path in zip(stages, paths) if not stage.length]
        if not first:
            return
        batch = Batch()
        for stage, path in first:
            step = RowStep(stage.tree.row, stage.tree.base - 1, 1, tree=stage.draft_tree)
            step.accepted, step.emitted = path, stage.tree.tokens[: len(path) + 1]
            if k := self.drafter.needs.topk:
                nodes = range(stage.first_row, stage.first_row + len(stage.draft_tree.tokens))
                own = logits[[stage.row, *nodes]]
                step.topk = self.host.sampler.best(own, k)
                if self.drafter.needs.logits:
                    step.top_logits = self.host.sampler.logits_of(own, step.topk)
            batch.append(step)
        self.drafter.observe(Commit(batch))

    def observe(self, commit: Commit) -> None:
        """Pass on what was committed, without its trees, which are not the cheaper drafter's.

        What the target emitted does not judge that drafter: the draft model's picks did.
        """
        steps = [RowStep(step.row, step.start, step.known, step.emits, step.budget) for step in commit.batch]
        self.drafter.observe(commit._replace(batch=Batch(steps)))

    def forget(self, row: Row, reason: str) -> None:
        self.drafter.forget(row, reason)
