"""What a request asks of the sampler, in vLLM's names and with vLLM's meanings."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from outrider.errors import RequestError, unknown


class Law(NamedTuple):
    """The part that shapes the distribution of one token.  Defaults change nothing."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class _Fields:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    speculate: bool = True


class SamplingParams(_Fields):
    """How to sample one request.

    n: samples a prompt.  temperature: 0 is greedy.  top_p in (0, 1], top_k (0 or -1: all), min_p in [0, 1].
    seed: the text is a function of it; without one, every request draws its own.  stop: strings that end the text
    and are cut off.  stop_token_ids: tokens that end it.  ignore_eos: go on past the end-of-sequence token.
    max_tokens: new tokens at most (None: as many as the context holds).  min_tokens: before this many, neither EOS nor a
    stop token can be sampled.  speculate: False decodes this request plainly.
    Raises RequestError naming the parameter, its value and what it may be.
    """

    def __init__(self, **given: Any) -> None:
        names = [f.name for f in fields(_Fields)]
        for name in given:
            if name not in names:
                raise RequestError(unknown("sampling parameter", name, names))
        super().__init__(**given)
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, Sequence, Set)):
                raise RequestError(f"{name} must be a list, got {value!r}.")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check()

    def _check(self) -> None:
        def need(name: str, good: bool, what: str) -> None:
            if not good:
                raise RequestError(f"{name} must be {what}, got {getattr(self, name)!r}.")

        def number(value: Any) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        def whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        need("n", whole(self.n) and self.n >= 1, "a whole number of at least 1")
        need("temperature", number(self.temperature) and self.temperature >= 0, "a finite number of at least 0")
        need("temperature", self.temperature == 0 or self.temperature >= 0.01, "0 (greedy) or at least 0.01")
        need("top_p", number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        need("top_k", whole(self.top_k) and self.top_k >= 0, "a positive whole number, or 0 or -1 for all tokens")
        need("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        need("seed", self.seed is None or whole(self.seed), "a whole number or None")
        need("max_tokens", self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= 1), "at least 1, or None")
        need("min_tokens", whole(self.min_tokens) and self.min_tokens >= 0, "a whole number of at least 0")
        limit = self.max_tokens
        need("min_tokens", limit is None or self.min_tokens <= limit, f"at most max_tokens ({limit})")
        need("stop", all(isinstance(s, str) and s for s in self.stop or ()), "a string that is not empty, or a list of such")
        need("stop_token_ids", all(whole(t) for t in self.stop_token_ids or ()), "a list of token ids")
        for name in ("ignore_eos", "speculate"):
            need(name, isinstance(getattr(self, name), bool), "True or False")

    @property
    def law(self) -> Law:
        return Law(float(self.temperature), float(self.min_p), self.top_k, float(self.top_p))
