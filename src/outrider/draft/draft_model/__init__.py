"""A smaller language model guesses (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Its K/V lies at the target's slots, in a pool of its own, and covers committed tokens only: every step first catches up
with what became certain, in the forward that also gives the first level.

    position            … e-2   e-1 │  e    e+1       e = batch.end(r): the known tokens end here
    forward 1 takes     known known │                 its last row says the guess for position e
    forward 2 takes                 │ guess           … for e+1; its K/V is scratch in the row's node slots

With `siblings` = k, a level keeps the k best of all children of the level before, by the product of estimates; under a rule that
judges guesses by their laws, k children are drawn from the draft's law instead (see tree.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.quantize import bits_of
from outrider.core.noise import stream_of
from outrider.core.step_input import StepInput
from outrider.core.types import NOTHING, ROOT, Batch, Budget, Commit, Draft, DraftTree, Row
from outrider.draft.draft_model.intersect import Translated, common
from outrider.draft.draft_model.staged import Staged
from outrider.drafting import stop
from outrider.drafting.base import Drafter, Target, refuse_idle, refuse_parallel
from outrider.drafting.trees.sampled import RANKED, Tree
from outrider.drafting.view import SELF, View, Window, check
from outrider.drafting.vocab.mismatch import check_mismatch, fits
from outrider.errors import ConfigError, OutriderError
from outrider.models import model
from outrider.models.placement import check_gpu_layers, pick_device, place
from outrider.sampling.sampler import Sampler


class Start(NamedTuple):
    """Where the guesses of one row begin."""

    r: int  # of the batch
    budget: Budget
    at: int  # row of the plan
    view: View


class DraftModel(Drafter):
    demo: ClassVar = {
        "draft model, chain": {"num_speculative_tokens": 2},
        "draft model, tree": {"num_speculative_tokens": 2, "siblings": 2},
    }

    @dataclass(frozen=True)
    class Options(stop.Options):
        """model: folder, .gguf file or hub id, or "self" (see window.py).  draft_dtype: auto, or as the engine's dtype.
        quantization: of the draft's weights, int8 or int4; the target's is an engine option.  siblings: candidates a level (1: a
        chain).  sibling_draws: "without" replacement or "independent", under rules that judge guesses by their laws.
        vocab_mismatch: what to do where the two have different tokens: "refuse"; "intersect", guess among the tokens that both have,
        whatever their ids; "retokenize", guess text and tokenise that; "allow", guess among the ids that both have.
        target_lookbehind, assistant_lookbehind: tokens of target and draft that "retokenize" looks at again behind the new ones.
        draft_device: auto (where the target's embedding and head are), cpu, cuda, cuda:1 or mps.  draft_gpu_layers: as the engine's
        gpu_layers.
        draft_kv_budget: how many tokens of a request the draft sees (None: all): the first draft_kv_sink and the most recent.
        drafter: the speculative_config of something cheaper that guesses ahead of the draft model (see staged.py).  When to stop
        guessing: see stop.py.
        """

        model: str = "builtin-draft"
        draft_dtype: str = "auto"
        quantization: str | None = None
        siblings: int = 1
        sibling_draws: str = "without"
        vocab_mismatch: str = "refuse"
        target_lookbehind: int = 10
        assistant_lookbehind: int = 10
        draft_tensor_parallel_size: int = 1
        revision: str | None = None
        draft_device: str = "auto"
        draft_gpu_layers: int | None = None
        draft_kv_budget: int | None = None
        draft_kv_sink: int = 4
        drafter: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if not isinstance(self.model, str) or not self.model:
                raise ConfigError(f"model must be a folder or a hub id, got {self.model!r}.")
            if (
                not isinstance(self.siblings, int)
                or isinstance(self.siblings, bool)
                or not 1 <= self.siblings <= 64
            ):
                raise ConfigError(f"siblings must be a whole number in 1 … 64, got {self.siblings!r}.")
            if self.sibling_draws not in ("without", "independent"):
                raise ConfigError(
                    f'sibling_draws must be "without" or "independent", got {self.sibling_draws!r}.'
                )
            bits_of(self.quantization, "quantization of the draft")
            looks = {
                "target_lookbehind": self.target_lookbehind,
                "assistant_lookbehind": self.assistant_lookbehind,
            }
            refuse_idle(self, self.siblings > 1, "siblings > 1", "sibling_draws")
            refuse_idle(self, self.draft_kv_budget is not None, "draft_kv_budget", "draft_kv_sink")
            retokenized = self.vocab_mismatch == "retokenize"
            refuse_idle(
                self, retokenized, 'vocab_mismatch "retokenize"', "target_lookbehind", "assistant_lookbehind"
            )
            check_mismatch(
                self.vocab_mismatch, self.siblings, self.stops or self.drafter is not None, **looks
            )
            check_gpu_layers(self.draft_gpu_layers, "draft_gpu_layers")
            check(self)
            if self.drafter is not None and not isinstance(self.drafter, Mapping):
                raise ConfigError(
                    f"drafter must be a speculative_config such as {{'method': …}}, got {self.drafter!r}."
                )
            if self.drafter is not None and self.siblings > 1:
                raise ConfigError(
                    f"a drafter speeds up a chain, and siblings is {self.siblings}: leave one of them out."
                )
            refuse_parallel(self.draft_tensor_parallel_size)

    decoder: model.Model | Translated
    stretch = 1  # tokens of ours for one of the target's, at most

    def __new__(cls, options: Options, target: Target) -> Any:
        if options.vocab_mismatch != "retokenize" or options.model == SELF:
            return super().__new__(cls)
        from outrider.draft.draft_model.retokenize import Retokenized  # which builds on this class

        return super().__new__(Retokenized)

    def __init__(self, options: Options, target: Target) -> None:
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

    def _load(self, options: Options, target: Target) -> None:
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
        own = model.load(
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

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        self.reading.clear()
        draft = self._proposed(batch, budgets)
        for row, end in self.reading:
            self.synced[row] = end
        return draft

    def _proposed(self, batch: Batch, budgets: list[Budget]) -> Draft:
        plan, starts = self._catch_up(batch, self.stop.limit(batch.rows, budgets))
        for start in starts if self.stop.active else ():
            self.stop.begin(batch.rows[start.r], start.budget.depth)
        trees = [NOTHING] * len(batch)
        if not plan.length:
            return Draft(trees)
        if not starts:
            self.decoder.forward(plan.build(), self.pool)
            return Draft(trees)
        if self._in_one_call(batch, starts) and self._chains(plan, batch, starts, trees):
            return Draft(trees)
        repeats = self.options.sibling_draws == "independent"
        grown = {
            s.r: Tree(
                batch.rows[s.r],
                batch.end(s.r),
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
            self.staged.grow(plan, tips)
        else:
            self._levels(plan, tips)
        for r, tree in grown.items():
            trees[r] = tree.draft_tree
        return Draft(trees)

    def _catch_up(self, batch: Batch, budgets: list[Budget]) -> tuple[StepInput, list[Start]]:
        """The rows of the first forward: everything that became certain since our last look; and where the guesses begin.
        A row that outgrows the draft's own context is not drafted for."""
        plan = StepInput(self.window.sink)
        starts: list[Start] = []
        for r, (row, start, known, budget) in enumerate(zip(batch.rows, batch.starts, batch.known, budgets)):
            end = start + known
            done = start if self.itself else min(self.synced.setdefault(row, start), start)  # a step may fail
            depth = min(budget.depth, self.context - end) if budget.nodes else 0
            if end > self.context or not self._worthwhile(depth, known):
                continue  # a row that does not guess catches up with single tokens when it does
            assert row.table is not None
            adapter = row.adapter if self.itself else None
            view = self.window.read(
                plan, row.table.slots, done, self._readable(row.tokens[done:end]), budget.nodes, adapter
            )
            if not self.itself:
                self.reading.append((row, end))
            if depth > 0:
                starts.append(Start(r, budget.within(depth=depth), plan.length - 1, view))
        return plan, starts

    def _worthwhile(self, depth: int, known: int) -> bool:
        """Whether a row takes part.  The chunk of a prompt does, even if nothing is guessed, unless the target is about to compute it
        in the pool where the draft would look."""
        return known == 1 and depth > 0 if self.itself else known > 1 or depth > 0

    def _in_one_call(self, batch: Batch, starts: list[Start]) -> bool:
        """Whether there is one guess a level that is chosen, and neither processor nor adapter to ask in between."""
        if self.options.siblings > 1 or self.staged is not None:
            return False
        for start in starts:
            row = batch.rows[start.r]
            if start.view.adapter or row.processors or self.draws(row):
                return False
        return True

    def _chains(self, plan: StepInput, batch: Batch, starts: list[Start], trees: list[DraftTree]) -> bool:
        """All levels at once, into `trees`; False, and nothing done, where the kernels cannot."""
        chains = []
        for start in starts:
            row = batch.rows[start.r]
            chains.append(Chain(start.at, start.budget.depth, row.law, stream_of(row.seed, row.index)))
        found = self.decoder.chain(plan.build(), self.pool, chains, self.vocabulary, self.stop.stop_rule)
        if found is None:
            return False
        for start, tokens in zip(starts, found[0]):
            trees[start.r] = DraftTree.chain(tokens, RANKED[:1] * len(tokens))
        for start, features in zip(starts, found[1]):
            self.stop.note(batch.rows[start.r], features)
        return True

    def _readable(self, tokens: list[int]) -> list[int]:
        """Ids that only the target has are read as id 0: a guess may be bad, never out of bounds."""
        if self.vocabulary == self.target.vocabulary:
            return tokens
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _levels(self, plan: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Level after level, as long as one of the trees grows; each hangs from a row of the plan."""
        at: Sequence[int] = [row for _, row in tips]
        frontier = [(tree, ROOT) for tree, _ in tips]
        while True:
            logits = self.look(plan, at)
            nodes: dict[int, tuple[Tree, list[tuple[int, int]]]] = {}
            for i, (tree, node) in enumerate(frontier):
                nodes.setdefault(id(tree), (tree, []))[1].append((node, i))
            for tree, places in nodes.values():
                self.extend(tree, places, logits)
            plan, frontier = StepInput(self.window.sink), []
            for tree, _ in nodes.values():
                if tree.growing:
                    tree.plan(plan)
                    frontier += [(tree, node) for node in tree.frontier]
            if not frontier:
                return
            at = range(len(frontier))

    def look(self, plan: StepInput, rows: Sequence[int]) -> Tensor:
        """One forward; the logits [len(rows), vocabulary] behind these of its rows."""
        x = self.decoder.forward(plan.build(), self.pool)
        logits = self.decoder.logits(x, list(rows))
        return logits[:, : self.vocabulary] if logits.shape[1] > self.vocabulary else logits

    def extend(self, tree: Tree, places: list[tuple[int, int]], logits: Tensor) -> None:
        """The next level of a tree: children of (node, row of the logits behind it)."""
        if self.draws(tree.row):
            tree.draw(
                {node: law for node, i in places if (law := self._law(tree, node, logits, i)) is not None}
            )
        else:
            tree.choose([child for node, i in places for child in self._best(tree, node, logits, i)])
        self.stop.prune(tree, dict(places), self.sampler, logits)

    def _best(self, tree: Tree, node: int, logits: Tensor, at: int) -> list[tuple[int, int, float]]:
        """The best (node, token, probability) after a node."""
        ranked = tree.row.law.temperature > 0 or tree.siblings == 1
        tokens, shares = self.sampler.top(
            tree.row, tree.path_tokens(node), logits, tree.siblings, not ranked, at
        )
        return [(node, token, p) for token, p in zip(tokens, RANKED if ranked else shares)]

    def _law(self, tree: Tree, node: int, logits: Tensor, at: int) -> Tensor | None:
        """q after a node, over the target's vocabulary, with the request's own parameters; None where it fails."""
        try:
            law = self.sampler.law(tree.row, tree.path_tokens(node), logits, at)
        except OutriderError:  # the target's own law will say why
            return None
        return torch.nn.functional.pad(law, (0, self.target.vocabulary - len(law)))

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
