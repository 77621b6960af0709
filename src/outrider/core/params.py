"""Sampling parameters of a request, with vLLM's names and semantics."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, NamedTuple

import numpy as np

from outrider.core.structured import ENDED_BY_CALLS, StructuredOutputs
from outrider.core.validate import (
    Count,
    Flag,
    Kind,
    Text,
    check_fields,
    is_real,
    is_whole,
    optional,
    real,
    whole,
)
from outrider.errors import RequestError, about, refuse_unknown, shortened

ALL = (1 << 31) - 1  # upper bound of top_k, above any vocabulary size
# A temperature beyond these gives the distribution of the bound: in float32, its reciprocal and what that is
# multiplied by stay finite, and the best logit alone, or every one, has all the probability already.
COLDEST, HOTTEST = 1e-20, 1e20
MOST_SAMPLES = 16384  # samples per prompt, as in vLLM
LARGEST = sys.float_info.max
SIMPLE = (int, float, bool, NoneType)  # types of most values
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors", "prediction")
# parameters of which a value of these types may be kept in another form, or refused
CHANGED = {*LISTS, "top_k", "seed", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs",
           "thinking_token_budget"}  # fmt: skip

_BEAMS = "Beam search is not supported: sample, or decode greedily with temperature 0."
_FORMS = "Use 'structured_outputs', a dict with json, regex, choice, grammar, json_object or structural_tag."
ELSEWHERE = {  # parameter names of other programs or of earlier versions of vLLM -> replacement
    "best_of": "Ask for n samples with logprobs=0, and keep the one with the highest cumulative_logprob.",
    "suffix": "Text is only continued, not filled in: put everything before it into the prompt.",
    "echo": "The prompt is in the output, as 'prompt' and 'prompt_token_ids'.",
    "stream": "Call LLM.stream instead of LLM.generate.",
    "do_sample": "Sampling is on unless temperature is 0.",
    "num_return_sequences": "Did you mean 'n'?",
    "repeat_penalty": "Did you mean 'repetition_penalty'?",
    "stop_strings": "Did you mean 'stop'?",
    "priority": "It is an argument of LLM.generate, with a number for each prompt.",
    "output_kind": "LLM.generate returns final outputs, LLM.stream partial ones.",
    "cache_salt": "It is a key of a prompt: {'prompt': …, 'cache_salt': …}.",
    "extra_args": "Give functions as logits_processors.",
    "skip_reading_prefix_cache": "Set enable_prefix_caching=False of LLM.",
    **dict.fromkeys(("spaces_between_special_tokens", "flat_logprobs"),
                    "It has no effect here: leave it out."),
    "max_length": "It counted the prompt, too: use max_tokens, which counts new tokens.",
    **dict.fromkeys(
        ("use_beam_search", "num_beams", "beam_width", "length_penalty", "early_stopping"), _BEAMS,
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
         "response_format", "grammar", "json_schema", "json", "regex", "choice", "structural_tag"),
        _FORMS,
    ),
}  # fmt: skip


def _texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _ids(values: Sequence[Any]) -> bool:
    return all(map(is_whole, values))


ALLOWED = Kind("a list of at least one token id", lambda ids: ids is None or (len(ids) > 0 and _ids(ids)))
TEMPERATURE = real("0 (greedy) or a finite number above 0", lambda t: 0 <= t <= LARGEST)
FACTOR = real("a finite number above 0", lambda x: 0 < x <= LARGEST)
Penalty = Annotated[float, real("in [-2, 2]", lambda x: -2 <= x <= 2)]
Entries = Annotated[
    int | None, Kind("at least 0, or -1 for all tokens, or None", optional(whole(-1)).accepts)
]
TRUNCATION = Kind(
    "at least 1, or -1 for what the context holds, or None", lambda n: n is None or n == -1 or is_whole(n, 1)
)
FUNCTIONS = Kind("a list of functions", lambda functions: all(map(callable, functions)))
BUDGET = Kind("at least 0, or -1 for no limit, or None", optional(whole(0)).accepts)
PREDICTION = Kind("a text or a list of token ids", lambda given: isinstance(given, str) or _ids(given))


class DistributionParams(NamedTuple):
    """Parameters of the sampling distribution of one token.

    The defaults leave the model's distribution unchanged.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, init=False)
