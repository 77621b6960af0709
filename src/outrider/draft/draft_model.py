"""A smaller language model guesses (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Its K/V lies at the target's slots, in a pool of its own, and covers committed tokens only: every step first catches up
with what became certain, in the forward that also gives the first level.

    position            … e-2   e-1 │  e    e+1       e = batch.end(r): the known tokens end here
    forward 1 takes     known known │                 its last row says the guess for position e
    forward 2 takes                 │ guess           … for e+1; its K/V is scratch in the row's node slots

With `siblings` = k, a level keeps the k best of all children of the level before, by the product of estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from outrider.attention.plan import Plan
from outrider.cache.pool import Pool
from outrider.draft.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.kernels import Chain
from outrider.models import model
from outrider.models.hub import Checkpoint
from outrider.models.placement import check_gpu_layers, pick_device, place
from outrider.models.quantise import bits_of
from outrider.sampling.noise import stream_of
from outrider.sampling.sampler import Sampler
from outrider.types import ROOT, Batch, Budget, Draft, Guesses, Row

# How likely the best, second best … by noised draft logit is the target's pick.  The noise is shared, so the rank says more than q:
# 4 levels of 3 siblings on the built-in pair at T = 0.8 gave 2.70 tokens a step with these, 2.40 by q.
RANKED = [0.7, 0.15, 0.06, 0.03] + [0.02 * 0.8**i for i in range(60)]
PADDING = 512  # vocabularies whose sizes differ by less than this, and whose tokens agree, differ in padding only


@dataclass
class Tree:
    """One row's tree while it grows, level by level."""

    row: Row
    base: int  # position of the first guess
    budget: Budget
    siblings: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=lambda: {ROOT: []})  # node -> the nodes from the root to it
    joint: dict[int, float] = field(default_factory=lambda: {ROOT: 1.0})
    frontier: list[int] = field(default_factory=lambda: [ROOT])

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[i] for i in self.paths[node]]

    def grow(self, children: list[tuple[int, int, float]]) -> None:
        """Adds the best (parent, token, probability) as the next level."""
        room = min(self.siblings, self.budget.nodes - len(self.tokens))
        best = sorted(children, key=lambda c: -self.joint[c[0]] * c[2])[:room]
        self.frontier = []
        for parent, token, probability in best:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.confidence.append(probability)
            self.paths[node] = [*self.paths[parent], node]
            self.joint[node] = self.joint[parent] * probability
            self.frontier.append(node)

    def plan(self, plan: Plan) -> None:
        """The frontier's rows of the next forward."""
        assert self.row.table is not None
        slots = self.row.table.slots
        for node in self.frontier:
            if self.siblings == 1:  # a chain lies in its natural slots and needs no path
                plan.chain(slots, self.base + node, [self.tokens[node]])
            else:
                plan.node(slots, self.base, [slots[self.base + i] for i in self.paths[node]], self.tokens[node])


