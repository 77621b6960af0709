"""A draft model at the target's slots: catch-up, then one call for chains or one forward for each depth of
trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Chain, Chains
from outrider.cache.catch_up import TokenCatchUp
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, ROOT, Draft, DraftTree
from outrider.draft.draft_model.first import FirstForward, Lag, Start
from outrider.draft.draft_model.intersect import TranslatedModel, shared_tokens
from outrider.draft.draft_model.loading import load_draft
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.draft.draft_model.staged import Staged
from outrider.drafting import stop
from outrider.drafting.base import Drafter, Storage, Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE, chain_tree
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import SELF, View, Window
from outrider.drafting.vocab.mismatch import fits
from outrider.models.base import Model
from outrider.sampling.sampler import Sampler


class ModelDrafter(Drafter):
    """A language model as drafter.  catch_up: of its pool.  max_expansion: its tokens a target token."""

    demo: ClassVar = {
        "draft model, chain": {"num_speculative_tokens": 2},
        "draft model, tree": {"num_speculative_tokens": 2, "siblings": 2},
    }
    Options = DraftModelOptions
    decoder: Model | TranslatedModel
    max_expansion = 1
    computes_prompts = True

    def __init__(self, options: DraftModelOptions, target: Target) -> None:
        super().__init__(options, target)
        self.window = Window.of(options.draft_kv_budget, options.draft_kv_sink)
        self.itself = options.model == SELF
        self.catch_up = TokenCatchUp()
        self.waiting: set[Row] = set()  # rows that the last forward had too little room for
        if self.itself:
            self.decoder, self.sampler = target.decoder, target.sampler
            self.vocabulary, self.context = target.vocabulary, target.max_len
        else:
            self._load(options, target)
        self.stop = stop.Stop(options)
        self.depth = stop.MAX_DEPTH if self.stop.active else self.depth
        self.staged = None if options.drafter is None else Staged(options.drafter, self)
        self.sees_plain = self.stop.active or self.staged is not None
        # Rules that judge samples need lengths that no sampled token decides.  On a GPU a chain would be read
        # after every token.
        others = self.staged is not None or self.stop.active or target.needs_probs
        self.heeds_floors = self.decoder.device.type == "cpu" and not others

    def _load(self, options: DraftModelOptions, target: Target) -> None:
        """Load the weights, check the vocabularies, and set vocabulary, context, decoder and sampler."""
        trust = target.checkpoint.trust_remote_code
        checkpoint = self.checkpoint = Checkpoint.open(options.model, options.revision, trust)
        if options.vocab_mismatch == "refuse":
            fits(checkpoint, target.checkpoint)
        self.context = min(checkpoint.spec.context, self.max_expansion * target.max_len)
        self.vocabulary = min(checkpoint.spec.vocabulary, target.vocabulary)
        self.decoder = model = self._loaded(checkpoint, options.quantization)
        if options.vocab_mismatch == "intersect":
            self.decoder = TranslatedModel(model, shared_tokens(checkpoint, target.checkpoint))
            self.vocabulary = target.vocabulary
        same_device = self.decoder.device == target.decoder.device
        self.sampler = target.sampler if same_device else Sampler(self.decoder.backend)

    def _loaded(self, checkpoint: Checkpoint, quantization: str | None) -> Model:
        return load_draft(self.options, self.target.decoder, checkpoint, self.context, quantization)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        quantization, scheme = self.options.quantization, self.checkpoint.scheme
        if quantization is None and scheme is not None:
            quantization = f"int{max(bits for bits, _ in scheme.sizes)}"
        self.decoder = self._loaded(replace(self.checkpoint, scheme=None, given=tensors), quantization)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The target as its own draft model, with two siblings; accepted often enough for deep trees."""
        return cls(cls.Options(model=target.checkpoint.name, siblings=2), target)

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter() if self.itself else self.decoder.footprint

    def allocate(self, slots: int, pool: Pool) -> Storage:
        self.pool = pool if self.itself else self.decoder.pool(slots)
        return Storage() if self.itself else Storage([self.pool])

    def size(self, depth: int) -> int:
        siblings: int = self.options.siblings
        return depth * siblings

    def propose(self, batch: Batch) -> Draft:
        if not (active := self._active(batch)):
            return Draft([EMPTY_TREE] * len(batch))
        first = self._catch_up(batch, active)
        trees = self._draft(batch, first) if first.step_input.length else {}
        for cursor, end in first.reached:  # only now: a step that raises has to catch up again
            cursor.reach(end)
        return Draft([trees.get(r, EMPTY_TREE) for r in range(len(batch))])

    def _active(self, batch: Batch) -> list[tuple[int, RowStep]]:
        """The rows, with their numbers, that draft, compute their prompt, or are new."""
        cursors = self.catch_up.cursors
        return [(r, s) for r, s in enumerate(batch) if s.known > 1 or s.budget.nodes or s.row not in cursors]

    def _catch_up(self, batch: Batch, active: Sequence[tuple[int, RowStep]]) -> FirstForward:
        """Collect the tokens that were committed since the last forward, of the rows that take part.

        All rows compute at most `max_num_batched_tokens`, those first that lack few.  What is left follows in
        the next steps, and a row is drafted for when it has caught up.
        """
        first = FirstForward(StepInput(self.window.sink), [], [])
        tokens_left = self.target.max_num_batched_tokens
        self.waiting.clear()
        for lag in sorted(self._lags(active)):
            row, count = batch[lag.r].row, min(lag.missing, tokens_left)
            tokens_left -= count
            if count < lag.missing:
                self.waiting.add(row)
            if not count:
                continue
            reached = lag.done + count
            tokens = self.in_vocabulary(row.tokens[lag.done : reached])
            adapter = row.adapter if self.itself else None
            view = self.window.read(first.step_input, row.slots, lag.done, tokens, lag.budget.nodes, adapter)
            if lag.cursor is not None:
                first.reached.append((lag.cursor, reached))
            if lag.budget.nodes and row not in self.waiting:
                first.starts.append(Start(lag.r, lag.budget, first.step_input.length - 1, view))
        return first

    def _lags(self, active: Sequence[tuple[int, RowStep]]) -> Iterator[Lag]:
        """What each row lacks that takes part.

        A row that outgrows the draft model's context is not drafted for.  One that is not drafted for catches
        up later.
        """
        for r, step in active:
            row, start, end, budget = step.row, step.start, step.end, self.stop.limit(step)
            cursor = None if self.itself else self.catch_up.cursor(row, start)
            done = start if cursor is None else min(cursor.filled, start)
            depth = min(budget.depth, self.context - end) if budget.nodes else 0
            if end <= self.context and self._takes_part(row, depth, step.known):
                yield Lag(end - done, r, done, budget.within(depth=depth) if depth > 0 else NO_BUDGET, cursor)

    def _takes_part(self, row: Row, depth: int, known: int) -> bool:
        """Whether a row is in the first forward: if it is drafted for, or computes a chunk of its prompt.

        The target as its own draft has nothing to catch up with, so it skips prompts.
        """
        if self.itself:
            return known == 1 and depth > 0
        return depth > 0 or (known > 1 and not row.left_out.issuperset(self.sources))

    def in_vocabulary(self, tokens: list[int]) -> list[int]:
        """The tokens with id 0 for those that only the target has."""
        if self.vocabulary == self.target.vocabulary:
            return tokens
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _draft(self, batch: Batch, first: FirstForward) -> Mapping[int, DraftTree]:
        """Run the first forward and all that follow.  Returns batch row -> its tree."""
        if self.stop.active:
            for start in first.starts:
                self.stop.begin(batch[start.r].row, start.budget.depth)
        if not first.starts:
            self.decoder.forward(first.step_input.build(), self.pool)
            return {}
        chained = self.staged is None and self.options.siblings == 1
        if chained and self._fuses([(batch[start.r].row, start.view) for start in first.starts]):
            return self._chains(batch, first)
        return self._trees(batch, first)

    def _fuses(self, chains: Sequence[tuple[Row, View]]) -> bool:
        """Whether the backend drafts chains for these rows: nothing has to be applied between forwards."""
        for row, view in chains:
            if view.adapter or row.processors or (self.stop.active and self.samples(row)):
                return False
        return self.decoder.fuses_chains

    def _chains(self, batch: Batch, first: FirstForward) -> Mapping[int, DraftTree]:
        """Draft all chains in one call of the backend."""
        chains = [self._chain(batch[start.r].row, start) for start in first.starts]
        stop_rule = self.stop.stop_rule or (StopRule() if self.target.adaptive else None)
        wanted = Chains(chains, self.vocabulary, stop_rule)
        tokens_of, features_of = self.decoder.draft_chain(first.step_input.build(), self.pool, wanted)
        trees = {}
        for i, start in enumerate(first.starts):
            features = features_of[i] if features_of else []
            if self.stop.active and features_of:
                self.stop.note(batch[start.r].row, features)
            trees[start.r] = chain_tree(tokens_of[i], features, chains[i].probs)
        return trees

    def _chain(self, row: Row, start: Start) -> Chain:
        """The chain of a row, for the backend."""
        budget, first_node, probs = start.budget, self.target.stream_id, None
        if self.samples(row):
            probs = torch.empty(budget.depth, self.target.vocabulary, dtype=torch.float64)
        where = start.at, budget.depth, row.distribution, row.stream
        return Chain(*where, probs=probs, first_node=first_node, joint_floor=budget.floor)

    def finish_chains(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> bool:
        """Complete chains in one call of the backend.  Returns False, without effect, where it cannot.

        tips: each chain, and the row of the forward that it continues from.
        """
        sampled = any(self.samples(tree.row) for tree, _ in tips)
        if sampled or self.stop.active or not self._fuses([(tree.row, tree.view) for tree, _ in tips]):
            return False
        chains = []
        for tree, at in tips:
            row, depth = tree.row, tree.budget.depth - len(tree.tokens)
            chains.append(Chain(at, depth, row.distribution, row.stream))
        found, _ = self.decoder.draft_chain(step_input.build(), self.pool, Chains(chains, self.vocabulary))
        for (tree, _), tokens in zip(tips, found):
            for token in tokens:
                tree.choose([(tree.frontier[0], token, RANK_CONFIDENCE[0])])
        return True

    def _trees(self, batch: Batch, first: FirstForward) -> Mapping[int, DraftTree]:
        """Draft with one forward for each depth, or with those of the staged drafter."""
        siblings, repeats = self.options.siblings, self.options.sibling_draws == "independent"
        trees: dict[int, Tree] = {}
        for start in first.starts:
            row, end = batch[start.r].row, batch[start.r].end
            level = {"view": start.view, "repeats": repeats, "stream_id": self.target.stream_id}
            trees[start.r] = Tree(row, end, start.budget, siblings, **level)
        tips = [(tree, start.at) for tree, start in zip(trees.values(), first.starts)]
        if self.staged is not None:
            self.staged.grow(first.step_input, tips)
        else:
            self._grow(first.step_input, tips)
        return {r: tree.draft_tree for r, tree in trees.items()}

    def _grow(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Grow the trees by one depth a forward until none grows any more.

        tips: each tree, and the row of the first forward after which it begins.
        """
        rows: Sequence[int] = [row for _, row in tips]
        # For each growing tree: (node, row of `logits` after it) of its frontier.
        growing = [(tree, [(ROOT, i)]) for i, (tree, _) in enumerate(tips)]
        while growing:
            logits = self.logits_after(step_input, rows)
            for tree, frontier in growing:
                self.extend(tree, frontier, logits)
            step_input, still_growing = StepInput(self.window.sink), []
            for tree, _ in growing:
                if tree.growing:
                    first = step_input.length
                    tree.add_to(step_input)
                    still_growing.append((tree, [(node, first + i) for i, node in enumerate(tree.frontier)]))
            growing, rows = still_growing, range(step_input.length)

    def logits_after(self, step_input: StepInput, rows: Sequence[int]) -> Tensor:
        """Run one forward and return the logits after some of its rows, [len(rows), vocabulary]."""
        x = self.decoder.forward(step_input.build(), self.pool)
        logits = self.decoder.logits(x, list(rows))
        return logits[:, : self.vocabulary] if logits.shape[1] > self.vocabulary else logits

    def extend(self, tree: Tree, frontier: list[tuple[int, int]], logits: Tensor) -> None:
        """Add the next depth of a tree: children of each (node, row of the logits after it)."""
        if self.samples(tree.row):
            found = {node: self._distribution(tree, node, logits, at) for node, at in frontier}
            known = {node: q for node, q in found.items() if q is not None}
            tree.draw(known, self.sampler.children)
        else:
            tree.choose([child for node, at in frontier for child in self._top(tree, node, logits, at)])
        self.stop.prune(tree, dict(frontier), self.sampler, logits)

    def _top(self, tree: Tree, node: int, logits: Tensor, at: int) -> list[tuple[int, int, float]]:
        """The top (node, token, probability) after a node."""
        # Under noise the rank predicts acceptance better than q does.
        alone = tree.siblings == 1 and not self.target.adaptive
        by_rank = tree.row.distribution.temperature > 0 or alone
        path = tree.path_tokens(node)
        tokens, probs = self.sampler.top(tree.row, path, logits, tree.siblings, not by_rank, at)
        return [(node, token, p) for token, p in zip(tokens, RANK_CONFIDENCE if by_rank else probs)]

    def _distribution(self, tree: Tree, node: int, logits: Tensor, at: int) -> Tensor | None:
        """q after a node, float64 [target's vocabulary], with the request's parameters; None if invalid."""
        if (q := self.sampler.q(tree.row, tree.path_tokens(node), logits, at)) is None:
            return None
        missing = self.target.vocabulary - len(q)
        return F.pad(q, (0, missing)) if missing else q

    @property
    def memory(self) -> Any:
        """Learned state of the stop rules, and memory of the staged drafter; None if there is neither."""
        parts = self.stop.memory if self.stop.learns else None, self.staged and self.staged.drafter.memory
        return parts if parts != (None, None) else None

    @memory.setter
    def memory(self, parts: Any) -> None:
        learned, staged = parts or (None, None)
        if learned is not None:
            self.stop.memory = learned
        if self.staged is not None:
            self.staged.drafter.memory = staged

    def observe(self, commit: Commit) -> None:
        if self.stop.active:
            self.stop.observe(commit)
        if self.staged is not None:
            self.staged.observe(commit)

    def forget(self, row: Row, reason: str) -> None:
        self.catch_up.forget(row)
        self.waiting.discard(row)
        self.stop.forget(row)
        if self.staged is not None:
            self.staged.forget(row, reason)

    def behind(self, row: Row) -> int:
        cursor, waits = self.catch_up.cursors.get(row), int(row in self.waiting)
        if cursor is None or row.computed >= self.context:
            return waits
        return max(waits, row.computed - cursor.filled)

    def filled(self, row: Row) -> int:
        return row.computed if self.itself else self.catch_up.share(row)
