"""Logits processors: pure functions of (ids, logits), valid at every node of a draft tree.

A processor gets the tokens of its request and the path of the node.  It keeps no state that depends on other
nodes.  The order of application is vLLM's (see `processors_of`).
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.edits import Bits, Counted, Edits, bits_of
from outrider.core.params import COLDEST, HOTTEST, SamplingParams
from outrider.core.processor import Ids, Processor
from outrider.core.tree import ROOT
from outrider.errors import RequestError

NEVER = float("-inf")


class TokenValues:
    """Token ids and a value for each, as tensors.  given: the ids.

    `at` moves them to the device of the logits and drops ids beyond the row: a draft vocabulary may be
    smaller.
    """

    def __init__(self, ids: Iterable[int], values: Iterable[float] = ()) -> None:
        self.given = list(ids)
        self.ids, self.values = torch.tensor(self.given), torch.tensor(list(values), dtype=torch.float32)
        self.largest = max(self.given)

    def at(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int64 [n] and values float32 [n] (or [0] without values), where the logits [V] are."""
        return _within_row(logits, self.largest, self.ids, self.values)


def _within_row(logits: Tensor, largest: int, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if largest >= logits.numel():
        fits = ids < logits.numel()
        ids, values = ids[fits], values[fits] if values.numel() else values
    return ids.to(logits.device), values.to(logits.device)


class AllowedTokens:
    """Mask every token that is not in `allowed`."""

    def __init__(self, allowed: Iterable[int]) -> None:
        self.allowed = TokenValues(sorted(set(allowed)))
        self.bits: Bits | None = None  # made where a backend needs them

    def active(self, length: int) -> bool:
        return True

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        allowed, _ = self.allowed.at(logits)
        return torch.full_like(logits, NEVER).index_copy_(0, allowed, logits[allowed])

    def describe(self, edits: Edits) -> bool:
        if self.bits is None:
            every = np.zeros(self.allowed.largest + 1, bool)
            every[self.allowed.given] = True
            self.bits = bits_of(every)
        edits.allow(self.bits)
        return True


class BadWords:
    """Mask the tokens that would complete one of these sequences in the output."""

    def __init__(self, prompt: int, words: Iterable[Sequence[int]]) -> None:
        self.prompt = prompt
        # length of the prefix -> prefix -> last tokens
        self.last: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *beginning, last in words:
            self.last.setdefault(len(beginning), {}).setdefault(tuple(beginning), []).append(last)

    def active(self, length: int) -> bool:
        return length - self.prompt >= min(self.last)

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        banned = self._banned(ids)
        return logits.index_fill(0, TokenValues(banned).at(logits)[0], NEVER) if banned else logits

    def describe(self, edits: Edits) -> bool:
        edits.ban_until(self.last.get(0, {}).get((), ()))
        for node, path in enumerate(edits.paths, ROOT):
            edits.ban(self._banned(Ids(edits.tokens, path), 1), node)
        return True

    def _banned(self, ids: Ids, least: int = 0) -> list[int]:
        """The tokens that complete a sequence whose beginning has at least so many tokens."""
        banned, output = list[int](), len(ids) - self.prompt
        for n, words in self.last.items():
            if least <= n <= output:
                banned += words.get(ids.tail(n), ())
        return banned


class MinTokens:
    """Mask the tokens that would end the text before position `until`."""

    def __init__(self, until: int, ending: Iterable[int]) -> None:
        self.until, self.ending = until, TokenValues(ending)

    def active(self, length: int) -> bool:
        return length < self.until

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        return logits.index_fill(0, self.ending.at(logits)[0], NEVER)

    def describe(self, edits: Edits) -> bool:
        edits.ban_until(self.ending.given, self.until - len(edits.tokens))
        return True


def min_tokens(prompt: int, minimum: int, ending: Iterable[int]) -> list[Processor]:
    """The processor for min_tokens, if it has an effect.

    prompt: length of the prompt.  ending: tokens that end a text.
    """
    banned = sorted(token for token in ending if token >= 0)  # as an index, -1 would select the last token
    return [MinTokens(prompt + minimum, banned)] if minimum and banned else []


class LogitBias:
    """Add a bias to the logits of given tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.given, self.bias = dict(bias), TokenValues(bias, bias.values())

    def active(self, length: int) -> bool:
        return True

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        return logits.index_add(0, *self.bias.at(logits))

    def describe(self, edits: Edits) -> bool:
        edits.bias.update(self.given)
        return True


# thread -> when the user's function that it runs was called, the outermost
running_since: dict[int, float] = {}


class UserProcessor:
    """Function of the user: f(output ids, logits) or f(prompt ids, output ids, logits) -> logits.

    It gets a copy of the logits [V] and may modify it.  Raises RequestError if it fails or returns invalid
    logits.
    """

    def __init__(self, prompt: int, function: Callable[..., Tensor]) -> None:
        self.prompt, self.function = prompt, function
        try:
            self.whole = len(inspect.signature(function).parameters) == 3
        except (TypeError, ValueError):  # some builtins have no signature
            self.whole = False

    def active(self, length: int) -> bool:
        return True

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        prompt = (ids.tokens[: self.prompt],) if self.whole else ()
        name, thread = getattr(self.function, "__name__", repr(self.function)), get_ident()
        inner = thread in running_since  # of another engine, which an outer function uses
        running_since.setdefault(thread, time.monotonic())
        try:
            edited = self.function(*prompt, ids.since(self.prompt), logits.clone())
        except KeyboardInterrupt:
            raise
        # SystemExit or asyncio's CancelledError would end the thread of an engine
        except BaseException as error:
            raise RequestError(f"logits_processors: {name} raised {type(error).__name__}: {error}") from error
        finally:
            if not inner:
                del running_since[thread]
        try:
            return _edited(edited, logits)
        except Exception as error:  # some tensors raise on inspection
            raise RequestError(
                f"logits_processors: {name} must return logits of shape {tuple(logits.shape)}, {error}"
            ) from error

    def describe(self, edits: Edits) -> bool:
        return False


def _edited(given: Any, logits: Tensor) -> Tensor:
    """A user function's result in dtype and device of `logits`.  Raises ValueError if it is invalid."""
    if not isinstance(given, Tensor):
        raise ValueError(f"got {type(given).__name__}.")
    if given.shape != logits.shape:
        raise ValueError(f"got shape {tuple(given.shape)}.")
    if given.layout != torch.strided or given.is_meta or given.is_complex() or given.is_quantized:
        kind = "meta" if given.is_meta else given.dtype if given.layout == torch.strided else given.layout
        raise ValueError(
            f"got a {str(kind).removeprefix('torch.')} tensor: return a dense one of real numbers."
        )
    edited = given.detach().to(logits).contiguous()
    best = float(edited.amax())
    if not best < math.inf and bool(logits.amax().isfinite()):  # otherwise the model's own logits overflow
        raise ValueError(
            f"got {best} among them: return finite numbers, and -inf for tokens that are forbidden."
        )
    return edited


class Penalties:
    """Apply repetition_penalty (prompt and output), then frequency_penalty and presence_penalty (output).

    Counts of the list `ids.tokens` are kept incrementally.  Each call adds the counts of the node's path
    without storing them, so calls for different nodes are independent.  A draft token gets bit for bit the
    penalty that it gets as an output token.
    """

    def __init__(self, prompt: int, limit: int, params: SamplingParams) -> None:
        # within float32, where 0 times infinity would be no number
        self.prompt, self.repetition = prompt, min(max(params.repetition_penalty, COLDEST), HOTTEST)
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self.tokens: list[int] | None = None  # the counted list, up to `upto`
        self.upto = self.largest = 0
        self.counts: dict[int, int] = {}  # occurrences in the output; 0 for tokens of the prompt only
        self.place: dict[int, int] = {}  # token id -> index into the next two arrays
        self.token_ids = np.empty(limit, np.int64)  # distinct token ids
        self.penalties = np.empty(limit, np.float32)  # value subtracted from the logit of each
        self.occurrences = np.empty(limit, np.int32)  # `counts` of each

    def active(self, length: int) -> bool:
        return self.repetition != 1 or length > self.prompt

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        self._count(ids.tokens)
        count, largest = len(self.place), self.largest
        tokens, penalties = self.token_ids[:count], self.penalties[:count]
        if ids.path:
            path = Counter(ids.path)
            new = [token for token in path if token not in self.place]
            tokens = np.concatenate([tokens, np.array(new, np.int64)])
            fresh = np.array([self._penalty(path[token]) for token in new], np.float32)
            penalties = np.concatenate([penalties, fresh])
            for token in path.keys() & self.place.keys():
                penalties[self.place[token]] = self._penalty(self.counts[token] + path[token])
            largest = max(largest, *path)
        where, off = _within_row(logits, largest, torch.from_numpy(tokens), torch.from_numpy(penalties))
        x = logits.index_select(0, where)
        if self.repetition != 1:
            repetition = x.new_full((), self.repetition)  # a device multiplies by the reciprocal of a number
            x = torch.where(x > 0, x / repetition, x * repetition)
        return logits.index_copy(0, where, x - off)

    def describe(self, edits: Edits) -> bool:
        self._count(edits.tokens)
        ids, counts = self.token_ids[: len(self.place)], self.occurrences[: len(self.place)]
        edits.counted = Counted(self.repetition, self.frequency, self.presence, ids, counts, self.place)
        return True

    def _penalty(self, count: int) -> float:
        return self.frequency * count + (self.presence if count else 0.0)

    def _count(self, tokens: list[int]) -> None:
        """Count the tokens appended since the last call, or all of a list that is another or shrank."""
        if tokens is not self.tokens or len(tokens) < self.upto:
            self.tokens, self.upto, self.largest = tokens, 0 if self.repetition != 1 else self.prompt, 0
            self.counts.clear()
            self.place.clear()
        for at in range(self.upto, len(tokens)):
            token = tokens[at]
            self.counts[token] = count = self.counts.get(token, 0) + (at >= self.prompt)
            place = self.place.setdefault(token, len(self.place))
            self.token_ids[place], self.penalties[place] = token, self._penalty(count)
            self.occurrences[place] = count
            self.largest = max(self.largest, token)
        self.upto = len(tokens)


def processors_of(
    params: SamplingParams, prompt: int, limit: int, ending: Iterable[int], bad_words: Sequence[Sequence[int]]
) -> list[Processor]:
    """Logits processors in order of application.  prompt: its tokens.  limit: of prompt and output."""
    made: list[Processor] = []
    if params.allowed_token_ids is not None:
        made.append(AllowedTokens(params.allowed_token_ids))
    if bad_words:
        made.append(BadWords(prompt, bad_words))
    made += min_tokens(prompt, params.min_tokens, ending)
    if params.logit_bias:
        made.append(LogitBias(params.logit_bias))
    made += [UserProcessor(prompt, function) for function in params.logits_processors or ()]
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
        made.append(Penalties(prompt, limit, params))
    return made
