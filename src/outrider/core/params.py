"""Sampling parameters of a request, with vLLM's names and semantics."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import RequestError, shortened, unknown

ALL = (1 << 31) - 1  # upper bound of top_k, above any vocabulary size
MOST_SAMPLES = 16384  # samples per prompt, as in vLLM


_BEAMS = "Beam search is not supported: sample, or decode greedily with temperature 0."
_FORMS = "Constrained output is not supported: ask for the form in the prompt, and check the answer."
ELSEWHERE = {  # parameter names of other programs or of earlier versions of vLLM -> replacement
    "best_of": "Ask for n samples with logprobs=0, and keep the one with the highest cumulative_logprob.",
    "suffix": "Text is only continued, not filled in: put everything before it into the prompt.",
    "echo": "The prompt is in the output, as 'prompt' and 'prompt_token_ids'.",
    "stream": "Call LLM.stream instead of LLM.generate.",
    "do_sample": "Sampling is on unless temperature is 0.",
    "num_return_sequences": "Did you mean 'n'?",
    "repeat_penalty": "Did you mean 'repetition_penalty'?",
    "stop_strings": "Did you mean 'stop'?",
    "max_length": "It counted the prompt, too: use max_tokens, which counts new tokens.",
    **dict.fromkeys(
        ("use_beam_search", "num_beams", "beam_width", "length_penalty", "early_stopping"), _BEAMS,
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
         "structured_outputs", "response_format", "grammar", "json_schema"), _FORMS,
    ),
}  # fmt: skip


class DistributionParams(NamedTuple):
    """Parameters of the sampling distribution of one token.

    The defaults leave the model's distribution unchanged.
    """

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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    speculate: bool = True


class SamplingParams(_Fields):
    """Sampling parameters of one request.

    n                           samples per prompt
    temperature                 0 is greedy
    top_p                       in (0, 1]
    top_k                       0 or -1: all tokens
    min_p                       in [0, 1]
    seed                        fixes the output; None: each request gets its own seed
    repetition_penalty          > 0; divides positive and multiplies negative logits of tokens in prompt or
                                output
    frequency_penalty           in [-2, 2]; subtracted from a logit once per occurrence of the token in the
                                output
    presence_penalty            in [-2, 2]; subtracted once from the logit of each token in the output
    logit_bias                  {token id: value added to its logit}, clamped to [-100, 100]
    allowed_token_ids           masks all other tokens
    bad_words                   strings; masks the last token of one wherever it would complete it
    logits_processors           functions (output ids, logits) or (prompt ids, output ids, logits) -> logits;
                                must be pure, because they are also evaluated at draft nodes
    stop                        strings that end the text and are removed from it
    stop_token_ids              tokens that end the text
    include_stop_str_in_output  keep the stop string or stop token in the text
    ignore_eos                  continue past the end-of-sequence token
    max_tokens                  maximum number of new tokens; None: up to the context length
    min_tokens                  masks EOS and stop tokens until the output has this many tokens
    truncate_prompt_tokens      keep only this many last tokens of the prompt; -1: as many as leave room for
                                max_tokens
    logprobs, prompt_logprobs   number of best tokens whose log-probabilities are returned beside each token
                                of output or prompt; -1: the whole vocabulary
    detokenize                  False: return no text
    skip_special_tokens         omit special tokens from the text
    speculate                   False: decode this request without speculation

    Raises RequestError naming the parameter, its value and the valid range.
    """

    def __init__(self, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise RequestError(
                "sampling parameters must be named, such as SamplingParams(temperature=0.8, top_p=0.95): got "
                f"{', '.join(map(shortened, unnamed))} without a name."
            )
        names = [f.name for f in fields(_Fields)]
        for name, value in given.items():
            if name not in names:
                raise RequestError(unknown("sampling parameter", name, names, elsewhere=ELSEWHERE))
            if isinstance(value, np.generic):
                given[name] = value.item()
        super().__init__(**given)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors"):
            value = getattr(self, name)
            if isinstance(value, str) and name == "stop":
                value = (value,)
            if value is not None and (
                isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set))
            ):
                raise RequestError(f"{name} must be a list, got {shortened(value)}.")
            empty = None if name == "allowed_token_ids" else ()  # `_check` rejects an empty allowed_token_ids
            value = empty if value is None else tuple(value)
            if name in ("stop_token_ids", "allowed_token_ids") and value is not None:
                value = _plain(value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                object.__setattr__(self, name, 1)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check()

    def _need(self, name: str, good: bool, what: str) -> None:
        if not good:
            raise RequestError(f"{name} must be {what}, got {shortened(getattr(self, name))}.")

    def _check(self) -> None:
        self._check_law()
        self._check_lists()
        self._check_lengths()

    def _check_law(self) -> None:
        need = self._need
        need(
            "n",
            _whole(self.n, 1) and self.n <= MOST_SAMPLES,
            f"a whole number of at least 1, and at most {MOST_SAMPLES}",
        )
        need(
            "temperature",
            _number(self.temperature) and self.temperature >= 0,
            "a finite number of at least 0",
        )
        need("temperature", self.temperature == 0 or self.temperature >= 0.01, "0 (greedy) or at least 0.01")
        need("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        need("top_k", _whole(self.top_k, 0), "a positive whole number, or 0 or -1 for all tokens")
        need("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        need("seed", self.seed is None or _whole(self.seed), "a whole number or None")
        need(
            "repetition_penalty",
            _number(self.repetition_penalty) and self.repetition_penalty > 0,
            "a finite number above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            need(name, _number(getattr(self, name)) and -2 <= getattr(self, name) <= 2, "in [-2, 2]")

    def _check_lists(self) -> None:
        need, allowed = self._need, self.allowed_token_ids
        need(
            "allowed_token_ids",
            allowed is None or (len(allowed) > 0 and all(map(_whole, allowed))),
            "a list of at least one token id",
        )
        need(
            "bad_words",
            all(isinstance(s, str) and s for s in self.bad_words or ()),
            "a list of strings that are not empty",
        )
        need("logits_processors", all(map(callable, self.logits_processors or ())), "a list of functions")
        need(
            "stop",
            all(isinstance(s, str) and s for s in self.stop or ()),
            "a string that is not empty, or a list of such",
        )
        need("stop_token_ids", all(map(_whole, self.stop_token_ids or ())), "a list of token ids")

    def _check_lengths(self) -> None:
        need = self._need
        need("max_tokens", self.max_tokens is None or _whole(self.max_tokens, 1), "at least 1, or None")
        need("min_tokens", _whole(self.min_tokens, 0), "a whole number of at least 0")
        limit = self.max_tokens
        need("min_tokens", limit is None or self.min_tokens <= limit, f"at most max_tokens ({limit})")
        cut = self.truncate_prompt_tokens
        need(
            "truncate_prompt_tokens",
            cut is None or cut == -1 or _whole(cut, 1),
            "at least 1, or -1 for what the context holds, or None",
        )
        for name in ("logprobs", "prompt_logprobs"):
            need(
                name,
                getattr(self, name) is None or _whole(getattr(self, name), -1),
                "at least 0, or -1 for all tokens, or None",
            )
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "speculate",
        ):
            need(name, isinstance(getattr(self, name), bool), "True or False")
        need("detokenize", self.detokenize or not self.stop, "True where there are stop strings")

    @property
    def distribution(self) -> DistributionParams:
        return DistributionParams(
            float(self.temperature), float(self.min_p), min(self.top_k, ALL), float(self.top_p)
        )


def whole(value: Any) -> int | None:
    """Convert an integer of any type, such as numpy's, to int.  Returns None for any other value."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except Exception:  # tensors raise various types
        return None


def _plain(ids: Sequence[Any]) -> tuple[Any, ...]:
    """Convert ids to ints.  Other values are kept; `_check` rejects them by name."""
    return tuple(token if (number := whole(token)) is None else number for token in ids)


def _number(value: Any) -> bool:
    """Whether the value is a finite number within the range of a float."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _whole(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _bias(given: Any) -> dict[int, float]:
    """Parse {token id: bias}, clamping biases to [-100, 100].  Ids may be decimal strings, as in JSON."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must be a dict {{token id: bias}}, got {shortened(given)}.")
    bias = {}
    for token, value in given.items():
        digits = isinstance(token, str) and token.isdecimal() and len(token) < 20
        number = int(token) if digits else whole(token)
        if number is None:
            raise RequestError(f"logit_bias must have token ids as keys, got {shortened(token)}.")
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
            raise RequestError(f"logit_bias must have numbers as values, got {shortened(value)}.")
        bias[number] = float(min(100.0, max(-100.0, value)))
    return bias
