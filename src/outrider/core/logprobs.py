"""Log-probabilities of tokens, for the rows that ask: the token's own, and those of the best beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True, slots=True)
class Logprob:
    """rank: 1 is the most likely token.  decoded_token: its text, None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


Entry = dict[int, Logprob]  # the token itself first, then the best ones, best first


@dataclass(eq=False)
class Logprobs:
    """What one row keeps: entries for its output (`sampled`) and its prompt (`prompt`; None stands for the first token).

    count, prompt_count: how many of the best stand beside a token, -1: the whole vocabulary, None: not asked for.
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
        """Of the next token of the output; values float [V], by `mode`."""
        assert self.count is not None
        self.sampled.append(self._entry(token, values, self.count))

    def add_prompt(self, token: int, values: Tensor) -> None:
        """Of the next token of the prompt."""
        assert self.prompt_count is not None
        self.prompt.append(self._entry(token, values, self.prompt_count))

    def _entry(self, token: int, values: Tensor, count: int) -> Entry:
        best = values.topk(values.numel() if count == -1 else min(count, values.numel()))
        own = values[token]
        entry = {token: self._one(token, float(own), int((values >= own).sum()))}
        for rank, (other, value) in enumerate(zip(best.indices.tolist(), best.values.tolist()), start=1):
            entry[other] = self._one(other, value, rank)
        return entry

    def _one(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, None if self.decode is None else self.decode(token))
