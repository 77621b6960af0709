"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): propose what followed the last tokens earlier, here
or in finished requests.

Every text has an index of the places where its runs of 1, 2, 4 and 8 tokens ended (backends/run_index.py).
A match of n tokens is looked up in the list of the longest run <= n.  The most recent places give the
frequencies of what follows.  Longer matches earn more draft tokens.  The match with the highest expected
number of accepted tokens is used.

Where a prompt ends with the same tokens as an earlier one, the output of the earlier request is the draft, as
long as the new output repeats it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from outrider.backends.run_index import RUNS, Index
from outrider.backends.select import run_index
from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.core.tree import EMPTY_TREE, Budget, DraftTree
from outrider.core.validate import Checked, Flag, Share, real, whole
from outrider.drafting.base import Target, TextDrafter
from outrider.drafting.matches import MatchAcceptance, TreeLimits, continuation_tree
from outrider.drafting.salts import SaltedMemory, share

# Tokens of finished requests in one index.  The first one is small: it is written at random, and stays in the
# caches of a processor.
SEGMENT, FIRST_SEGMENT = 1 << 18, 1 << 14
TOGETHER = 16  # texts that are indexed together, unless a look-up needs them: in a row they take a quarter
SEPARATOR = -1  # token id between two requests
ROUNDING = 1e-9
GRADE, GRADES = 24, 3  # repeated tokens for each grade of a draft, and grades at most
LONG, MATCHED = 16, GRADES + 1  # tokens that have to match anywhere else, and the grade of such a draft
FACTOR = real("a number in (0, 64]", lambda value: 0 < value <= 64)


class FinishedTexts:
    """The texts of the last `max_requests` finished requests, in segments of growing size.

    A segment goes when all of it is outdated.  unindexed: the newest texts.
    outputs: the last one behind each end of a prompt, unless an earlier one begins with it.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.indexed: deque[Index] = deque()
        self.unindexed: list[array[int]] = []
        self.ends: deque[tuple[Index, int]] = deque()  # where each request ends, oldest first
        self.outputs: dict[tuple[int, ...], array[int]] = {}

    def add(self, tokens: list[int], prompt: int) -> None:
        """Add the last tokens of a request, of which the first `prompt` are of its prompt."""
        if not self.max_requests:
            return
        prompt_end, output = tuple(tokens[:prompt]), array("i", tokens[prompt:])
        earlier = self.outputs.pop(prompt_end, output)
        # A request that was aborted, or asked for fewer tokens, has a part of the answer only.
        self.outputs[prompt_end] = earlier if earlier[: len(output)] == output else output
        if len(self.outputs) > self.max_requests:
            del self.outputs[next(iter(self.outputs))]
        self.unindexed.append(array("i", tokens))
        if len(self.unindexed) >= min(TOGETHER, self.max_requests):
            self._index()

    @property
    def segments(self) -> deque[Index]:
        """Indexes of all texts."""
        if self.unindexed:
            self._index()
        return self.indexed

    def _index(self) -> None:
        segments = self.indexed
        for tokens in self.unindexed:
            length = len(tokens) + 1
            if not segments or segments[-1].length + length > segments[-1].capacity:
                usual = min(SEGMENT, FIRST_SEGMENT << len(segments))
                segments.append(run_index(max(usual, length)))
            segments[-1].extend([*tokens, SEPARATOR])
            self.ends.append((segments[-1], segments[-1].length))
            if len(self.ends) > self.max_requests:
                index, end = self.ends.popleft()
                index.first = end
                while len(segments) > 1 and segments[0].first == segments[0].length:
                    segments.popleft()
        self.unindexed = []


@dataclass
class RowState:
    """Per-row state.

    length: of the match that the last draft tokens came from.
    matched: whether the row's end had a long match when it had `graded` tokens.
    """

    index: Index
    acceptance: MatchAcceptance
    length: int = 0
    graded: int = 0
    matched: bool = False


@dataclass
class Repeat:
    """An earlier output that a row repeats; no tokens any more once it differs.

    end: tokens of the prompts that agree.  count: tokens of the output that do.  drafted: the last draft of
    the row comes from it.
    """

    tokens: array[int]
    end: int = 0
    count: int = 0
    drafted: bool = False

    def follow(self, output: Sequence[int]) -> None:
        """Advance by further tokens of the row's output."""
        if self.tokens[self.count : self.count + len(output)] != array("i", output):
            self.tokens = array("i")
        self.count += len(output)