class DraftModel(Drafter):
    demo: ClassVar = {
        "draft model, chain": {"num_speculative_tokens": 2},
        "draft model, tree": {"num_speculative_tokens": 2, "siblings": 2},
    }

    @dataclass(frozen=True)
    class Options:
        """model: folder, .gguf file or hub id.  draft_dtype: auto, or as the engine's dtype.  quantization: of the draft's weights, int8 or
        int4; the target's is an engine option.  siblings: candidates a level (1: a chain).
        vocab_mismatch: "refuse", or "allow" to guess among the ids that both models have.  draft_device: auto (where the target's
        embedding and head are), cpu, cuda, cuda:1 or mps.  draft_gpu_layers: as the engine's gpu_layers.
        """

        model: str = "builtin-draft"
        draft_dtype: str = "auto"
        quantization: str | None = None
        siblings: int = 1
        vocab_mismatch: str = "refuse"
        draft_tensor_parallel_size: int = 1
        revision: str | None = None
        draft_device: str = "auto"
        draft_gpu_layers: int | None = None

        def __post_init__(self) -> None:
            if not isinstance(self.model, str):
                raise ConfigError(f"model must be a folder or a hub id, got {self.model!r}.")
            if not isinstance(self.siblings, int) or isinstance(self.siblings, bool) or not 1 <= self.siblings <= 64:
                raise ConfigError(f"siblings must be a whole number in 1 … 64, got {self.siblings!r}.")
            bits_of(self.quantization, "quantization of the draft")
            if self.vocab_mismatch not in ("refuse", "allow"):
                raise ConfigError(f'vocab_mismatch must be "refuse" or "allow", got {self.vocab_mismatch!r}.')
            check_gpu_layers(self.draft_gpu_layers, "draft_gpu_layers")
            if self.draft_tensor_parallel_size != 1:
                raise ConfigError(f"draft_tensor_parallel_size must be 1, got {self.draft_tensor_parallel_size!r}.")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        checkpoint = Checkpoint.open(options.model, options.revision, target.checkpoint.trust_remote_code)
        if options.vocab_mismatch == "refuse":
            _fits(checkpoint, target.checkpoint)
        self.vocabulary = min(checkpoint.spec.vocabulary, target.vocabulary)
        self.context = min(checkpoint.spec.context, target.max_len)
        device = target.decoder.device if options.draft_device == "auto" else pick_device(options.draft_device, "draft_device")
        where = place(checkpoint.spec.layers, device, options.draft_gpu_layers, "draft_gpu_layers")
        dtype = checkpoint.dtype(options.draft_dtype, device, "draft_dtype")
        self.decoder = model.load(checkpoint, dtype, device, self.context, options.quantization, target.decoder.kv_cache_dtype, where)
        self.sampler = target.sampler if self.decoder.device == target.decoder.device else Sampler(self.decoder.kernels)
        self.slot_bytes = self.decoder.slot_bytes
        self.synced: dict[Row, int] = {}  # positions of a row that have K/V in our pool

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return self.decoder.footprint

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The target drafts for itself, two siblings a level: right often enough to walk deep into trees."""
        return cls(cls.Options(model=target.checkpoint.name, siblings=2), target)

    def allocate(self, slots: int) -> list[Pool]:
        self.pool = self.decoder.pool(slots)
        return [self.pool]

    def size(self, depth: int) -> int:
        siblings: int = self.options.siblings
        return depth * siblings

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        trees = [
            Tree(row, batch.end(r), self._within(batch.end(r), budget), self.options.siblings)
            for r, (row, budget) in enumerate(zip(batch.rows, budgets))
        ]
        plan, rows, last = self._catch_up(batch, trees)
        if plan.length and not self._chains(plan, rows, last):
            growing = self._level(plan, last, [(tree, ROOT) for tree in rows])
            while growing:
                plan = Plan()
                for tree in growing:
                    tree.plan(plan)
                frontier = [(tree, node) for tree in growing for node in tree.frontier]
                growing = self._level(plan, range(len(frontier)), frontier)
        return Draft([Guesses(tree.tokens, tree.parents, tree.confidence) for tree in trees])

    def _within(self, end: int, budget: Budget) -> Budget:
        """A row that outgrows the draft's own context is not drafted for."""
        depth = min(budget.depth, self.context - end)
        return budget._replace(depth=depth) if depth > 0 else Budget()

    def _catch_up(self, batch: Batch, trees: list[Tree]) -> tuple[Plan, list[Tree], list[int]]:
        """The rows of the first forward: everything that became certain since our last look; and of the trees that will grow
        which row is their last."""
        plan = Plan()
        last: list[int] = []
        rows: list[Tree] = []
        for r, (row, tree) in enumerate(zip(batch.rows, trees)):
            done, end = self.synced.setdefault(row, batch.starts[r]), batch.end(r)
            wanted = tree.budget.nodes > 0
            if end > self.context or not (wanted or batch.known[r] > 1):
                continue  # a row that does not guess catches up with single tokens when it does
            assert row.table is not None
            plan.chain(row.table.slots, done, self._readable(row.tokens[done:end]))
            self.synced[row] = end
            if wanted:
                last.append(plan.length - 1)
                rows.append(tree)
        return plan, rows, last

    def _chains(self, plan: Plan, trees: list[Tree], last: list[int]) -> bool:
        """All levels at once, where there is one guess a level and no processor to ask in between."""
        if self.options.siblings > 1 or not trees or any(tree.row.processors for tree in trees):
            return False
        order = sorted(zip(trees, last), key=lambda pair: -pair[0].budget.depth)
        chains = [Chain(at, tree.budget.depth, tree.row.law, stream_of(tree.row.seed, tree.row.index)) for tree, at in order]
        found = self.decoder.chain(plan.build(), self.pool, chains, self.vocabulary)
        for (tree, _), tokens in zip(order, found or ()):
            tree.tokens, tree.parents, tree.confidence = Guesses.chain(tokens, RANKED[:1] * len(tokens))
        return found is not None

    def _readable(self, tokens: list[int]) -> list[int]:
        """Ids that only the target has are read as id 0: a guess may be bad, never out of bounds."""
        if self.vocabulary == self.target.vocabulary:
            return tokens
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _level(self, plan: Plan, at: list[int] | range, rows: list[tuple[Tree, int]]) -> list[Tree]:
        """One forward; plan row at[i] holds the logits after node rows[i].  Returns the trees that can grow further."""
        x = self.decoder.forward(plan.build(), self.pool)
        if not rows:
            return []
        logits = self.decoder.logits(x, list(at))
        if logits.shape[1] != self.vocabulary:
            logits = logits[:, : self.vocabulary]
        children: dict[int, list[tuple[int, int, float]]] = {}
        for i, (tree, node) in enumerate(rows):
            found = children.setdefault(id(tree), [])
            ranked = tree.row.law.temperature > 0 or tree.siblings == 1
            tokens, shares = self.sampler.top(tree.row, tree.path_tokens(node), logits, tree.siblings, not ranked, i)
            found.extend((node, token, p) for token, p in zip(tokens, RANKED if ranked else shares))
        trees = {id(tree): tree for tree, _ in rows}
        for key, tree in trees.items():
            tree.grow(children[key])
        return [t for t in trees.values() if t.frontier and len(t.paths[t.frontier[0]]) < t.budget.depth and len(t.tokens) < t.budget.nodes]

    def forget(self, row: Row, reason: str) -> None:
        self.synced.pop(row, None)

    def filled(self, row: Row) -> int:
        return min(row.computed, self.synced.get(row, row.computed))