class SamplingParams:
    """Sampling parameters of one request.

    n                           samples per prompt
    temperature                 0 is greedy
    top_p                       in (0, 1]
    top_k                       0 or -1: all tokens
    min_p                       in [0, 1]
    seed                        fixes the output; None or -1: each request gets its own seed
    repetition_penalty          > 0; divides positive and multiplies negative logits of tokens in prompt or
                                output
    frequency_penalty           in [-2, 2]; subtracted from a logit once per occurrence of the token in the
                                output
    presence_penalty            in [-2, 2]; subtracted once from the logit of each token in the output
    logit_bias                  {token id: value added to its logit}, clamped to [-100, 100]
    allowed_token_ids           masks all other tokens
    bad_words                   strings; masks the last token of one wherever it would complete it
    logits_processors           functions (output ids, logits) or (prompt ids, output ids, logits) -> logits;
                                must be pure, because they are also evaluated at draft nodes, and must not
                                wait for a thread that calls the same engine, which waits for this step
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
    structured_outputs          StructuredOutputs, or a dict of its fields: the form that the output must have
    prediction                  text or token ids that the output repeats in large parts: drafted from
    draft_method                name of the one of several methods that drafts for this request; None: all
    thinking_token_budget       tokens of a reasoning after which its end marker is forced; None or -1: any
                                number
    reasoning_markers           begin and end of a reasoning, which a budget needs: ("<think>", "</think>");
                                maybe texts that end it, too: ("<think>", "</think>", "<tool_call>")
    max_draft_tokens            depth of this request's draft trees at most; None: no limit of its own

    Raises RequestError naming the parameter, its value and the valid range.
    """

    n: Annotated[int, whole(1, MOST_SAMPLES)] = 1
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_p: Annotated[float, real("in (0, 1]", lambda p: 0 < p <= 1)] = 1.0
    top_k: Annotated[int, Kind("a positive whole number, or 0 or -1 for all tokens", whole(0).accepts)] = 0
    min_p: Annotated[float, real("in [0, 1]", lambda p: 0 <= p <= 1)] = 0.0
    seed: Annotated[int, whole()] | None = None
    repetition_penalty: Annotated[float, FACTOR] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Annotated[Sequence[int] | None, ALLOWED] = None
    bad_words: Annotated[Sequence[str] | None, Kind("a list of strings that are not empty", _texts)] = ()
    logits_processors: Annotated[Sequence[Callable[..., Any]] | None, FUNCTIONS] = ()
    stop: Annotated[
        Sequence[str] | str | None, Kind("a string that is not empty, or a list of such", _texts)
    ] = ()
    stop_token_ids: Annotated[Sequence[int] | None, Kind("a list of token ids", _ids)] = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    max_tokens: Count | None = 16
    min_tokens: Annotated[int, whole(0)] = 0
    truncate_prompt_tokens: Annotated[int | None, TRUNCATION] = None
    logprobs: Entries = None
    prompt_logprobs: Entries = None
    detokenize: Flag = True
    skip_special_tokens: Flag = True
    speculate: Flag = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = field(default=None, hash=False)
    max_draft_tokens: Count | None = None
    prediction: Annotated[Sequence[int] | str | None, PREDICTION] = ()
    draft_method: Text | None = None
    thinking_token_budget: Annotated[int | None, BUDGET] = None
    reasoning_markers: Annotated[Sequence[str], ENDED_BY_CALLS] | None = None

    def __init__(self, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise RequestError(
                "sampling parameters must be named, such as SamplingParams(temperature=0.8, top_p=0.95): got "
                f"{', '.join(map(shortened, unnamed))} without a name."
            )
        if not NAMES.issuperset(given):
            names = [each.name for each in fields(SamplingParams)]
            refuse_unknown(given, names, "sampling parameter", elsewhere=ELSEWHERE, error=RequestError)
        for name, value in given.items():  # the defaults are attributes of the class
            if type(value) not in SIMPLE or name in CHANGED:
                with about(name):
                    value = _normal(name, value)
            object.__setattr__(self, name, value)
        check_fields(self, RequestError, given)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            got = shortened(self.min_tokens)
            text = f"min_tokens must be at most max_tokens ({self.max_tokens}), got {got}."
            raise RequestError(text, "min_tokens")
        if self.stop and not self.detokenize:
            raise RequestError(
                "detokenize must be True where there are stop strings, got False.", "detokenize"
            )
        if self.thinking_token_budget is not None and self.reasoning_markers is None:
            raise RequestError(
                'thinking_token_budget needs reasoning_markers, such as ("<think>", "</think>").',
                "thinking_token_budget",
            )

    @property
    def distribution(self) -> DistributionParams:
        temperature = min(max(self.temperature, COLDEST), HOTTEST) if self.temperature else 0
        return DistributionParams(
            float(temperature), float(self.min_p), min(self.top_k, ALL), float(self.top_p)
        )


NAMES = frozenset(each.name for each in fields(SamplingParams))


def to_int(value: Any) -> int | None:
    """Convert an integer of any type, such as numpy's, to int.  Returns None for any other value."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except Exception:  # tensors raise various types
        return None


def _normal(name: str, value: Any) -> Any:
    """A parameter in the form in which it is kept.  Values of wrong kinds are left, to be refused."""
    if isinstance(value, np.generic):
        value = value.item()
    if name in LISTS:
        return _listed(name, (value,) if isinstance(value, str) and name == "stop" else value)
    if name == "top_k" and value == -1:
        return 0
    if name in ("seed", "thinking_token_budget") and value == -1 and is_whole(value):
        return None
    if name in ("logprobs", "prompt_logprobs") and value is True:
        return 1
    if name == "logit_bias" and value is not None:
        return _bias(value)
    return StructuredOutputs.of(value) if name == "structured_outputs" else value


def _listed(name: str, value: Any) -> Any:
    """A list as a tuple, empty for None, with ids as ints."""
    if isinstance(value, str) and name == "prediction":
        return value
    if value is None:
        return None if name == "allowed_token_ids" else ()  # an empty one is refused
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        raise RequestError(f"{name} must be a list, got {shortened(value)}.")
    if name not in ("stop_token_ids", "allowed_token_ids", "prediction"):
        return tuple(value)
    return tuple(token if (number := to_int(token)) is None else number for token in value)


def _bias(given: Any) -> dict[int, float]:
    """Parse {token id: bias}, clamping biases to [-100, 100].  Ids may be decimal strings, as in JSON."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must be a dict {{token id: bias}}, got {shortened(given)}.")
    bias = {}
    for token, value in given.items():
        digits = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 20
        number = int(token) if digits else to_int(token)
        if number is None:
            raise RequestError(f"logit_bias must have token ids as keys, got {shortened(token)}.")
        value = value.item() if isinstance(value, np.generic) else value
        if not is_real(value):
            raise RequestError(f"logit_bias must have numbers as values, got {shortened(value)}.")
        bias[number] = float(min(100.0, max(-100.0, value)))
    return bias
