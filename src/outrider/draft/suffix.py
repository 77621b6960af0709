"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the last tokens earlier, in this request or in finished ones.

Every text has an index of where its runs of 1, 2, 4 and 8 tokens ended: linked lists in arrays, most recent first, so that time and
memory are linear in the tokens whatever they are.  A match of n tokens is looked up in the list of the longest run <= n; the most
recent places where it continued give the frequencies.  The longer the match, the more is guessed; the match that promises most wins.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from outrider.draft.base import Drafter, Target
from outrider.draft.matches import Belief, frequent
from outrider.errors import ConfigError
from outrider.types import NOTHING, Batch, Budget, Commit, Draft, Guesses, Row

RUNS = (8, 4, 2, 1)
PLACES = {8: 4, 4: 16, 2: 16, 1: 16}  # most recent ones of a run that are looked at; after long ones the same follows, as a rule
SEGMENT = 1 << 18  # tokens of finished requests that share one index
END = -1  # between two requests
ROUNDING = 1e-9


class Place(NamedTuple):
    """Where a match of `length` tokens ended, in a text."""

    length: int
    at: int


class Index:
    """A growing text and where each run of tokens ended in it: 36 bytes a token.

    heads[o][hash] is the last place of such a run of RUNS[o] tokens, previous[o][place] the one before it, -1 none.  Places before
    `first` are forgotten.  Runs that share a hash share a list; the tokens themselves are compared.
    """

    def __init__(self, capacity: int) -> None:
        size = 1 << (max(capacity, 64) - 1).bit_length()
        self.capacity, self.mask, self.first = capacity, size - 1, 0
        self.tokens = array("i")
        self.heads = [array("i", [-1]) * size for _ in RUNS]
        self.previous = [array("i") for _ in RUNS]

    def extend(self, tokens: Sequence[int]) -> None:
        start, text, mask = len(self.tokens), self.tokens, self.mask
        text.extend(tokens)
        for run, heads, previous in zip(RUNS, self.heads, self.previous):
            first = max(start, run - 1)  # the first new end of a run
            previous.extend([-1] * min(len(text) - start, first - start))
            part = text[first + 1 - run :].tolist()
            for end, gram in enumerate(zip(*(part[i:] for i in range(run))), first):
                key = hash(gram) & mask
                previous.append(heads[key])
                heads[key] = end

    def find(self, context: array[int], order: int, most: int) -> list[Place]:
        """The most recent places (see PLACES) where the last RUNS[order] tokens of `context` ended; they agree in `most` at most."""
        run, previous = RUNS[order], self.previous[order]
        if len(context) < run:
            return []
        at = self.heads[order][hash(tuple(context[-run:])) & self.mask]
        found: list[Place] = []
        for _ in range(2 * PLACES[run]):  # some may be of other runs
            if at < self.first or len(found) == PLACES[run]:
                break
            length = self._agreement(context, at, most)
            if length >= run:
                found.append(Place(length, at))
            at = previous[at]
        return found

    def _agreement(self, context: array[int], at: int, most: int) -> int:
        """How many tokens up to place `at` are the last ones of `context`."""
        text, most = self.tokens, min(len(context), at + 1, most)
        if text[at + 1 - most : at + 1] == context[-most:]:
            return most
        for back in range(most):
            if text[at - back] != context[-1 - back]:
                return back
        return most


