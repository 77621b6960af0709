"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed the last tokens earlier, in this request or in finished ones.

Every text has an index of where its runs of 1, 2, 4 and 8 tokens ended (kernels/runs.py).  A match of n tokens is looked up in the
list of the longest run <= n; the most recent places where it continued give the frequencies.  The longer the match, the more is
guessed; the match that promises most wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from outrider.core.row import Row
from outrider.core.step import Batch, Commit
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.drafting.base import Drafter, Target
from outrider.drafting.lookup.index import index_for
from outrider.drafting.lookup.index_base import RUNS, Index
from outrider.drafting.lookup.matches import Belief, frequent
from outrider.errors import ConfigError

SEGMENT = 1 << 18  # tokens of finished requests that share one index
END = -1  # between two requests
ROUNDING = 1e-9


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
        if not self.segments or self.segments[-1].length + length > self.segments[-1].capacity:
            self.segments.append(index_for(max(SEGMENT, length)))
        last = self.segments[-1]
        last.extend([*tokens, END])
        self.ends.append((last, last.length))
        if len(self.ends) > self.most:
            index, end = self.ends.popleft()
            index.first = end
            while (
                self.segments[0] is not self.segments[-1]
                and self.segments[0].first == self.segments[0].length
            ):
                self.segments.popleft()


@dataclass
class Known:
    """What is kept for a row."""

    index: Index
    belief: Belief
    length: int = 0  # of the match that the last guesses came from


class Best(NamedTuple):
    """The guesses that promise most, the sum of their probabilities, the length of the match that they come from."""

    tree: DraftTree = EMPTY_TREE
    score: float = 0.0
    length: int = 0


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
                if (
                    not isinstance(value, kinds)
                    or (isinstance(value, bool) and kinds is not bool)
                    or not good(value)
                ):
                    raise ConfigError(f"suffix_decoding_{name} must be {what}, got {value!r}.")

            need("max_tree_depth", int, lambda x: 2 <= x <= 1024, "a whole number in 2 … 1024")
            need("max_cached_requests", int, lambda x: x >= 0, "a whole number of at least 0")
            need("max_spec_factor", (int, float), lambda x: 0 < x <= 64, "a number in (0, 64]")
            need("min_token_prob", (int, float), lambda x: 0 <= x <= 1, "a number in [0, 1]")
            need("use_tree_spec", bool, lambda x: True, "True or False")

    def __init__(self, options: Options, target: Target) -> None:
        super().__init__(options, target)
        whole, self.factor = options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_spec_factor
        self.depth = max(
            1, int(whole * self.factor / (1 + self.factor))
        )  # as many guesses as a match that long would earn
        self.longest = whole - 1
        self.siblings = 64 if options.suffix_decoding_use_tree_spec else 1
        self.memory = Finished(options.suffix_decoding_max_cached_requests)
        self.rows: dict[Row, Known] = {}

    def propose(self, batch: Batch) -> Draft:
        return Draft(
            [self.after(step.row, (), step.budget) if step.budget.nodes else EMPTY_TREE for step in batch]
        )

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> DraftTree:
        known = self.rows.get(row)
        if known is None:
            known = self.rows[row] = Known(index_for(row.limit, self.longest, self.depth), Belief(RUNS[0]))
        own, belief, least = known.index, known.belief, self.options.suffix_decoding_min_token_prob
        here = own.find(row.tokens[own.length :], said, ())
        finished = None
        best = Best()
        for order, run in enumerate(RUNS):
            longest = min(self.longest, RUNS[order - 1] - 1) if order else self.longest
            if run > longest:
                continue
            if self._nodes(longest, budget) <= best.score:
                break  # no shorter match can promise more
            if (hope := self._hope(belief, run, longest, budget)) <= best.score + ROUNDING:
                continue
            if belief.best(run, longest) < least:
                belief.passed(run, longest)
                continue
            best = self._better(best, here(order), belief, budget)
            if self.memory.segments and hope > best.score + ROUNDING:
                finished = finished or own.find((), said, self.memory.segments)
                best = self._better(best, finished(order), belief, budget)
        known.length = best.length or known.length
        return best.tree

    def _better(self, best: Best, texts: list[tuple[int, list[int]]], belief: Belief, budget: Budget) -> Best:
        """The best of what these say, (length of the match, what followed it), and of what was found before."""
        for length in sorted({agreed for agreed, _ in texts}, reverse=True):
            nodes = self._nodes(length, budget)
            if best.score and belief.promise(length, nodes) <= best.score + ROUNDING:
                continue
            agreeing = [text for agreed, text in texts if agreed >= length]
            room = budget.within(nodes=nodes)
            tree, score = frequent(
                agreeing, room, belief, length, self.options.suffix_decoding_min_token_prob, self.siblings
            )
            if score > best.score:
                best = Best(tree, score, length)
        return best

    def _hope(self, belief: Belief, shortest: int, longest: int, budget: Budget) -> float:
        """What a match of a length between these is worth at most; all lengths from the longest run on are believed alike."""
        lengths = range(shortest, longest + 1) if shortest < RUNS[0] else (longest,)
        return max([belief.promise(n, self._nodes(n, budget)) for n in lengths])

    def _nodes(self, length: int, budget: Budget) -> int:
        """How many guesses a match of `length` tokens earns."""
        return min(int(length * self.factor + 1e-6), budget.nodes, self.depth)

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and (known := self.rows.get(step.row)):
                known.belief.observe(known.length, step.tree, step.accepted)

    def forget(self, row: Row, reason: str) -> None:
        self.rows.pop(row, None)
        if reason == "finished":
            self.memory.add(row.tokens[max(0, row.prompt - self.longest) :])
