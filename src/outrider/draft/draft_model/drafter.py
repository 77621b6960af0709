"""A draft model at the slots of the target: catching up, one call for chains, level by level for trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.noise import stream_of
from outrider.core.step_input import StepInput
from outrider.core.types import EMPTY_TREE, ROOT, Batch, Budget, Commit, Draft, DraftTree, Row
from outrider.draft.draft_model.intersect import Translated, common
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.draft.draft_model.staged import Staged
from outrider.drafting import stop
from outrider.drafting.base import Drafter, Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import SELF, View, Window
from outrider.drafting.vocab.mismatch import fits
from outrider.errors import OutriderError
from outrider.models import load as models
from outrider.models.base import Model
from outrider.models.placement import pick_device, place
from outrider.sampling.sampler import Sampler


class Start(NamedTuple):
    """Where the guesses of one row begin."""

    r: int  # of the batch
    budget: Budget
    at: int  # row of the plan
    view: View


class ModelDrafter(Drafter):
    demo: ClassVar = {
        "draft model, chain": {"num_speculative_tokens": 2},
        "draft model, tree": {"num_speculative_tokens": 2, "siblings": 2},
    }

    Options = DraftModelOptions
    decoder: Model | Translated
    stretch = 1  # tokens of ours for one of the target's, at most

    def __init__(self, options: DraftModelOptions, target: Target) -> None:
        super().__init__(options, target)
        self.window = Window.of(options.draft_kv_budget, options.draft_kv_sink)
        self.itself = options.model == SELF
        self.synced: dict[Row, int] = {}  # positions of a row that have K/V in a pool of our own
        self.reading: list[tuple[Row, int]] = []  # and will have when the forwards of this step are done
        if self.itself:
            self.decoder, self.sampler, self.vocabulary, self.context = (
                target.decoder,
                target.sampler,
                target.vocabulary,
                target.max_len,
            )
        else:
            self._load(options, target)
        self.stop = stop.Stop(options)
        self.depth = stop.DEEPEST if self.stop.active else self.depth
        self.staged = None if options.drafter is None else Staged(options.drafter, self)

    def _load(self, options: DraftModelOptions, target: Target) -> None:
        checkpoint = self.checkpoint = Checkpoint.open(
            options.model, options.revision, target.checkpoint.trust_remote_code
        )
        if options.vocab_mismatch == "refuse":
            fits(checkpoint, target.checkpoint)
        shared = common(checkpoint, target.checkpoint) if options.vocab_mismatch == "intersect" else None
        self.vocabulary = min(checkpoint.spec.vocabulary, target.vocabulary)
        self.context = min(checkpoint.spec.context, self.stretch * target.max_len)
        device = (
            target.decoder.device
            if options.draft_device == "auto"
            else pick_device(options.draft_device, "draft_device")
        )
        where = place(checkpoint.spec.layers, device, options.draft_gpu_layers, "draft_gpu_layers")
        dtype = checkpoint.dtype(options.draft_dtype, device, "draft_dtype")
        own = models.load(
            checkpoint,
            dtype,
            device,
            self.context,
            options.quantization,
            target.decoder.kv_cache_dtype,
            where,
        )
        self.decoder = own if shared is None else Translated(own, shared)
        if shared:
            self.vocabulary = target.vocabulary
        self.sampler = (
            target.sampler if self.decoder.device == target.decoder.device else Sampler(self.decoder.kernels)
        )
        self.slot_bytes = self.decoder.slot_bytes

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter() if self.itself else self.decoder.footprint

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The target drafts for itself, two siblings a level: right often enough to walk deep into trees."""
        return cls(cls.Options(model=target.checkpoint.name, siblings=2), target)

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        self.pool = pool if self.itself else self.decoder.pool(slots)
        return [] if self.itself else [self.pool]

    def size(self, depth: int) -> int:
        siblings: int = self.options.siblings
        return depth * siblings

    def propose(self, batch: Batch) -> Draft:
        self.reading.clear()
        draft = self._proposed(batch)
        for row, end in self.reading:
            self.synced[row] = end
        return draft

    def _proposed(self, batch: Batch) -> Draft:
        step_input, starts = self._catch_up(batch)
        for start in starts if self.stop.active else ():
            self.stop.begin(batch[start.r].row, start.budget.depth)
        trees = [EMPTY_TREE] * len(batch)
        if not step_input.length:
            return Draft(trees)
        if not starts:
            self.decoder.forward(step_input.build(), self.pool)
            return Draft(trees)
        if self._in_one_call(batch, starts) and self._chains(step_input, batch, starts, trees):
            return Draft(trees)
        repeats = self.options.sibling_draws == "independent"
        grown = {
            s.r: Tree(
                batch[s.r].row,
                batch[s.r].end,
                s.budget,
                self.options.siblings,
                s.view,
                repeats,
                self.stream_id,
            )
            for s in starts
        }
        tips = [(tree, start.at) for tree, start in zip(grown.values(), starts)]
        if self.staged is not None:
            self.staged.grow(step_input, tips)
        else:
            self._levels(step_input, tips)
        for r, tree in grown.items():
            trees[r] = tree.draft_tree
        return Draft(trees)

    def _catch_up(self, batch: Batch) -> tuple[StepInput, list[Start]]:
        """The rows of the first forward: everything that became certain since our last look; and where the guesses begin.
        A row that outgrows the draft's own context is not drafted for."""
        step_input = StepInput(self.window.sink)
        starts: list[Start] = []
        for r, step in enumerate(batch):
            row, start, end, budget = step.row, step.start, step.end, self.stop.limit(step)
            done = start if self.itself else min(self.synced.setdefault(row, start), start)  # a step may fail
            depth = min(budget.depth, self.context - end) if budget.nodes else 0
            if end > self.context or not self._worthwhile(depth, step.known):
                continue  # a row that does not guess catches up with single tokens when it does
            assert row.table is not None
            adapter = row.adapter if self.itself else None
            view = self.window.read(
                step_input, row.table.slots, done, self._readable(row.tokens[done:end]), budget.nodes, adapter
            )
            if not self.itself:
                self.reading.append((row, end))
            if depth > 0:
                starts.append(Start(r, budget.within(depth=depth), step_input.length - 1, view))
        return step_input, starts

    def _worthwhile(self, depth: int, known: int) -> bool:
        """Whether a row takes part.  The chunk of a prompt does, even if nothing is guessed, unless the target is about to compute it
        in the pool where the draft would look."""
        return known == 1 and depth > 0 if self.itself else known > 1 or depth > 0

    def _in_one_call(self, batch: Batch, starts: list[Start]) -> bool:
        """Whether there is one guess a level that is chosen, and neither processor nor adapter to ask in between."""
        if self.options.siblings > 1 or self.staged is not None:
            return False
        for start in starts:
            row = batch[start.r].row
            if start.view.adapter or row.processors or self.draws(row):
                return False
        return True

    def _chains(
        self, step_input: StepInput, batch: Batch, starts: list[Start], trees: list[DraftTree]
    ) -> bool:
        """All levels at once, into `trees`; False, and nothing done, where the kernels cannot."""
        chains = []
        for start in starts:
            row = batch[start.r].row
            chains.append(
                Chain(start.at, start.budget.depth, row.distribution, stream_of(row.seed, row.index))
            )
        found = self.decoder.chain(
            step_input.build(), self.pool, chains, self.vocabulary, self.stop.stop_rule
        )
        if found is None:
            return False
        for start, tokens in zip(starts, found[0]):
            trees[start.r] = DraftTree.chain(tokens, RANK_CONFIDENCE[:1] * len(tokens))
        for start, features in zip(starts, found[1]):
            self.stop.note(batch[start.r].row, features)
        return True

    def _readable(self, tokens: list[int]) -> list[int]:
        """Ids that only the target has are read as id 0: a guess may be bad, never out of bounds."""
        if self.vocabulary == self.target.vocabulary:
            return tokens
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _levels(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Level after level, as long as one of the trees grows; each hangs from a row of the plan."""
        at: Sequence[int] = [row for _, row in tips]
        frontier = [(tree, ROOT) for tree, _ in tips]
        while True:
            logits = self.look(step_input, at)
            nodes: dict[int, tuple[Tree, list[tuple[int, int]]]] = {}
            for i, (tree, node) in enumerate(frontier):
                nodes.setdefault(id(tree), (tree, []))[1].append((node, i))
            for tree, places in nodes.values():
                self.extend(tree, places, logits)
            step_input, frontier = StepInput(self.window.sink), []
            for tree, _ in nodes.values():
                if tree.growing:
                    tree.add_to(step_input)
                    frontier += [(tree, node) for node in tree.frontier]
            if not frontier:
                return
            at = range(len(frontier))

    def look(self, step_input: StepInput, rows: Sequence[int]) -> Tensor:
        """One forward; the logits [len(rows), vocabulary] behind these of its rows."""
        x = self.decoder.forward(step_input.build(), self.pool)
        logits = self.decoder.logits(x, list(rows))
        return logits[:, : self.vocabulary] if logits.shape[1] > self.vocabulary else logits

    def extend(self, tree: Tree, places: list[tuple[int, int]], logits: Tensor) -> None:
        """The next level of a tree: children of (node, row of the logits behind it)."""
        if self.draws(tree.row):
            tree.draw(
                {
                    node: distribution
                    for node, i in places
                    if (distribution := self._distribution(tree, node, logits, i)) is not None
                }
            )
        else:
            tree.choose([child for node, i in places for child in self._best(tree, node, logits, i)])
        self.stop.prune(tree, dict(places), self.sampler, logits)

    def _best(self, tree: Tree, node: int, logits: Tensor, at: int) -> list[tuple[int, int, float]]:
        """The best (node, token, probability) after a node."""
        ranked = tree.row.distribution.temperature > 0 or tree.siblings == 1
        tokens, shares = self.sampler.top(
            tree.row, tree.path_tokens(node), logits, tree.siblings, not ranked, at
        )
        return [(node, token, p) for token, p in zip(tokens, RANK_CONFIDENCE if ranked else shares)]

    def _distribution(self, tree: Tree, node: int, logits: Tensor, at: int) -> Tensor | None:
        """q after a node, over the target's vocabulary, with the request's own parameters; None where it fails."""
        try:
            distribution = self.sampler.distribution(tree.row, tree.path_tokens(node), logits, at)
        except OutriderError:  # the target's own law will say why
            return None
        return torch.nn.functional.pad(distribution, (0, self.target.vocabulary - len(distribution)))

    @property
    def memory(self) -> Any:
        kept = self.stop.memory if self.stop.learns else None, self.staged and self.staged.drafter.memory
        return kept if kept != (None, None) else None

    @memory.setter
    def memory(self, kept: Any) -> None:
        learned, inner = kept or (None, None)
        if learned is not None:
            self.stop.memory = learned
        if self.staged is not None:
            self.staged.drafter.memory = inner

    def observe(self, commit: Commit) -> None:
        if self.stop.active:
            self.stop.observe(commit)
        if self.staged is not None:
            self.staged.observe(commit)

    def forget(self, row: Row, reason: str) -> None:
        self.synced.pop(row, None)
        self.stop.forget(row)
        if self.staged is not None:
            self.staged.forget(row, reason)

    def filled(self, row: Row) -> int:
        return min(row.computed, self.synced.get(row, row.computed))
