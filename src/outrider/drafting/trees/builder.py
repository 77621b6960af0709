"""Draft trees under construction: nodes in the order of their addition, every parent before its children."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import NodeFeatures
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.drafting.view import NO_VIEW, View
from outrider.sampling import random_streams

# Estimated probability that the first, second … token by draft logit with noise is the target's pick.  The
# noise is shared, so the rank predicts more than q: 4 levels of 3 siblings on the built-in pair at T = 0.8
# gave 2.70 tokens a step with these, 2.40 with q.
RANK_CONFIDENCE = [0.7, 0.15, 0.06, 0.03] + [0.02 * 0.8**i for i in range(60)]
# Estimated probability that the first, second … sample from q is accepted.  The token hardly matters: p/q
# is as likely to be large at any.  The same tree under rejection: 3.03 tokens a step with these, 2.79 with q.
SAMPLE_CONFIDENCE = [0.6, 0.25, 0.1, 0.05] + [0.02 * 0.8**i for i in range(60)]

Children = Callable[[Row, Tensor, range, bool], list[int]]  # `random_streams.children`, or `Sampler.children`


class TreeBuilder:
    """A draft tree within a budget.

    repeats: siblings are independent samples; otherwise they are sampled without replacement.
    """

    def __init__(self, budget: Budget, repeats: bool = False) -> None:
        self.budget, self.repeats, self.probes = budget, repeats, 0
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.distributions: list[Tensor] = []
        self.probs_of: list[int] = []
        self._depths: list[int] = []  # of each node; 1 for a child of the root
        self._chosen: set[tuple[int, int]] = set()  # (parent, token) of the nodes that were not sampled

    def add(self, parent: int, token: int, confidence: float, distribution: int = -1) -> int:
        """Add a child of `parent` (ROOT or a node) and return its number.

        distribution: index in `distributions` of what the token was sampled from, -1 for a chosen one.  A
        chosen token must differ from its siblings.
        """
        node, budget = len(self.tokens), self.budget
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        assert node < budget.nodes and depth <= budget.depth, "a node beyond the budget"
        if distribution < 0:
            assert (parent, token) not in self._chosen, "two siblings with one token"
            self._chosen.add((parent, token))
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        self.probs_of.append(distribution)
        self._depths.append(depth)
        return node

    def add_probes(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Add nodes that are evaluated and never accepted.  No node but probes may follow."""
        self.parents += parents
        self.tokens += tokens
        self.confidence += [0.0] * len(tokens)
        self.probs_of += [-1] * len(tokens)
        self.probes += len(tokens)

    def add_distribution(self, probs: Tensor) -> int:
        """Add a distribution q, float64 [V], that children are sampled from.  Returns its index."""
        self.distributions.append(probs)
        return len(self.distributions) - 1

    @property
    def room(self) -> int:
        """Nodes that the budget has left."""
        return self.budget.nodes - len(self.tokens)

    @property
    def draft_tree(self) -> DraftTree:
        """The finished tree."""
        tree = DraftTree(self.tokens, self.parents, self.confidence, probes=self.probes)
        if not self.distributions:
            return tree
        return tree._replace(distributions=self.distributions, probs_of=self.probs_of, repeats=self.repeats)


class LevelBuilder(TreeBuilder):
    """The tree of a row that grows level by level.

    frontier: the nodes whose children come next, all of one depth.  paths[node]: the nodes from the root to
    `node`, which is the last of them.  joint[node]: product of the confidences along it.
    stream_id: added to a node's number to get the number of its random stream.  view: the slots of the row
    and of its draft tokens, of which node i has number base + i; NO_VIEW for a drafter whose nodes have no
    K/V.  base: position of the first draft token.
    """

    def __init__(
        self,
        row: Row,
        base: int,
        budget: Budget,
        view: View = NO_VIEW,
        stream_id: int = 0,
        repeats: bool = False,
    ) -> None:
        super().__init__(budget, repeats)
        self.row, self.base, self.view, self.stream_id = row, base, view, stream_id
        self.frontier = [ROOT]
        self.paths: dict[int, list[int]] = {ROOT: []}
        self.joint: dict[int, float] = {ROOT: 1.0}

    def add(self, parent: int, token: int, confidence: float, distribution: int = -1) -> int:
        node = super().add(parent, token, confidence, distribution)
        self.paths[node] = [*self.paths[parent], node]
        self.joint[node] = self.joint[parent] * confidence
        return node

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        return [self.tokens[i] for i in self.paths[node]]

    @property
    def growing(self) -> bool:
        """Whether another level fits the budget, and a joint confidence reaches the budget's floor."""
        depth = len(self.paths[self.frontier[0]]) if self.frontier else self.budget.depth
        if depth >= self.budget.depth or self.room <= 0:
            return False
        return not depth or max(self.joint[node] for node in self.frontier) >= self.budget.floor

    def token(self, node: int) -> int:
        """The token of a node; of the root, the row's pending token."""
        return self.row.tokens[-1] if node == ROOT else self.tokens[node]

    @property
    def frontier_tokens(self) -> list[int]:
        """The input tokens of the next forward."""
        return [self.token(node) for node in self.frontier]

    def add_samples(
        self,
        parent: int,
        distribution: int,
        count: int,
        children: Children = random_streams.children,
        confidences: Sequence[float] = SAMPLE_CONFIDENCE,
    ) -> list[int]:
        """Add at most `count` children sampled from distributions[distribution]; returns their numbers.

        The count must not depend on any sampled token.  Otherwise the nodes are no samples of q.
        """
        first = self.stream_id + len(self.tokens)
        streams = range(first, first + count)
        tokens = children(self.row, self.distributions[distribution], streams, self.repeats)
        pairs = zip(tokens, confidences)
        return [self.add(parent, token, confidence, distribution) for token, confidence in pairs]

    @property
    def table(self) -> array[int]:
        """The slots of the view."""
        return self.view.slots

    @property
    def frontier_paths(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and slots from the root to every node of the frontier.  For views that leave no slot out."""
        found: list[tuple[list[int], list[int]]] = []
        for node in self.frontier:
            slots = [self.table[self.base + i] for i in self.paths[node]]
            found.append((self.path_tokens(node), slots))
        return found

    def add_to(self, step_input: StepInput) -> None:
        """Add the frontier as rows of the next forward."""
        for node in self.frontier:
            self.view.node(step_input, self.base, self.paths[node], self.tokens[node])


def chain_tree(tokens: list[int], features: Sequence[NodeFeatures], probs: Tensor | None) -> DraftTree:
    """A chain of chosen tokens, with their features if measured, or of samples from the rows of probs."""
    if probs is None:
        best = [own[0] for own in features] if features else RANK_CONFIDENCE[:1] * len(tokens)
        return DraftTree.chain(tokens, best)
    tree = DraftTree.chain(tokens, SAMPLE_CONFIDENCE[:1] * len(tokens))
    return tree._replace(distributions=[*probs], probs_of=range(len(tokens)))
