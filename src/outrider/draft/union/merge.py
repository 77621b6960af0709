"""Merging draft trees into one.

Chosen nodes that hold the same token after the same path become one node.  Nodes that were sampled from q
keep their distribution and are never merged, because a verification rule compares p with it.  Whether a
sampled node is kept depends on its rank among its siblings, never on its token: otherwise it would not be a
sample of q any more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.best_first import BestFirst
from outrider.drafting.trees.builder import TreeBuilder
from outrider.sampling.random_streams import without

# Assumed acceptance of the first of several sampled siblings, and the ratio of each further one to the one
# before.
FIRST_SAMPLE, NEXT_SAMPLE = 0.7, 0.3
CHOSEN = -1  # in place of the number of a distribution: the node was not sampled


@dataclass
class Merged:
    """One tree made of several.  node_of[k][i]: the node that node i of tree k has become, if it was kept."""

    tree: DraftTree
    node_of: list[dict[int, int]]


def merge(trees: Sequence[DraftTree], nodes: int, first: Sequence[int] = ()) -> Merged:
    """Merge trees into one of at most `nodes` nodes: the most probable ones, then the probes of each tree
    that fit as a whole.

    first: number of the first source of each tree, by default 0, 1, …
    """
    trees = [with_sources(tree, first[k] if first else k) for k, tree in enumerate(trees)]
    proposing = [k for k, tree in enumerate(trees) if tree.tokens]
    if len(proposing) == 1 and len(trees[proposing[0]].tokens) <= nodes:
        return only_tree(trees, proposing[0])
    if len({tree.repeats for tree in trees if tree.distributions}) > 1:
        trees = [with_independent_samples(tree) for tree in trees]
    merger = Merger(nodes)
    for tree in trees:
        merger.add(tree)
    merger.select()
    for k, tree in enumerate(trees):
        merger.add_probes(k, tree)
    tree = merger.builder.draft_tree._replace(source=merger.source, proposers=merger.proposers)
    return Merged(tree, merger.node_of)


def only_tree(trees: Sequence[DraftTree], only: int) -> Merged:
    """The tree of this number, the only one with nodes."""
    tree = trees[only]
    if len(trees) > 1:
        tree = tree._replace(proposers=[1 << only] * len(tree.tokens))
    node_of: list[dict[int, int]] = [{} for _ in trees]
    node_of[only] = {node: node for node in range(len(tree.tokens))}
    return Merged(tree, node_of)


@dataclass
class Node:
    """A candidate node.

    distribution: the number of its q, or CHOSEN.  source: of the first tree that has it.
    origins: the (tree, node) pairs that it stands for.
    """

    token: int
    confidence: float
    distribution: int
    source: int = 0
    origins: list[tuple[int, int]] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    # Those of `children` that were chosen, by token.
    chosen: dict[int, Node] = field(default_factory=dict)
    # Number of a distribution -> how many of `children` were sampled from it.
    samples: Counter[int] = field(default_factory=Counter)


class Candidate(NamedTuple):
    """A node whose parent is in the merged tree."""

    parent: int
    node: Node


class Merger:
    """A merge of trees.  builder: of the merged tree.  source: of its nodes.  node_of: as in `Merged`."""

    def __init__(self, nodes: int) -> None:
        self.root = Node(ROOT, 1.0, CHOSEN)
        self.distributions: list[Tensor] = []
        self.repeats = False
        self.builder = TreeBuilder(Budget(nodes, nodes))
        self.source: list[int] = []
        self.proposers: list[int] = []
        self.node_of: list[dict[int, int]] = []

    def add(self, tree: DraftTree) -> None:
        """Add the nodes of a tree, without its probes."""
        nodes = {ROOT: self.root}
        for i in range(tree.size):
            sampled = tree.distribution(i) is not None
            distribution = tree.probs_of[i] + len(self.distributions) if sampled else CHOSEN
            nodes[i] = self._child(nodes[tree.parents[i]], tree, i, distribution)
            nodes[i].origins.append((len(self.node_of), i))
        self.distributions.extend(tree.distributions)
        self.repeats |= tree.repeats
        self.node_of.append({})

    def _child(self, parent: Node, tree: DraftTree, i: int, distribution: int) -> Node:
        """Add node i of a tree as a child, or give the chosen one with its token the larger confidence."""
        token, confidence = tree.tokens[i], tree.confidence[i]
        if distribution != CHOSEN:
            confidence = FIRST_SAMPLE * NEXT_SAMPLE ** parent.samples[distribution]
            parent.samples[distribution] += 1
        elif token in parent.chosen:
            node = parent.chosen[token]
            node.confidence = max(node.confidence, confidence)
            return node
        node = Node(token, confidence, distribution, tree.source_of(i))
        parent.children.append(node)
        if distribution == CHOSEN:
            parent.chosen[token] = node
        return node

    def select(self) -> None:
        """Build the tree of the most probable nodes; siblings sampled from one distribution stay in order."""
        queue, builder = BestFirst[Candidate](), self.builder
        builder.distributions, builder.repeats = self.distributions, self.repeats
        for child in self.root.children:
            queue.push(child.confidence, Candidate(ROOT, child))
        while queue and builder.room:
            joint, (parent, node) = queue.pop()
            number = builder.add(parent, node.token, node.confidence, node.distribution)
            self.source.append(node.source)
            self.proposers.append(0)
            for k, i in node.origins:
                self.node_of[k][i] = number
                self.proposers[number] |= 1 << k
            for child in node.children:
                queue.push(joint * child.confidence, Candidate(number, child))

    def add_probes(self, k: int, tree: DraftTree) -> None:
        """Append the probes of tree k: all, or none if they do not fit or a node above them was dropped."""
        node_of, probes = self.node_of[k], range(tree.size, len(tree.tokens))
        above = {parent for parent in tree.parents[tree.size :] if ROOT < parent < tree.size}
        if above <= node_of.keys() and len(probes) <= self.builder.room:
            node_of.update(zip(probes, itertools.count(len(self.builder.tokens))))
            parents = [node_of.get(parent, ROOT) for parent in tree.parents[tree.size :]]
            self.builder.add_probes(parents, tree.tokens[tree.size :])
            self.source += map(tree.source_of, probes)
            self.proposers += [1 << k] * len(probes)


def with_sources(tree: DraftTree, first: int) -> DraftTree:
    """The tree with its sources numbered from `first`."""
    if not first:
        return tree
    return tree._replace(source=[first + tree.source_of(node) for node in range(len(tree.tokens))])


def with_independent_samples(tree: DraftTree) -> DraftTree:
    """The tree with a distribution for every sample, which merges with trees of independent samples."""
    if tree.repeats or not tree.distributions:
        return tree
    distributions: list[Tensor] = []
    probs_of: list[int] = []
    # (parent, distribution) -> what is left of it: several parents may share one, and each samples from all
    # of it.
    left: dict[tuple[int, int], Tensor] = {}
    for token, parent, distribution in zip(tree.tokens, tree.parents, tree.probs_of):
        if distribution == CHOSEN:
            probs_of.append(CHOSEN)
            continue
        probs_of.append(len(distributions))
        distributions.append(left.get((parent, distribution), tree.distributions[distribution]))
        left[parent, distribution] = without(distributions[-1], token)
    return tree._replace(distributions=distributions, probs_of=probs_of, repeats=True)
