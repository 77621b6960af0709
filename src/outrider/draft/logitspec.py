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

from collections.abc import Iterator, Sequence
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
JUDGED = 8  # rows of a step that are learned from, in turns


@dataclass
class LastEnds:
    """Where the tokens and pairs of a row ended last.  count: of indexed tokens, all but the last one."""

    single: dict[int, int] = field(default_factory=dict)
    pair: dict[tuple[int, int], int] = field(default_factory=dict)
    count: int = 0

    def extend(self, tokens: Sequence[int], length: int) -> None:
        """Index what was added since the last call to the first `length` tokens."""
        for end in range(self.count, length - 1):
            self.single[tokens[end]] = end
            if end:
                self.pair[tokens[end - 1], tokens[end]] = end
        self.count = max(self.count, length - 1)

    def after(self, before: int | None, token: int) -> tuple[int, int]:
        """(length, place of what followed) of the last match of a token and that before it; 0: none."""
        if before is not None and (end := self.pair.get((before, token))) is not None:
            return 2, end + 1
        end = self.single.get(token)
        return (0, 0) if end is None else (1, end + 1)


class Candidate(NamedTuple):
    """A token after node `parent`, and what follows it if it was right.

    path: the draft tokens before it.  kind: its index in `Acceptance`.  length, place: of the match that goes
    on behind it; length 0: none.
    """

    parent: int
    path: tuple[int, ...]
    token: int
    kind: int
    length: int
    place: int

    def follower(self, node: int, text: Sequence[int], size: int) -> Candidate | None:
        """The next one of the match, if there is one.

        node: of this one.  text, size: the tokens before the tree; behind them the match goes on in the path
        """
        if not self.length:
            return None
        path = (*self.path, self.token)
        token = text[self.place] if self.place < size else path[self.place - size]
        kind = Acceptance.of_match(self.length)
        return Candidate(node, path, token, kind, self.length + 1, self.place + 1)


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
    """runners_up: best first, of the token at position `at`, which is pending."""

    ends: LastEnds = field(default_factory=LastEnds)
    runners_up: Sequence[int] = ()
    at: int = -1

    def known(self, at: int) -> Sequence[int]:
        """The runners-up of the token at this position, as far as they are known."""
        return self.runners_up if self.at == at else ()


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
        self.steps = 0

    @classmethod
    def example(cls, target: Target) -> Logitspec:
        """A drafter that proposes all candidates, however improbable they are."""
        return cls(cls.Options(nodes=24, min_token_prob=0.0), target)

    def size(self, depth: int) -> int:
        return min(self.nodes, (1 + RANKS) * depth)

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        state = self._state(row)
        state.ends.extend(row.tokens, len(row.tokens))
        text = [*row.tokens, *ahead] if ahead else row.tokens
        size, queue = len(text), BestFirst[Candidate]()
        builder = TreeBuilder(budget.within(nodes=self.nodes))
        for candidate in _first(text, size, state.ends, state.known(size - 1)):
            self._push(queue, candidate, 1.0, budget)
        while queue and builder.room:
            joint, best = queue.pop()
            node = builder.add(best.parent, best.token, self.memory[best.kind])
            if (follower := best.follower(node, text, size)) is not None:
                self._push(queue, follower, joint, budget)
        return builder.draft_tree if builder.tokens else EMPTY_TREE

    def _state(self, row: Row) -> RowState:
        if (state := self.rows.get(row)) is None:
            state = self.rows[row] = RowState()
        return state

    def _push(self, queue: BestFirst[Candidate], candidate: Candidate, joint: float, budget: Budget) -> None:
        """Push a candidate that is within the depth, and probable enough."""
        joint *= self.memory[candidate.kind]
        if len(candidate.path) < budget.depth and joint >= self.options.min_token_prob:
            queue.push(joint, candidate)

    def observe(self, commit: Commit) -> None:
        self.steps += 1
        every = -(-len(commit.batch) // JUDGED)
        for i, step in enumerate(commit.batch):
            state = self._state(step.row)
            state.ends.extend(step.row.tokens, step.end)
            if step.emitted and (self.steps + i) % every == 0:
                self._judge(step, state)
            own = len(step.accepted) == len(step.emitted) - 1  # of a mix, another one's nodes may be accepted
            if own and step.topk:
                node, pending = step.accepted[-1] if step.accepted else ROOT, step.emitted[-1]
                state.runners_up = [token for token in step.topk[1 + node] if token != pending]
                state.at = step.end + len(step.emitted) - 1

    def _judge(self, step: RowStep, state: RowState) -> None:
        """Learn which candidates were right for the tokens that a step emitted.

        All are judged, drafted or not: one that fails for a while would else never be tried again.
        """
        text, size, right = step.row.tokens, step.end, None
        for candidate in _first(text, size, state.ends, state.known(size - 1)):
            self.memory.learn(candidate.kind, candidate.token == step.emitted[0])
            if candidate.token == step.emitted[0]:
                right = candidate.follower(ROOT, text, size)
        for token in step.emitted[1:]:
            if right is None:
                return
            self.memory.learn(right.kind, right.token == token)
            right = right.follower(ROOT, text, size) if right.token == token else None

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)


def _first(text: Sequence[int], size: int, ends: LastEnds, runners_up: Sequence[int]) -> Iterator[Candidate]:
    """Candidates after the first `size` tokens of a text: what followed the last match; the runners-up."""
    last, before = text[size - 1], text[size - 2] if size > 1 else None
    length, place = ends.after(before, last)
    matched = -1
    if length:
        matched = text[place]
        yield Candidate(ROOT, (), matched, Acceptance.of_match(length), length + 1, place + 1)
    for rank, token in enumerate(runners_up):
        if token != matched:
            yield Candidate(ROOT, (), token, rank, *ends.after(last, token))
