"""STAND (Song et al. 2025, arXiv 2506.04708): n-grams of all requests, with the target's distribution there.

For every n-gram of up to LONGEST tokens the memory keeps the mean of the target's distributions after it,
over the RANKS likeliest tokens.  Draft tokens are sampled from that of the longest known n-gram, by
Gumbel-top-k.  The noise is that of the target's own pick at the position, so that a good estimate gives its
token.  Which nodes a tree has is decided by the measured acceptance of ranks, by the length of the n-gram.

Rejected nodes contribute to the memory, too.  Requests with a cache_salt have one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from outrider.core.noise import gumbel_of, key_in
from outrider.core.row import Row
from outrider.core.step import Commit, Needs, RowStep
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.core.validate import Checked, Share, whole
from outrider.drafting.base import Target, TextDrafter
from outrider.drafting.best_first import BestFirst
from outrider.drafting.salts import SaltedMemory, share
from outrider.drafting.trees.builder import TreeBuilder

RANKS = 8
LONGEST = 4
RATE = 0.02  # of the moving average of a rank's acceptance
NODES = 80
# Of ranks at first, after an n-gram of one token; each further token moves a third of what is missing.
ACCEPTANCE = (0.4, 0.15, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02)


def first_acceptance() -> list[list[float]]:
    """By length of the n-gram and rank."""
    found = [[0.0] * RANKS, list(ACCEPTANCE)]
    for _ in range(LONGEST - 1):
        best, *others = found[-1]
        found.append([best + (1 - best) / 3, *(other * 2 / 3 for other in others)])
    return found


@dataclass
class NgramMemory:
    """after: n-gram -> (observations, token -> probability), least recently observed first.

    most: n-grams that are kept.  acceptance: of each rank after n-grams of 0, 1 … LONGEST tokens.
    """

    most: int
    after: dict[tuple[int, ...], tuple[int, dict[int, float]]] = field(default_factory=dict)
    acceptance: list[list[float]] = field(default_factory=first_acceptance)

    def find(self, context: Sequence[int]) -> tuple[int, Mapping[int, float]]:
        """Length of the longest known n-gram at the end of a context, and what follows; (0, {}) for none."""
        for n in range(min(LONGEST, len(context)), 0, -1):
            if known := self.after.get(tuple(context[-n:])):
                return n, known[1]
        return 0, {}

    def observe(self, context: Sequence[int], ids: Sequence[int], logits: Sequence[float]) -> None:
        """Add the target's distribution after a context: its largest logits.

        Tokens whose logit is not finite, or whose probability is 0 in float64, are left out.
        """
        finite = {token: logit for token, logit in zip(ids, logits) if math.isfinite(logit)}
        if not finite:
            return
        most = max(finite.values())
        weights = {token: math.exp(logit - most) for token, logit in finite.items()}
        total = sum(weights.values())
        for n in range(1, min(LONGEST, len(context)) + 1):
            ngram = tuple(context[-n:])
            seen, known = self.after.pop(ngram, (0, {}))
            mean = {token: p * seen / (seen + 1) for token, p in known.items()}
            for token, weight in weights.items():
                mean[token] = mean.get(token, 0.0) + weight / total / (seen + 1)
            known = {token: p for token, p in mean.items() if p > 0}  # its logarithm is taken
            best = sorted(known, key=lambda token: -known[token])[:RANKS]
            self.after[ngram] = seen + 1, {token: mean[token] for token in best}
            if len(self.after) > self.most:
                del self.after[next(iter(self.after))]


class Stand(TextDrafter):
    demo: ClassVar = {"STAND": {}}
    tunable: ClassVar = {"nodes": (4, 16, 32), "min_token_prob": (0.02, 0.1, 0.2)}
    depth = 6
    needs = Needs(topk=RANKS, logits=True)

    @dataclass(frozen=True)
    class Options(Checked):
        """nodes: maximum size of a tree; None means 80, or 7 on a CPU, where every node costs time.
        min_token_prob: minimum joint probability of a node.  max_ngrams: that are kept.
        """

        nodes: Annotated[int, whole(1, 1 << 20)] | None = None
        min_token_prob: Share = 0.05
        max_ngrams: Annotated[int, whole(1, 1 << 30)] = 1 << 16

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        self.nodes = target.nodes(options.nodes, NODES)
        self.memory = NgramMemory(options.max_ngrams)
        self.salted = SaltedMemory(lambda: NgramMemory(share(options.max_ngrams)))

    @classmethod
    def example(cls, target: Target) -> Stand:
        """A drafter that proposes all it knows."""
        return cls(cls.Options(nodes=24, min_token_prob=0.0), target)

    def size(self, depth: int) -> int:
        return max(depth, self.nodes)

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        memory, base = self._known(row), len(row.tokens) + len(ahead)
        tree, waiting = TreeBuilder(budget.within(nodes=self.nodes)), BestFirst[tuple[int, int, float]]()
        paths: dict[int, list[int]] = {ROOT: []}  # tokens from the root to each node
        context = [*row.tokens[-LONGEST:], *ahead][-LONGEST:]

        def expand(node: int, joint: float) -> None:
            n, tokens = self._ranked(memory, row, [*context, *paths[node]], base + len(paths[node]))
            for rank, token in enumerate(tokens):
                p = memory.acceptance[n][rank]
                if joint * p >= self.options.min_token_prob:
                    waiting.push(joint * p, (node, token, p))

        expand(ROOT, 1.0)
        while waiting and tree.room:
            joint, (parent, token, p) = waiting.pop()
            node = tree.add(parent, token, p)
            paths[node] = [*paths[parent], token]
            if len(paths[node]) < budget.depth:
                expand(node, joint)
        return tree.draft_tree

    def _known(self, row: Row) -> NgramMemory:
        """The memory that a row is drafted from, and contributes to."""
        memory: NgramMemory = self.memory if row.cache_salt is None else self.salted.of(row)
        return memory

    @staticmethod
    def _ranked(
        memory: NgramMemory, row: Row, context: Sequence[int], position: int
    ) -> tuple[int, Sequence[int]]:
        """Length of the n-gram found, and tokens for this position, the target's likeliest pick first."""
        n, probs = memory.find(context)
        temperature = row.distribution.temperature
        if not probs or not temperature:
            return n, [*probs]
        noise = gumbel_of(key_in(row.stream, position), torch.tensor([*probs])).tolist()
        scores = {token: math.log(p) / temperature + own for (token, p), own in zip(probs.items(), noise)}
        return n, sorted(scores, key=lambda token: -scores[token])

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.topk:
                self._observe(self._known(step.row), step)

    def _observe(self, memory: NgramMemory, step: RowStep) -> None:
        """Judge the ranks of the tokens that were emitted, and add what the target predicted."""
        before, row = step.row.tokens[max(0, step.end - LONGEST) : step.end], step.row
        for i, token in enumerate(step.emitted):
            n, ranked = self._ranked(memory, row, [*before, *step.emitted[:i]], step.end + i)
            for rank, drafted in enumerate(ranked):
                memory.acceptance[n][rank] += RATE * ((drafted == token) - memory.acceptance[n][rank])
        contexts = {ROOT: before}
        for node, token in enumerate(step.tree.tokens):
            contexts[node] = [*contexts[step.tree.parents[node]], token]
        for context, ids, logits in zip(contexts.values(), step.topk, step.top_logits):
            memory.observe(context, ids, logits)

    def forget(self, row: Row, reason: str) -> None:
        self.salted.forget(row)
