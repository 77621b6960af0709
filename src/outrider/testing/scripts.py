"""Scripts for the scripted drafter: trees around a known continuation, to test verification and caching."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.core.row import Row
from outrider.core.tree import Budget, DraftTree
from outrider.draft.scripted import Script as Script
from outrider.outputs import CompletionOutput
from outrider.testing.checkpoints import VOCABULARY


class KnownTexts:
    """Outputs of plain decoding by (prompt, seed, sample); scripts look up the continuation of a row here."""

    def __init__(self) -> None:
        self.texts: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    def learn(self, prompt: Sequence[int], seed: int, outputs: Sequence[CompletionOutput]) -> None:
        for output in outputs:
            self.texts[tuple(prompt), seed, output.index] = [*prompt, *output.token_ids]

    def continuation(self, row: Row, count: int) -> list[int]:
        """The next tokens of the row, `count` at most; [] if its text is unknown."""
        text = self.texts.get((tuple(row.tokens[: row.prompt]), row.seed, row.index), [])
        length = len(row.tokens)
        return text[length : length + count] if text[:length] == row.tokens else []


class Scripts:
    """Adversarial scripts over a vocabulary. The tokens of plain decoding come from `known`.

    known.learn(prompt, seed, plain.generate(prompt, params)[0].outputs)
    llm.use({"method": "scripted", "script": Scripts(known, 32000).hidden, "nodes": 40})
    """

    def __init__(self, known: KnownTexts, vocabulary: int = VOCABULARY) -> None:
        self.known, self.vocabulary = known, vocabulary

    def right(self, row: Row, budget: Budget) -> DraftTree:
        """A chain of correct tokens."""
        return _chain(self.known.continuation(row, budget.depth))

    def wrong(self, row: Row, budget: Budget) -> DraftTree:
        """A binary tree of up to 14 nodes, each wrong at its depth."""
        correct = self.known.continuation(row, budget.depth + 1) or [0]
        parents = [(i - 2) // 2 if i >= 2 else -1 for i in range(min(14, budget.nodes))]
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        right = [correct[min(depth, len(correct) - 1)] for depth in depths]
        return _tree([self._other(token, i) for i, token in enumerate(right)], parents)

    def wide(self, row: Row, budget: Budget) -> DraftTree:
        """24 siblings at the root with the correct token among them, and three children of each."""
        rng, correct = _rng(row), self.known.continuation(row, 2)
        top = rng.sample(range(self.vocabulary), 24)
        top = top if set(correct[:1]) <= set(top) else [*top[:11], correct[0], *top[12:]]
        tokens, parents = list(top), [-1] * len(top)
        for i in range(len(top)):
            children = [*rng.sample(range(self.vocabulary), 2), *correct[1:]]
            rng.shuffle(children)
            tokens += children
            parents += [i] * len(children)
        return _tree(tokens, parents)

    def deep(self, row: Row, budget: Budget) -> DraftTree:
        """A chain as deep as the budget: five correct tokens, a wrong one, then tokens that come too late."""
        correct = self.known.continuation(row, budget.depth)
        return _chain([self._other(token) if i == 5 else token for i, token in enumerate(correct)])

    def hidden(self, row: Row, budget: Budget, nodes: int = 40) -> DraftTree:
        """The correct path within a tree that grows at random.

        Wrong nodes carry correct tokens at other depths, with siblings between the correct nodes.
        """
        rng, correct = _rng(row), self.known.continuation(row, budget.depth)
        tokens: list[int] = []
        parents: list[int] = []
        node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        tip, reached = -1, 0  # the last correct node, and how many there are
        while len(tokens) < nodes:
            right = reached < len(correct) and rng.random() < 2.0 * len(correct) / nodes
            if right:
                pair = tip, correct[reached]
            else:
                parent = rng.randrange(-1, len(tokens))
                reuse = bool(correct) and rng.random() < 0.5
                pair = parent, rng.choice(correct) if reuse else rng.randrange(self.vocabulary)
            if pair not in node_of:
                node_of[pair] = len(tokens)
                parents.append(pair[0])
                tokens.append(pair[1])
            if right:
                tip, reached = node_of[pair], reached + 1
        return _tree(tokens, parents)

    def huge(self, row: Row, budget: Budget) -> DraftTree:
        """`hidden` with 100 nodes: ancestors do not fit into one 64-bit word."""
        return self.hidden(row, budget, 100)

    def messy(self, row: Row, budget: Budget) -> DraftTree:
        """The correct chain among repeated siblings, invalid ids and parents that come too late."""
        tokens, parents, tip = [-5, self.vocabulary, 7, 7], [-1, -1, 0, 90], -1
        for token in self.known.continuation(row, budget.depth):
            tokens += [token, token, self.vocabulary + 3, self._other(token)]
            parents += [tip, tip, tip, tip]
            tip = len(tokens) - 4
        return _tree(tokens, parents)

    def _other(self, token: int, offset: int = 0) -> int:
        return (token + 1 + offset) % self.vocabulary


def _rng(row: Row) -> random.Random:
    """The same random numbers whenever this row has this length."""
    return random.Random(len(row.tokens) * 31 + row.index)


def _tree(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(tokens, parents, [0.5] * len(tokens))


def _chain(tokens: list[int]) -> DraftTree:
    return DraftTree.chain(tokens, [0.5] * len(tokens))
