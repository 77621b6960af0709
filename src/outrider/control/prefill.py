"""Prefill pacing: how many prompt tokens a step computes beside decoding rows.

A chunk of n prompt tokens at context length k lengthens a decode step from d seconds to

    step(n) = d + fixed(k) + n * per_token(k)

A small chunk keeps the gaps between the other rows' tokens short but delays the first token of the prompt:

    slowdown of a decode step       step(n) / d
    time to first token, over its   step(n) / (n * alone(k))
    time without decoding rows      with alone(k) = per_token(k) + (d1 + fixed(k)) / N

N is max_num_batched_tokens, d1 the seconds in which one row alone emits a token.

- A maximum slowdown s sets n by the first ratio.  The second one is then about s / (s - 1) where fixed(k) is
  small.
- Without a maximum, n is the smallest chunk that keeps the second ratio at a target, 2 at most.  So the first
  token comes within three times its time without decoding rows, plus three decode steps, once a few chunks
  have been measured.
- A token of a decode step with few rows costs more than one with the rows beside them that wait behind the
  first prompt.  The target is lower where more than `WASTE` of the prefill's time would be lost that way:
  many prompts beside few decoding rows are computed in large chunks.
- With drafts a step emits several tokens of a row, and so counts for as many decode steps: d is the seconds
  in which each row emits one token, times the tokens that a row is expected to emit by its draft tokens, as
  in recent steps.  Otherwise requests would end sooner while their successors' prompts are computed no
  sooner: fewer and fewer rows would decode at once, and first tokens would be late.
- The end of a prompt takes one chunk where that keeps the second ratio at `END_TARGET`.  Such a chunk is up
  to four times as large as the others, and its step takes up to five times d.  Chunks that are halved, and
  the growth of the first ones, may still divide the end.
- Waiting prompts are computed in order of arrival.  The time that counts for one of them includes the prompts
  before it.
- Exceptions: a chunk has at least one token and at most max_num_batched_tokens; a row also waits for a seat
  and for pages.

All costs are measured while serving.  A decode step without a chunk precedes the first chunk and follows
every `REFRESH_STEPS` steps with one, so that d stays up to date; beside a new number of rows, one follows
every chunk until there were two.  Where chunks are of similar sizes, every fourth one is halved to tell
fixed(k) from per_token(k).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression

from outrider.control.line_cost import FREE, LineCost
from outrider.core.step import Batch

TTFT_TARGET = 2.0  # aim at most; what is promised is 3, with room for noise, halved chunks and refreshes
# The same for the end of a prompt that then fits into one chunk: under load, short prompts that were divided
# would queue for each other.
END_TARGET = 1.25
WASTE = 0.05  # of the time of prefill, lost in decode steps that were cheaper with the waiting rows
HEADROOM = 0.8  # part of a given maximum slowdown that is aimed at
FIRST_CHUNK = 8  # tokens of the first chunk, before any cost is known
MAX_GROWTH = 2  # a chunk over the largest recent one
REFRESH_STEPS = 16
TOKENS_RATE = 0.1  # of the moving averages of tokens that are drafted, accepted and emitted
SURPRISE = 1.5  # two steps in a row off by this factor: the machine's speed has changed
CONTEXT_BUCKET = 1024  # positions that share one cost estimate
NEARLY = 0.5  # of the largest chunk: where prompts wait, that is taken instead, for a step less in the end


@dataclass
class PrefillBudget:
    """Prompt tokens of one step, handed out to rows in order of arrival.

    tokens: hard limit.  chunk_at: the paced chunk, in tokens, for a context length and the tokens that a row
    wants (None: no pacing).
    share: the part of the paced chunk that is left; rows of different context lengths draw on the same one.
    """

    tokens: int
    chunk_at: Callable[[int, int], int] | None = None
    share: float = 1.0

    @property
    def exhausted(self) -> bool:
        return self.tokens <= 0 or self.share < 1e-6

    def take(self, wanted: int, context: int) -> int:
        """Tokens for a row with `context` positions computed that wants more; at least 1 until exhausted."""
        if self.exhausted:
            return 0
        taken = min(wanted, self.tokens)
        if self.chunk_at is not None:
            chunk = self.chunk_at(context, wanted)
            taken = min(taken, max(1, int(self.share * chunk)))
            self.share -= taken / chunk
        self.tokens -= taken
        return taken


class PrefillPacer:
    """Learns what steps cost (`learn`) and bounds the prompt tokens of the next one (`budget`).

    max_tokens: max_num_batched_tokens.  max_slowdown: largest step(n) / d (None: the least that keeps the
    time to first token within three times its value without decoding rows).
    """

    def __init__(self, max_tokens: int, max_slowdown: float | None = None) -> None:
        self.max_tokens, self.max_slowdown = max_tokens, max_slowdown
        # `_bucket` of decoding rows -> recent steps without a chunk: seconds, and `_tokens`
        self.decode_steps: dict[int, deque[tuple[float, float]]] = {}
        self.decode_line: tuple[float, float] | None = None  # the same: seconds of a row, and of a step
        self.tokens_per_row = 1.0  # emitted in a step, moving average of `_tokens`
        self.drafted = self.accepted = 0.0  # draft tokens, recent ones weigh most
        self.costs: dict[int, LineCost] = {}  # context length // CONTEXT_BUCKET -> cost of a chunk
        self.steps_since_refresh = REFRESH_STEPS
        self.surprises = 0  # consecutive steps with a chunk that took much more or less than predicted
        self.recent_chunk: float = FIRST_CHUNK

    def budget(self, decoding: int, tokens: int, waiting: int = 1) -> PrefillBudget:
        """Prompt tokens of a step with so many decoding rows, of which the step has room for `tokens`.

        waiting: rows that wait for their first token and can be computed.
        """
        if not decoding:
            return PrefillBudget(tokens)
        measured = len(self.decode_steps.get(_bucket(decoding), ()))
        if self.steps_since_refresh >= (REFRESH_STEPS if measured > 1 else 1):
            return PrefillBudget(0)
        return PrefillBudget(tokens, partial(self.chunk, decoding, waiting=waiting))

    def chunk(self, decoding: int, context: int, wanted: float = math.inf, waiting: int = 1) -> int:
        """Tokens of a chunk at this context length beside so many decoding rows: 1 ... max_tokens.

        wanted: tokens up to the end of the prompt.
        """
        decode = self._decode(decoding)
        cost = self.costs[_nearest(self.costs, context // CONTEXT_BUCKET)] if self.costs else None
        chunk: float = FIRST_CHUNK
        whole = 0.0  # tokens up to which the end of a prompt is not divided
        if decode is not None and cost is not None:
            decode, target = decode * self.tokens_per_row, self._target(decoding, waiting)
            chunk = self._paced(decode, *cost.line(), target)
            if self.max_slowdown is None:
                whole = self._paced(decode, *cost.line(), min(target, END_TARGET))
            if waiting > 1 and chunk > NEARLY * self.max_tokens and self.max_slowdown is None:
                chunk = self.max_tokens
        most = min(self.max_tokens, self.recent_chunk * (1 if self.surprises else MAX_GROWTH))
        chunk = min(chunk, most)
        if self.steps_since_refresh % 4 == 3 and (cost is None or cost.similar):
            chunk /= 2  # another size tells what a token costs
        elif wanted <= min(whole, most):
            chunk = max(chunk, wanted)
        chunk = max(1, chunk)
        return math.ceil(chunk) if self.max_slowdown is None else int(chunk)

    def learn(self, batch: Batch, seconds: float) -> None:
        """Take in the duration of a step."""
        decoding = nodes = accepted = prefill = context = 0
        for step in batch:
            if step.known > 1 or not step.emits:
                prefill += step.known
                context += step.known * (step.start + step.known // 2)
                continue
            decoding += 1
            if step.tree.tokens:
                nodes += len(step.tree.tokens)
                accepted += (len(step.emitted) or 1) - 1
        tokens = self._tokens(decoding, nodes, accepted)
        if not prefill:
            if decoding:
                bucket = _bucket(decoding)
                if bucket not in self.decode_steps:
                    self.decode_steps[bucket] = deque(maxlen=5)
                self.decode_steps[bucket].append((seconds, tokens))
                self.steps_since_refresh, self.decode_line = 0, None
            return
        bucket = context // prefill // CONTEXT_BUCKET
        decode = tokens * (self._decode(decoding or 1) or 0.0)
        cost = self.costs.get(bucket) or self._new_cost(bucket)
        if decoding:
            self.steps_since_refresh += 1
            self.recent_chunk = max(prefill, 0.98 * self.recent_chunk)
            cost = self._checked(cost, seconds / max(decode + cost.predict(prefill), FREE))
        self.costs[bucket] = cost.after(prefill, seconds, decode)

    def _tokens(self, decoding: int, nodes: int, accepted: int) -> float:
        """Tokens that each of so many decoding rows was expected to emit, on average, by their draft tokens.

        These decide how long a step takes, and not how many of them were accepted.
        """
        if not decoding:
            return self.tokens_per_row  # a prompt alone: the other rows' steps would have drafts, too
        if nodes:
            self.drafted += nodes - TOKENS_RATE * self.drafted
            self.accepted += accepted - TOKENS_RATE * self.accepted
        tokens = 1 + nodes / decoding * (self.accepted / self.drafted if nodes else 0.0)
        self.tokens_per_row += TOKENS_RATE * (tokens - self.tokens_per_row)
        return tokens

    def _checked(self, cost: LineCost, ratio: float) -> LineCost:
        """Measure d again and lower the weight of old costs where steps show that the speed has changed."""
        self.surprises = 0 if 1 / SURPRISE < ratio < SURPRISE else self.surprises + 1
        if self.surprises < 2:
            return cost
        self.steps_since_refresh = REFRESH_STEPS
        return cost.scaled(0.5)

    def _paced(self, decode: float, fixed: float, per_token: float, target: float) -> float:
        if self.max_slowdown is not None:
            return (HEADROOM * (self.max_slowdown - 1) * decode - fixed) / per_token
        one_row = _seconds_per_token(self.decode_steps[1]) if 1 in self.decode_steps else 0.0
        alone = per_token + (one_row + fixed) / self.max_tokens
        return (decode + fixed) / (target * alone - per_token)

    def _target(self, decoding: int, waiting: int) -> float:
        """Time to first token, over its time without decoding rows, to aim at."""
        if waiting <= 1 or len(self.decode_steps) < 2:
            return TTFT_TARGET
        if self.decode_line is None:
            seconds = [_seconds_per_token(steps) for steps in self.decode_steps.values()]
            line = linear_regression([*self.decode_steps], seconds)
            self.decode_line = max(0.0, line.slope), max(FREE, line.intercept)
        row, step = self.decode_line
        wasted = 1 - (row + step / (decoding + waiting - 1)) / (row + step / decoding)
        return TTFT_TARGET if wasted <= WASTE else 1 + WASTE / wasted

    def _decode(self, decoding: int) -> float | None:
        """Seconds in which so many rows, or the nearest number that was seen, emit one token each."""
        if not self.decode_steps:
            return None
        return _seconds_per_token(self.decode_steps[_nearest(self.decode_steps, decoding)])

    def _new_cost(self, bucket: int) -> LineCost:
        """The nearest estimate as a prior: the farther away, the less it weighs."""
        if not self.costs:
            return LineCost()
        nearest = _nearest(self.costs, bucket)
        return self.costs[nearest].scaled(0.7 ** min(8, abs(nearest - bucket)))


def _bucket(rows: int) -> int:
    """The least of the numbers of decoding rows that share estimates: from 16 on, those within an eighth."""
    if rows < 16:
        return rows
    shift = rows.bit_length() - 4
    return rows >> shift << shift


def _nearest(known: Iterable[int], wanted: int) -> int:
    """The known number nearest to a wanted one; of two the smaller."""
    return min(known, key=lambda other: (abs(other - wanted), other))


def _seconds_per_token(steps: Collection[tuple[float, float]]) -> float:
    """Seconds in which every row emits one token, by steps (seconds, tokens that a row should have emitted).

    The slowest of several steps is left out, and the fastest of four or more.
    """
    middle = sorted(steps)[len(steps) >= 4 : max(1, len(steps) - 1)]
    return math.fsum(seconds for seconds, _ in middle) / math.fsum(tokens for _, tokens in middle)
