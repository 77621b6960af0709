"""A draft model at the target's slots: catch-up, then one call for chains or a forward a depth of trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
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
from outrider.core.tree import EMPTY_TREE, ROOT, Draft, DraftTree
from outrider.draft.draft_model.chain_states import ChainStates
from outrider.draft.draft_model.first import FirstForward, Part
from outrider.draft.draft_model.intersect import TranslatedModel, shared_tokens
from outrider.draft.draft_model.loading import completed, load_draft, refuse_states
from outrider.draft.draft_model.one_pass import OnePass
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.draft.draft_model.staged import Staged
from outrider.drafting import stop
from outrider.drafting.base import Drafter, Storage, Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE, chain_tree
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import SELF, Window
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
        """Raise ConfigError as `completed` does."""
        options = completed(options, target)
        super().__init__(options, target)
        self.itself = options.model == SELF
        self.catch_up, self.windows = TokenCatchUp(), dict[Row, Window]()  # windows: those of single rows
        self.waiting: set[Row] = set()  # rows that the last forward had too little room for
        self.states: ChainStates | None = None
        if self.itself:
            self.decoder, self.sampler = refuse_states(target.decoder), target.sampler
            self.vocabulary, self.context = target.vocabulary, target.max_len
        else:
            self._load(options, target)
        self.stop, self.window = stop.Stop(options), Window.of(options.draft_kv_budget, options.draft_kv_sink)
        self.depth = stop.MAX_DEPTH if self.stop.active else self.depth
        self.one_pass = None if self.itself else OnePass.of(options, self)
        self.staged = None if options.drafter is None else Staged(options.drafter, self)
        self.grower = self.staged or self.one_pass
        self.sees_plain = self.stop.active or self.staged is not None
        # Rules that judge samples need lengths that no sample decides.  A GPU would be read every token.
        others = self.grower is not None or self.stop.active or target.needs_probs
        self.heeds_floors = self.decoder.device.type == "cpu" and not others

    def _load(self, options: DraftModelOptions, target: Target) -> None:
        """Load the weights, check the vocabularies, and set vocabulary, context, decoder and sampler."""
        trust = target.checkpoint.trust_remote_code
        assert options.model is not None
        checkpoint = self.checkpoint = Checkpoint.open(options.model, options.revision, trust)
        if options.vocab_mismatch == "refuse":
            fits(checkpoint, target.checkpoint)
        self.context = min(checkpoint.spec.context, self.max_expansion * target.max_len)
        self.vocabulary = min(checkpoint.spec.vocabulary, target.vocabulary)
        self.decoder = model = self._loaded(checkpoint, options.quantization)
        self.states = ChainStates.of(model, options)
        if options.vocab_mismatch == "intersect":
            self.decoder = TranslatedModel(model, shared_tokens(checkpoint, target.checkpoint))
            self.vocabulary = target.vocabulary
        same_device = self.decoder.device == target.decoder.device
        self.sampler = target.sampler if same_device else Sampler(self.decoder.backend)

    def _loaded(self, checkpoint: Checkpoint, quantization: str | None) -> Model:
        return load_draft(self.options, self.target.decoder, checkpoint, self.context, quantization)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        quantization, scheme = self.options.quantization, self.checkpoint.scheme
        if quantization is None and scheme is not None and scheme.sizes:  # none: it was expanded
            quantization = f"int{max(bits for bits, _ in scheme.sizes)}"
        self.decoder = self._loaded(replace(self.checkpoint, scheme=None, given=tensors), quantization)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The target as its own draft model, with two siblings; accepted often enough for deep trees."""
        return cls(cls.Options(model=target.checkpoint.name, siblings=2), target)

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter() if self.itself else self.decoder.footprint

    def state_bytes(self, device: torch.device) -> Counter[torch.device]:
        return Counter() if self.states is None else self.states.row_bytes

    def allocate(self, slots: int, pool: Pool) -> Storage:
        self.pool = pool if self.itself else self.decoder.pool(slots)
        return Storage() if self.itself else Storage([self.pool])

    def reserve_states(self, rows: int) -> None:
        if self.states is not None:
            self.states.reserve(self.pool, rows)

    def size(self, depth: int) -> int:
        siblings: int = self.options.siblings
        return depth * siblings

    def propose(self, batch: Batch) -> Draft:
        trees = [EMPTY_TREE] * len(batch)
        if parts := self._parts(batch):
            first = self._catch_up(parts)
            for r, tree in self._draft(first).items():
                trees[r] = tree
            for cursor, end in first.reached:  # only now: a step that raises has to catch up again
                cursor.filled = end
        return Draft(trees)

    def _catch_up(self, parts: list[Part]) -> FirstForward:
        """Collect the tokens that were committed since the last forward, of the rows that take part.

        All rows compute at most `max_num_batched_tokens`, those first that lack few.  What is left follows in
        the next steps, and a row is drafted for when it has caught up.
        """
        first = FirstForward(StepInput(self.window.sink))
        tokens_left = self.target.max_num_batched_tokens
        self.waiting.clear()
        for part in sorted(parts, key=attrgetter("missing")):
            row, count = part.row, min(part.missing, tokens_left)
            tokens_left -= count
            if count < part.missing:
                self.waiting.add(row)
            if not count:
                continue
            reached = part.done + count
            tokens = self.in_vocabulary(row.tokens[part.done : reached])
            adapter, nodes = row.adapter if self.itself else None, part.budget.nodes
            read = self.windows.get(row, self.window).read
            view = read(first.step_input, row.slots, part.done, tokens, nodes, adapter)
            if part.cursor is not None:
                first.reached.append((part.cursor, reached))
            if self.states is not None:
                self.states.read(first.step_input, row, nodes > 0 and count == part.missing)
            if nodes and count == part.missing:
                part.at, part.view = first.step_input.length - 1, view
                first.starts.append(part)
                if self.one_pass is not None:
                    self.one_pass.add_masks(first.step_input, part)
        return first

    def _parts(self, batch: Batch) -> list[Part]:
        """Missing tokens of each row that is drafted for, or computes a chunk of its prompt.

        A row that outgrows the draft model's context is not drafted for.  One that is not drafted for catches
        up later.
        """
        parts, cursors = list[Part](), self.catch_up.cursors
        if not [step for step in batch if step.budget.nodes or step.known > 1 or step.row not in cursors]:
            return parts  # nothing is drafted, and no row is new or computes a chunk
        for r, step in enumerate(batch):
            row, start, end = step.row, step.start, step.start + step.known
            budget = self.stop.limit(step) if self.stop.active else step.budget
            if end + budget.depth > self.context:
                budget = budget.within(depth=self.context - end)
            if self.itself:  # it has nothing to catch up with, so it skips prompts
                cursor, done, reads = None, start, step.decodes and budget.nodes > 0
            else:
                # cached pages have no states of this model, so that it computes them again
                cursor = self.catch_up.cursor(row, start if self.states is None else 0)
                done, reads = min(cursor.filled, start), budget.nodes > 0 or self._reads_prompt(step)
            if reads and end <= self.context:
                parts.append(Part(row, r, done, end - done, budget, cursor))
        return parts

    def _reads_prompt(self, step: RowStep) -> bool:
        return step.known > 1 and not step.row.left_out.issuperset(self.sources)

    def in_vocabulary(self, tokens: list[int]) -> list[int]:
        """The tokens with id 0 for those that only the target has."""
        if self.vocabulary == self.target.vocabulary:
            return tokens
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _draft(self, first: FirstForward) -> Mapping[int, DraftTree]:
        """Run the first forward and all that follow.  Returns batch row -> its tree."""
        if self.stop.active:
            for start in first.starts:
                self.stop.begin(start.row, start.budget.depth)
        if not first.starts:
            self.decoder.forward(first.step_input.build(), self.pool)
            return {}
        chained = self.grower is None and self.options.siblings == 1 and self.fuses(first.starts)
        return self._chains(first) if chained else self._trees(first)

    def fuses(self, chains: Sequence[Part | Tree]) -> bool:
        """Whether the backend drafts these chains: nothing has to be applied or kept between forwards."""
        for chain in chains:
            row = chain.row
            if (
                self.states
                or chain.view.adapter
                or row.processors
                or (self.stop.active and self.samples(row))
            ):
                return False
        return self.decoder.fuses_chains

    def _chains(self, first: FirstForward) -> Mapping[int, DraftTree]:
        """Draft all chains in one call of the backend."""
        chains = [self._chain(start) for start in first.starts]
        stop_rule = self.stop.stop_rule or (StopRule() if self.target.adaptive else None)
        wanted = Chains(chains, self.vocabulary, stop_rule, width=self.target.probs_width)
        tokens_of, features_of = self.decoder.draft_chain(first.step_input.build(), self.pool, wanted)
        trees = {}
        for i, start in enumerate(first.starts):
            features = features_of[i] if features_of else []
            if self.stop.active and features_of:
                self.stop.note(start.row, features)
            trees[start.r] = chain_tree(tokens_of[i], features, chains[i].probs)
        return trees

    def _chain(self, start: Part) -> Chain:
        """The chain of a row, for the backend."""
        row, budget, first_node, probs = start.row, start.budget, self.target.stream_id, None
        if self.samples(row):
            device = self.target.probs_device(self.decoder.device)
            probs = torch.empty(budget.depth, self.target.vocabulary, dtype=torch.float64, device=device)
        where = start.at, budget.depth, row.distribution, row.stream
        return Chain(*where, probs=probs, first_node=first_node, joint_floor=budget.floor)

    def _trees(self, first: FirstForward) -> Mapping[int, DraftTree]:
        """Draft with one forward for each depth, or those of the `grower`."""
        siblings, draws = self.options.siblings, self.options.sibling_draws
        trees: dict[int, Tree] = {}
        for start in first.starts:
            level = {"view": start.view, "stream_id": self.target.stream_id}
            trees[start.r] = Tree(start.row, start.end, start.budget, siblings, draws, **level)
        tips = [(tree, start.at) for tree, start in zip(trees.values(), first.starts)]
        grow = self._grow if self.grower is None else self.grower.grow
        grow(first.step_input, tips)
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
                    if self.states is not None:
                        self.states.grow(step_input, tree.row)
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
        if self.states is not None:
            self.states.forget(row)
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
