"""The tree of one row: every node gets as many children as its level says, and the best paths of all are kept.

Where guesses are chosen by the network's probabilities (greedily), the whole product is grown and the best of it is cut out, as IBM
does.  Where they are not, because the noise decides or because they are drawn, the rank among siblings says how likely a guess is; so which
places are worth a node is known before anything is guessed, and only these are grown.  That is also what a rule may judge: whether a
drawn node is there does not depend on its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree
from outrider.drafting.trees.sampled import DRAWN, RANKED
from outrider.heads.choose import Chooser
from outrider.sampling import random_streams

Shape = dict[int, list[int]]  # place -> the places of its children, by rank; ROOT is one


def best(parents: Sequence[int], joint: Sequence[float], candidates: int, nodes: int) -> list[int]:
    """The `candidates` likeliest paths as their nodes, of these the `nodes` likeliest, ascending; the parents of all are among them."""
    inner = set(parents)
    leaves = sorted((i for i in range(len(parents)) if i not in inner), key=lambda i: -joint[i])
    kept: set[int] = set()
    for node in leaves[:candidates]:
        while node != ROOT and node not in kept:
            kept.add(node)
            node = parents[node]
    return sorted(sorted(kept, key=lambda i: (-joint[i], i))[:nodes])


@lru_cache(maxsize=64)
def product(top_k: tuple[int, ...]) -> Shape:
    """All places, level by level."""
    shape: Shape = {}
    level, count = [ROOT], 0
    for k in top_k:
        for place in level:
            shape[place] = list(range(count, count + k))
            count += k
        level = [child for place in level for child in shape[place]]
    return shape


@lru_cache(maxsize=64)
def likely(top_k: tuple[int, ...], candidates: int, nodes: int, drawn: bool) -> Shape:
    """The places that are worth a node, by rank alone."""
    worth, whole = DRAWN if drawn else RANKED, product(top_k)
    parents: list[int] = []
    joint: list[float] = []
    for parent, children in whole.items():  # in the order of the places
        for rank in range(len(children)):
            parents.append(parent)
            joint.append((1.0 if parent == ROOT else joint[parent]) * worth[rank])
    kept = set(best(parents, joint, candidates, nodes))
    return {
        place: [i for i in children if i in kept]
        for place, children in whole.items()
        if place == ROOT or place in kept
    }


@dataclass
class Tree:
    """shape: of which places it may grow children.  lot: see `Drafter`."""

    row: Row
    shape: Shape
    drawn: bool = False
    stream_id: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    probs_of: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(
        default_factory=lambda: {ROOT: []}
    )  # node -> the tokens from the root to it
    place: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})
    joint: list[float] = field(default_factory=list)

    @property
    def draft_tree(self) -> DraftTree:
        draft_tree = DraftTree(self.tokens, self.parents, self.confidence)
        return (
            draft_tree._replace(distributions=self.distributions, probs_of=self.probs_of)
            if self.drawn
            else draft_tree
        )

    def cut(self, candidates: int, nodes: int) -> DraftTree:
        """Only the best of it."""
        return self.draft_tree.only(best(self.parents, self.joint, candidates, nodes))

    def open(self, node: int) -> bool:
        """Whether it should have children."""
        return bool(self.shape.get(self.place[node]))

    def token(self, node: int) -> int:
        """What stands at a node; at the root, the token that the target said last."""
        return self.row.tokens[-1] if node == ROOT else self.tokens[node]

    def grow(self, level: Sequence[int], logits: Tensor, choose: Chooser) -> None:
        """Children of these nodes; logits [len(level), V] stand behind them."""
        wanted = [self.shape[self.place[node]] for node in level]
        if self.drawn:
            for node, places, behind in zip(level, wanted, logits):
                self._draw(node, places, choose.distribution(self.row, self.paths[node], behind))
            return
        tokens, shares = choose.best(
            self.row, [self.paths[node] for node in level], logits, max(map(len, wanted))
        )
        for node, places, best, share in zip(level, wanted, tokens.tolist(), shares.tolist()):
            for place, token, probability in zip(places, best, share):
                if token >= 0:
                    self._add(node, place, token, probability, -1)

    def _draw(self, node: int, places: Sequence[int], distribution: Tensor | None) -> None:
        if distribution is None:
            return
        self.distributions.append(distribution)
        first = self.stream_id + len(self.tokens)
        for rank, token in enumerate(
            random_streams.children(self.row, distribution, range(first, first + len(places)))
        ):
            self._add(node, places[rank], token, DRAWN[rank], len(self.distributions) - 1)

    def _add(self, parent: int, place: int, token: int, probability: float, distribution: int) -> None:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(probability)
        self.probs_of.append(distribution)
        self.paths[node], self.place[node] = [*self.paths[parent], token], place
        self.joint.append((1.0 if parent == ROOT else self.joint[parent]) * probability)