class Proposal(NamedTuple):
    """A tree, the expected number of its accepted nodes, and the length of the match that it comes from."""

    tree: DraftTree = EMPTY_TREE
    expected: float = 0.0
    length: int = 0


class MatchGroup(NamedTuple):
    """Matches of `shortest` … `longest` tokens, which are found in the list of one run.

    order: of that run (backends/run_index.py)
    """

    order: int
    shortest: int
    longest: int


def match_groups(longest: int) -> list[MatchGroup]:
    """The groups of all matches of at most `longest` tokens, the longest first."""
    above = [longest, *(run - 1 for run in RUNS)]
    groups = [MatchGroup(order, run, min(longest, above[order])) for order, run in enumerate(RUNS)]
    return [group for group in groups if group.shortest <= group.longest]


class Suffix(TextDrafter):
    sees_plain = False
    demo: ClassVar = {"suffix decoding": {}}
    tunable: ClassVar = {
        "suffix_decoding_max_spec_factor": (0.5, 2.0, 4.0),
        "suffix_decoding_min_token_prob": (0.03, 0.2, 0.4),
        "suffix_decoding_use_tree_spec": (True,),
    }

    @dataclass(frozen=True)
    class Options(Checked):
        """Options under the names of vLLM and Arctic Inference, each after suffix_decoding_.

        max_tree_depth: tokens of a match and of the draft after it, together.
        max_cached_requests: finished requests that are kept, and as many of those with a cache_salt; 0 for
            none.
        max_spec_factor: draft tokens for each token of the match.
        min_token_prob: minimum joint probability of a node.
        use_tree_spec: propose trees instead of chains, with the same number of nodes.
        """

        suffix_decoding_max_tree_depth: Annotated[int, whole(2, 1024)] = 24
        suffix_decoding_max_cached_requests: Annotated[int, whole(0)] = 10000
        suffix_decoding_max_spec_factor: Annotated[float, FACTOR] = 1.0
        suffix_decoding_min_token_prob: Share = 0.1
        suffix_decoding_use_tree_spec: Flag = False

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        total, self.factor = options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_spec_factor
        # The longest draft: the match that earns it and the draft itself make up `total` tokens.
        self.depth = max(1, int(total * self.factor / (1 + self.factor)))
        self.longest = total - 1
        self.groups = match_groups(self.longest)
        self.siblings = 64 if options.suffix_decoding_use_tree_spec else 1
        self.min_prob = options.suffix_decoding_min_token_prob
        most = options.suffix_decoding_max_cached_requests
        self.memory = FinishedTexts(most)
        self.salted = SaltedMemory(lambda: FinishedTexts(share(most)))
        self.rows: dict[Row, RowState] = {}
        self.repeats: dict[Row, Repeat] = {}

    def _finished(self, row: Row) -> FinishedTexts:
        """The texts that a row is drafted from, and joins."""
        memory: FinishedTexts = self.memory if row.cache_salt is None else self.salted.of(row)
        return memory

    def grade(self, row: Row) -> int:
        repeat = self._repeat(row)
        if repeat.count < len(repeat.tokens):
            return min(GRADES, 1 + (repeat.end + repeat.count) // GRADE)
        return MATCHED if self._matched(row) else 0

    def _matched(self, row: Row) -> bool:
        """Whether the last `LONG` tokens came before, some of them in the row's output: all prompts of a kind
        end alike.  It is looked up again after some tokens.
        """
        length = len(row.tokens)
        if length < row.prompt + RUNS[0]:
            return False
        state = self._state(row)
        if length >= state.graded + RUNS[0]:
            state.graded, own = length, state.index
            texts = (own, *self._finished(row).segments)
            length = own.longest_match(row.tokens[own.length :], texts)
            state.matched = length >= min(LONG, self.longest)
        return state.matched

    def _repeat(self, row: Row) -> Repeat:
        """The earlier output that a row's output repeats so far."""
        repeat = self.repeats.get(row)
        if repeat is None:
            end = tuple(row.tokens[max(0, row.prompt - self.longest) : row.prompt])
            repeat = self.repeats[row] = Repeat(self._finished(row).outputs.get(end, array("i")), len(end))
        if repeat.tokens and (new := row.tokens[row.prompt + repeat.count :]):
            repeat.follow(new)
        return repeat

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        repeat = self._repeat(row)
        at = repeat.count + len(ahead)
        nodes = min(self._nodes(repeat.end + at, budget), budget.depth)
        draft = repeat.tokens[at : at + nodes].tolist()
        repeat.drafted = bool(draft) and repeat.tokens[repeat.count : at].tolist() == [*ahead]
        if repeat.drafted:
            return DraftTree.chain(draft, [1.0] * len(draft))
        return self._matching(row, ahead, budget)

    def _matching(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        """Draft tokens from the best match, the longest ones first, in the row's text or in finished ones."""
        state, segments = self._state(row), self._finished(row).segments
        own, acceptance = state.index, state.acceptance
        own_places, finished_places = own.find(row.tokens[own.length :], ahead, ()), None
        best = Proposal()
        for group in self.groups:
            if self._nodes(group.longest, budget) <= best.expected:
                break  # shorter matches earn even fewer nodes
            bound = self._bound(acceptance, group, budget)
            if bound <= best.expected + ROUNDING or self._improbable(acceptance, group):
                continue
            best = self._better(best, own_places.of(group.order), acceptance, budget)
            if segments and bound > best.expected + ROUNDING:
                finished_places = finished_places or own.find((), ahead, segments)
                best = self._better(best, finished_places.of(group.order), acceptance, budget)
        state.length = best.length or state.length
        return best.tree

    def _state(self, row: Row) -> RowState:
        state = self.rows.get(row)
        if state is None:
            index = run_index(row.limit, self.longest, self.depth)
            state = self.rows[row] = RowState(index, MatchAcceptance(RUNS[0]))
        return state

    def _improbable(self, acceptance: MatchAcceptance, group: MatchGroup) -> bool:
        """Whether no token after matches of a group is probable enough.  Then they count as skipped."""
        if acceptance.highest(group.shortest, group.longest) >= self.min_prob:
            return False
        acceptance.skip(group.shortest, group.longest)
        return True

    def _better(
        self, best: Proposal, texts: list[tuple[int, list[int]]], acceptance: MatchAcceptance, budget: Budget
    ) -> Proposal:
        """Return the best proposal from `texts`, pairs (length of the match, what followed it), or `best`."""
        for length in sorted({agreed for agreed, _ in texts}, reverse=True):
            nodes = self._nodes(length, budget)
            if best.expected and acceptance.expected_tokens(length, nodes) <= best.expected + ROUNDING:
                continue
            agreeing = [text for agreed, text in texts if agreed >= length]
            room = budget.within(nodes=nodes)
            limits = TreeLimits(room.depth, room.nodes, self.siblings, self.min_prob)
            tree, expected = continuation_tree(agreeing, acceptance, length, limits)
            if expected > best.expected:
                best = Proposal(tree, expected, length)
        return best

    def _bound(self, acceptance: MatchAcceptance, group: MatchGroup, budget: Budget) -> float:
        """Upper bound of the expected accepted tokens after a match of a group."""
        shortest, longest = group.shortest, group.longest
        # From the longest run on, all lengths share one estimate.
        lengths = range(shortest, longest + 1) if shortest < RUNS[0] else (longest,)
        return max([acceptance.expected_tokens(n, self._nodes(n, budget)) for n in lengths])

    def _nodes(self, length: int, budget: Budget) -> int:
        """Number of draft tokens that a match of `length` tokens earns."""
        return min(int(length * self.factor + 1e-6), budget.nodes, self.depth)

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and (state := self.rows.get(step.row)) and not self.repeats[step.row].drafted:
                state.acceptance.observe(state.length, step.tree, step.accepted)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
        self.repeats.pop(row, None)
        if reason == "finished":
            first = max(0, row.prompt - self.longest)
            self._finished(row).add(row.tokens[first:], row.prompt - first)
        self.salted.forget(row)