class Finished:
    """The texts of the last `most` requests that ended, in segments: the oldest go first, a segment when all of it is old."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.segments: deque[Index] = deque()
        self.ends: deque[tuple[Index, int]] = deque()  # of each request, oldest first

    def add(self, tokens: list[int]) -> None:
        if not self.most:
            return
        length = len(tokens) + 1
        if not self.segments or len(self.segments[-1].tokens) + length > self.segments[-1].capacity:
            self.segments.append(Index(max(SEGMENT, length)))
        last = self.segments[-1]
        last.extend([*tokens, END])
        self.ends.append((last, len(last.tokens)))
        if len(self.ends) > self.most:
            index, end = self.ends.popleft()
            index.first = end
            while self.segments[0] is not self.segments[-1] and self.segments[0].first == len(self.segments[0].tokens):
                self.segments.popleft()


@dataclass
class Known:
    """What is kept for a row.  The index lacks the last token, so that a suffix never matches itself."""

    index: Index
    belief: Belief
    length: int = 0  # of the match that the last guesses came from


class Suffix(Drafter):
    demo: ClassVar = {"suffix decoding": {}}

    @dataclass(frozen=True)
    class Options:
        """suffix_decoding_max_tree_depth: tokens of a match and of the guesses after it, together.  …_max_cached_requests:
        finished requests that are kept (0: none).  …_max_spec_factor: guesses a token of the match.  …_min_token_prob: paths less
        likely are not guessed.  …_use_tree_spec: guess trees, with the same number of nodes (vLLM's and Arctic Inference's names).
        """

        suffix_decoding_max_tree_depth: int = 24
        suffix_decoding_max_cached_requests: int = 10000
        suffix_decoding_max_spec_factor: float = 1.0
        suffix_decoding_min_token_prob: float = 0.1
        suffix_decoding_use_tree_spec: bool = False

        def __post_init__(self) -> None:
            def need(name: str, kinds: type | tuple[type, ...], good: Any, what: str) -> None:
                value = getattr(self, f"suffix_decoding_{name}")
                if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool) or not good(value):
                    raise ConfigError(f"suffix_decoding_{name} must be {what}, got {value!r}.")

            need("max_tree_depth", int, lambda x: 2 <= x <= 1024, "a whole number in 2 … 1024")
            need("max_cached_requests", int, lambda x: x >= 0, "a whole number of at least 0")
            need("max_spec_factor", (int, float), lambda x: 0 < x <= 64, "a number in (0, 64]")
            need("min_token_prob", (int, float), lambda x: 0 <= x <= 1, "a number in [0, 1]")
            need("use_tree_spec", bool, lambda x: True, "True or False")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        whole, self.factor = options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_spec_factor
        self.depth = max(1, int(whole * self.factor / (1 + self.factor)))  # as many guesses as a match that long would earn
        self.longest = whole - 1
        self.siblings = 64 if options.suffix_decoding_use_tree_spec else 1
        self.memory = Finished(options.suffix_decoding_max_cached_requests)
        self.rows: dict[Row, Known] = {}

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        return Draft([self.after(row, (), budget) if budget.nodes else NOTHING for row, budget in zip(batch.rows, budgets)])

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> Guesses:
        known = self.rows.get(row)
        if known is None:
            known = self.rows[row] = Known(Index(row.limit), Belief(RUNS[0]))
        known.index.extend(row.tokens[len(known.index.tokens) : -1])
        context = array("i", [*row.tokens[-self.longest :], *said][-self.longest :])
        belief, least = known.belief, self.options.suffix_decoding_min_token_prob
        best, most = NOTHING, 0.0
        for order, run in enumerate(RUNS):
            longest = min(self.longest, RUNS[order - 1] - 1) if order else self.longest
            if run > longest:
                continue
            if self._nodes(longest, budget) <= most or (hope := self._hope(belief, run, longest, budget)) <= most + ROUNDING:
                continue  # no such match can promise more
            if belief.best(run, longest) < least:
                belief.passed(run, longest)
                continue
            for find in (self._in_row, self._in_finished):
                if hope <= most + ROUNDING:
                    break
                texts = find(row, known.index, context, order, longest)
                for length in sorted({agreed for agreed, _ in texts}, reverse=True):
                    nodes = self._nodes(length, budget)
                    if belief.promise(length, nodes) <= most + ROUNDING:
                        continue
                    agreeing = [text for agreed, text in texts if agreed >= length]
                    room = Budget(min(budget.depth, nodes), nodes)
                    tree, score = frequent(agreeing, room, belief, length, least, self.siblings)
                    if score > most:
                        best, most, known.length = tree, score, length
        return best

    def _hope(self, belief: Belief, shortest: int, longest: int, budget: Budget) -> float:
        """What a match of a length between these is worth at most; all lengths from the longest run on are believed alike."""
        lengths = {*range(shortest, min(longest, RUNS[0]) + 1), longest}
        return max([belief.promise(n, self._nodes(n, budget)) for n in lengths])

    def _nodes(self, length: int, budget: Budget) -> int:
        """How many guesses a match of `length` tokens earns."""
        return min(int(length * self.factor + 1e-6), budget.nodes, self.depth)

    def _in_row(self, row: Row, index: Index, context: array[int], order: int, longest: int) -> list[tuple[int, list[int]]]:
        """(length of the match, what followed); what reaches the end goes on with what it has said, as a loop would."""
        found = []
        for length, at in index.find(context, order, longest):
            text = row.tokens[at + 1 : at + 1 + self.depth]
            found.append((length, text if len(text) == self.depth else [text[i % len(text)] for i in range(self.depth)]))
        return found

    def _in_finished(self, row: Row, own: Index, context: array[int], order: int, longest: int) -> list[tuple[int, list[int]]]:
        found: list[tuple[int, list[int]]] = []
        for index in reversed(self.memory.segments):
            for length, at in index.find(context, order, longest):
                found.append((length, index.tokens[at + 1 : at + 1 + self.depth].tolist()))
            if len(found) >= PLACES[RUNS[order]]:
                break
        return found[: PLACES[RUNS[order]]]

    def observe(self, commit: Commit) -> None:
        for row, tree, nodes in zip(commit.batch.rows, commit.draft.trees, commit.verdict.nodes):
            if tree.tokens and row in self.rows:
                self.rows[row].belief.observe(self.rows[row].length, tree, nodes)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
        if reason == "finished":
            self.memory.add(row.tokens[max(0, row.prompt - self.longest) :])
