"""Log-probabilities of sampled tokens, prompt tokens and their best alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token.

    logprob: value as selected by `MODES`.  rank: from 1, the most likely token.
    decoded_token: text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class TopValues(NamedTuple):
    """Value and rank of a token, and the best tokens of its row with their values, best first.

    Of equal values the smaller id comes first.
    """

    value: float
    rank: int
    ids: Sequence[int]
    values: Sequence[float]


def top_values(token: int, values: Tensor, count: int) -> TopValues:
    """Those of a token and the `count` best of values float [V]; -1: all."""
    most = values.numel() if count == -1 else min(count, values.numel())
    own = values[token]
    ids = _best(values, most)
    return TopValues(float(own), int((values >= own).sum()), ids.tolist(), values[ids].tolist())


def _best(values: Tensor, count: int) -> Tensor:
    """Ids of the largest values.  `topk` takes any of equal ones, on a device another than beside others."""
    if not count:
        return values.new_empty(0, dtype=torch.int64)
    if count < values.numel():
        least = values.topk(count).values[-1]
        ids = (values >= least).nonzero()[:, 0]  # ascending, with all that equal the least
    else:
        ids = torch.arange(count, device=values.device)
    return ids[values[ids].sort(descending=True, stable=True).indices[:count]]


Entry = dict[int, Logprob]  # by token id: the token itself first, then the best ones in descending order


@dataclass(eq=False)
class Logprobs:
    """Log-probabilities of one row.

    mode: one of `MODES`.
    count, prompt_count: best tokens per entry of output and prompt; -1: all of them; None: not requested.
    decode: text of a token id.
    sampled: entries of the output.
    prompt: entries of the prompt; None for the first token, which has no prediction.
    """

    mode: str
    count: int | None
    prompt_count: int | None
    decode: Callable[[int], str] | None = None
    sampled: list[Entry] = field(default_factory=list)
    prompt: list[Entry | None] = field(default_factory=lambda: [None])

    def prompt_pending(self, length: int) -> bool:
        """Whether a prompt of `length` tokens still needs entries."""
        return self.prompt_count is not None and len(self.prompt) < length

    def add(self, token: int, values: Tensor) -> None:
        """Append the entry of the next output token; values float [V], by `mode`."""
        assert self.count is not None
        self.add_found(token, top_values(token, values, self.count))

    def add_found(self, token: int, found: TopValues) -> None:
        """Append the entry of the next output token from what a backend has found."""
        self.sampled.append(self._entry(token, found))

    def add_prompt(self, token: int, values: Tensor) -> None:
        """Append the entry of the next prompt token; values float [V]."""
        assert self.prompt_count is not None
        self.prompt.append(self._entry(token, top_values(token, values, self.prompt_count)))

    def _entry(self, token: int, found: TopValues) -> Entry:
        entry = {token: self._one(token, found.value, found.rank)}
        for rank, (other, value) in enumerate(zip(found.ids, found.values), start=1):
            entry[other] = self._one(other, value, rank)
        return entry

    def _one(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, None if self.decode is None else self.decode(token))