def _fits(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuses a draft that speaks another language.  Sizes may differ by padding where the tokens themselves agree."""
    ours, theirs = draft.spec.vocabulary, target.spec.vocabulary
    if ours != theirs and abs(ours - theirs) >= PADDING:
        raise ConfigError(f"{_sizes(draft, target)}: they do not share a tokenizer.  {_CURE}")
    a, b = draft.tokenizer, target.tokenizer
    if a is not None and b is not None:
        different = next(_differences(a.get_vocab(), b.get_vocab(), min(ours, theirs)), None)
        if different:
            raise ConfigError(f"{_sizes(draft, target)}, and their tokenizers disagree: {different}.  {_CURE}")


_CURE = 'Choose a draft of the same family, or set "vocab_mismatch": "allow" to guess among the common ids.'


def _sizes(draft: Checkpoint, target: Checkpoint) -> str:
    return (
        f"the draft {draft.name!r} has a vocabulary of {draft.spec.vocabulary}, the target {target.name!r} one of {target.spec.vocabulary}"
    )


def _differences(a: dict[str, int], b: dict[str, int], limit: int) -> Iterator[str]:
    for token, i in a.items():
        j = b.get(token)
        if i < limit and j != i:
            yield f"{token!r} is {i} in the draft and {'missing' if j is None else j} in the target"
