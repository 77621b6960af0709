"""LogitSpec (Liu et al. 2025, arXiv 2507.01449): prompt lookup that also looks up the runners-up.

The logits that gave the pending token rank other tokens, and one of these often follows next.  Each is a
draft token after the pending one, and is continued by what followed the two, or it alone, earlier in the
request.  What followed the pending token itself is continued beside them:

    text          … x y a b … y c d …                 the pending token is y, its runners-up are a, c
    tree          y ─┬─ a ── b ── …                   after x y, the longest match
                     └─ c ── d ── …                   a runner-up, and what followed y c

A table of acceptance by rank of a runner-up, and by length of a match, orders the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from outrider.core.row import Row
from outrider.core.step import Commit, Needs, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, DraftTree
from outrider.core.validate import Checked, Share, whole
from outrider.drafting.base import Target, TextDrafter
from outrider.drafting.best_first import BestFirst
from outrider.drafting.trees.builder import TreeBuilder

RANKS = 8  # logits that are asked for; one of them is as a rule that of the pending token
LONGEST = 6  # tokens of a match beyond which all are alike
RATE = 0.02  # of the moving average of an acceptance
PUBLISHED = 64  # nodes of a tree


@dataclass
class LastEnds:
    """Where the tokens and pairs of a row ended last.  count: of indexed tokens, all but the last one."""

    single: dict[int, int] = field(default_factory=dict)
    pair: dict[tuple[int, int], int] = field(default_factory=dict)
    count: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were added since the last call."""
        for end in range(self.count, len(tokens) - 1):
            self.single[tokens[end]] = end
            if end:
                self.pair[tokens[end - 1], tokens[end]] = end
        self.count = max(self.count, len(tokens) - 1)

    def after(self, before: int | None, token: int) -> tuple[int, int]:
        """(length, place of what followed) of the last match of a token and that before it; 0: none."""
        if before is not None and (end := self.pair.get((before, token))) is not None:
            return 2, end + 1
        end = self.single.get(token)
        return (0, 0) if end is None else (1, end + 1)


class Candidate(NamedTuple):
    """A token after node `parent`.

    kind: its index in `Acceptance`.  length, place: of the match that goes on behind it; length 0: none.
    """

    parent: int
    depth: int
    token: int
    kind: int
    length: int
    place: int


class Acceptance(list[float]):
    """Of runners-up by rank, then of tokens after a match of 1, 2, … tokens."""

    def __init__(self) -> None:
        super().__init__([0.2 * 0.7**rank for rank in range(RANKS)])
        self += [1 - 0.7 * 0.8**length for length in range(1, LONGEST + 1)]

    @staticmethod
    def of_match(length: int) -> int:
        return RANKS + min(length, LONGEST) - 1

    def learn(self, kind: int, right: bool) -> None:
        self[kind] += RATE * (right - self[kind])


@dataclass
class RowState:
    """runners_up: best first, of the token at position `at`, which is pending.  kinds: of the last tree's
    nodes."""

    ends: LastEnds = field(default_factory=LastEnds)
    runners_up: Sequence[int] = ()
    at: int = -1
    kinds: list[int] = field(default_factory=list)


class Logitspec(TextDrafter):
    demo: ClassVar = {"LogitSpec": {}}
    tunable: ClassVar = {"nodes": (4, 16, 32), "min_token_prob": (0.02, 0.1, 0.2)}
    depth = 6
    needs = Needs(topk=RANKS)

    @dataclass(frozen=True)
    class Options(Checked):
        """nodes: maximum size of a tree; None means the published 64, or 7 on a CPU, where every node costs
            time.
        min_token_prob: minimum joint probability of a node.
        """

        nodes: Annotated[int, whole(1, 1 << 10)] | None = None
        min_token_prob: Share = 0.05

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        self.nodes = target.nodes(options.nodes, PUBLISHED)
        self.memory = Acceptance()
        self.rows: dict[Row, RowState] = {}

    @classmethod
    def example(cls, target: Target) -> Logitspec:
        """A drafter that proposes all candidates, however improbable they are."""
        return cls(cls.Options(nodes=24, min_token_prob=0.0), target)

    def size(self, depth: int) -> int:
        return min(self.nodes, (1 + RANKS) * depth)

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        state = self.rows.setdefault(row, RowState())
        state.ends.extend(row.tokens)
        tokens = [*row.tokens, *ahead] if ahead else row.tokens
        runners_up = state.runners_up if state.at == len(tokens) - 1 else ()
        tree, kinds = self._tree(tokens, state.ends, runners_up, budget.within(nodes=self.nodes))
        if not ahead:
            state.kinds = kinds
        return tree

    def _tree(
        self, tokens: Sequence[int], ends: LastEnds, runners_up: Sequence[int], budget: Budget
    ) -> tuple[DraftTree, list[int]]:
        """The tree after these tokens, and the kind of each node."""
        queue, builder, kinds = BestFirst[Candidate](), TreeBuilder(budget), list[int]()
        for candidate in self._first(tokens, ends, runners_up):
            self._push(queue, candidate, 1.0, budget)
        while queue and builder.room:
            joint, best = queue.pop()
            node = builder.add(best.parent, best.token, self.memory[best.kind])
            kinds.append(best.kind)
            if best.length and best.place < len(tokens):
                kind = self.memory.of_match(best.length)
                token, place = tokens[best.place], best.place + 1
                follower = Candidate(node, best.depth + 1, token, kind, best.length + 1, place)
                self._push(queue, follower, joint, budget)
        return (builder.draft_tree if kinds else EMPTY_TREE), kinds

    def _push(self, queue: BestFirst[Candidate], candidate: Candidate, joint: float, budget: Budget) -> None:
        """Push a candidate that is within the depth, and probable enough."""
        joint *= self.memory[candidate.kind]
        if candidate.depth <= budget.depth and joint >= self.options.min_token_prob:
            queue.push(joint, candidate)

    def _first(self, tokens: Sequence[int], ends: LastEnds, runners_up: Sequence[int]) -> list[Candidate]:
        """Candidates of the first level: what followed the last match, and the runners-up."""
        last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else None
        found, seen = list[Candidate](), set[int]()
        length, place = ends.after(before, last)
        if length and place < len(tokens):
            kind = self.memory.of_match(length)
            found.append(Candidate(ROOT, 1, tokens[place], kind, length + 1, place + 1))
            seen.add(tokens[place])
        for rank, token in enumerate(runners_up):
            if token not in seen:
                found.append(Candidate(ROOT, 1, token, rank, *ends.after(last, token)))
        return found

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            state = self.rows.setdefault(step.row, RowState())
            if step.tree.tokens:
                self._judge(step, state.kinds)
            own = len(step.accepted) == len(step.emitted) - 1  # of a mix, another one's nodes may be accepted
            if own and step.topk:
                node, pending = step.accepted[-1] if step.accepted else ROOT, step.emitted[-1]
                state.runners_up = [token for token in step.topk[1 + node] if token != pending]
                state.at = step.end + len(step.emitted) - 1

    def _judge(self, step: RowStep, kinds: Sequence[int]) -> None:
        """Learn which candidates were right among the children of the accepted path."""
        tree, accepted = step.tree, step.accepted
        path = {ROOT, *accepted}
        for node in range(tree.size):
            if tree.parents[node] in path:
                proposed = node if step.kept is None else step.kept[node]
                self.memory.learn(kinds[proposed], node in accepted)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
