"""Conversion of a prompt and its parameters to a request with rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from outrider.core.logprobs import Logprobs
from outrider.core.noise import mix
from outrider.core.params import SamplingParams, to_int
from outrider.core.row import LoRARequest, Row
from outrider.core.structured import StructuredOutputs
from outrider.core.validate import is_whole
from outrider.drafting.vocab.spelling import pieces as spellings
from outrider.engine.chat_template import render
from outrider.engine.detokenizer import Detokenizer
from outrider.engine.engine import Engine
from outrider.errors import ContextError, RequestError, about, refuse_unknown, shortened
from outrider.outputs import RequestOutput
from outrider.progress import Request
from outrider.sampling.grammar.compiler import GrammarCompiler
from outrider.sampling.grammar.state import GrammarMask, GrammarState
from outrider.sampling.processors import processors_of
from outrider.sampling.thinking import last_turn, thinking_budget

# "text", [1, 2, 3], {"prompt": "text"}, {"prompt_token_ids": [1, 2, 3]} or {"messages": […]}.
# If a dict has both ids and a text, the ids are used, and the text is only copied to the output.
# With "cache_salt", a dict shares cached pages with prompts of the same salt only.
Prompt = str | Mapping[str, Any] | Sequence[int]
LONG = 64  # characters a token; the beginning of a longer text is tokenized first
KEYS = ("prompt", "prompt_token_ids", "messages", "cache_salt")


def number_of(id: str) -> int:
    """Number mixed into the seed of a request: its id if decimal, otherwise a 64-bit hash of the id."""
    if id.isascii() and id.isdecimal() and len(id) < 20:
        return int(id)
    return int.from_bytes(hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _salt_of(prompt: Prompt) -> str | None:
    """The cache_salt of a prompt.  Raises RequestError."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    text = f"cache_salt must be a string that is not empty, got {shortened(salt)}."
    raise RequestError(text, "cache_salt")


@dataclass(frozen=True)
class Reader:
    """Parser of prompts and parameters for one engine.

    Every method raises RequestError naming the invalid value.
    """

    engine: Engine
    tokenizer: Any
    seed: int  # base from which requests without a seed derive theirs
    pieces: dict[int, str] = field(default_factory=dict)  # memoized texts of single tokens
    spellings: list[bytes] = field(default_factory=list)  # of all tokens, once one is no text
    compilers: list[GrammarCompiler] = field(default_factory=list)  # one, after the first constrained request
    # The tokenizer and the adapter registry are not thread-safe.
    lock: Lock = field(default_factory=Lock)

    def request(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> Request | RequestOutput:
        """Build a Request, or a finished RequestOutput with `error` set if the input is invalid."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
        if isinstance(prompt, str):
            text = prompt
        try:
            if not isinstance(params, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
            if not is_whole(priority):
                raise RequestError(f"priority must be a whole number, got {shortened(priority)}.", "priority")
            salt = _salt_of(prompt)
            check = self.refuse_endless if params.truncate_prompt_tokens is None else None
            with self.lock:
                if isinstance(prompt, Mapping) and "messages" in prompt:
                    with about("messages"):
                        prompt = render(self.tokenizer, prompt, check)
                    text = prompt["prompt"]
                with about("prompt"):
                    given = self._ids(prompt, text, check)
                    ids = self._truncated(given, params)
                if lora is not None:
                    with about("lora_request"):
                        self._known(lora)
            rows = self._rows(id, ids, params, lora)
            for row in rows:
                row.priority, row.cache_salt = priority, salt
            return Request(id, text, ids, params, rows, self.tokenizer, truncated=len(ids) < len(given))
        except RequestError as error:
            return RequestOutput(id, text, [], finished=True, error=error)
        except Exception as error:  # raised by a tokenizer, or by an object passed as a number
            failure = RequestError(f"the request cannot be read: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return RequestOutput(id, text, [], finished=True, error=failure)

    def ids(self, prompt: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation.  Raises RequestError."""
        try:
            with self.lock, about("messages"):
                rendered = render(self.tokenizer, prompt)
                return self._ids(rendered, rendered["prompt"])
        except RequestError:
            raise
        except Exception as error:  # raised by a template or a tokenizer
            text = f"the messages cannot be read: {type(error).__name__}: {error}"
            raise RequestError(text, "messages") from error

    def encode(
        self, text: str, name: str, special: bool = True, instead: str = "pass token ids"
    ) -> list[int]:
        """Token ids of a text, for callers that hold the lock.

        name: of its field, and instead: what could be given, for messages.
        """
        if self.tokenizer is None:
            message = f"{name}: the checkpoint has no tokenizer: {instead}, or LLM(tokenizer=…)."
            raise RequestError(message, name)
        try:  # `_truncated` checks the length, so `verbose` need not
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special, verbose=False)
        except Exception as error:  # tokenizers raise any type, for a lone surrogate for instance
            message = f"{name}: the tokenizer cannot read {shortened(text)}: {error}"
            raise RequestError(message, name) from error
        return ids

    def _known(self, lora: LoRARequest) -> None:
        if not isinstance(lora, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, a list of them, or None, got {lora!r}.")
        if self.engine.adapters is None:
            raise RequestError(f"LoRA adapter {lora.lora_name!r} needs LLM(…, enable_lora=True).")
        self.engine.adapters.check(lora)

    def _ids(self, prompt: Prompt, text: str | None, check: Callable[[str], None] | None = None) -> list[int]:
        """Token ids of a prompt: at least one, and all within the vocabulary.  check: of a text."""
        if isinstance(prompt, Mapping):
            refuse_unknown(prompt, KEYS, "key of a prompt", error=RequestError)
        ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if isinstance(prompt, (list, tuple)):
            ids = prompt
        if text is None and ids is None:
            cure = ": pass .tolist()" if hasattr(prompt, "tolist") else ""
            raise RequestError(
                'a prompt must be a string, a list of token ids, {"prompt": …} or '
                f'{{"prompt_token_ids": […]}}, got {shortened(prompt)}{cure}.'
            )
        if ids is None:
            if not isinstance(text, str):
                raise RequestError(f"a text prompt must be a string, got {text!r}.")
            if check is not None:
                check(text)
            ids = self.encode(text, "prompt")
        if not isinstance(ids, (list, tuple)):
            cure = ": pass .tolist()" if hasattr(ids, "tolist") else ""
            raise RequestError(f"prompt_token_ids must be a list, got {type(ids).__name__}{cure}.")
        if len(ids) == 0:
            raise RequestError("the prompt is empty: it must have at least one token.")
        return self._exist("prompt", ids)

    def _exist(self, name: str, ids: Iterable[Any]) -> list[int]:
        """Convert ids to ints, numpy integers included.

        name: of their parameter.  Raises RequestError for ids outside the vocabulary.
        """
        vocabulary, ids = self.engine.checkpoint.spec.vocabulary, list(ids)
        if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocabulary:
            return ids
        numbers = []
        for token in ids:
            number = to_int(token)
            if number is None or not 0 <= number < vocabulary:
                shown = shortened(token if number is None else number)
                where = "" if name == "prompt" else f"{name}: "
                raise RequestError(
                    f"{where}token id {shown} does not exist: the vocabulary has ids 0 … {vocabulary - 1}.",
                    name,
                )
            numbers.append(number)
        return numbers

    def refuse_endless(self, text: str) -> None:
        """Raise RequestError if a text's beginning is too long already: others wait for the tokenizer."""
        longest = self.engine.max_len
        beginning = text[: LONG * longest]
        if len(text) > 2 * len(beginning) and len(self.encode(beginning, "prompt")) > 2 * longest:
            raise ContextError(
                f"the prompt of {len(text)} characters has more than the {longest} tokens that the context "
                "holds: shorten it, or set truncate_prompt_tokens."
            )

    def _truncated(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Last tokens of the prompt, as truncate_prompt_tokens requires.

        Raises RequestError if the context has no room for one output token.
        """
        longest, keep = self.engine.max_len, params.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, longest - (params.max_tokens or 1))
        ids = ids if keep is None else ids[-keep:]
        if len(ids) >= longest:
            cure = " or raise max_model_len" if longest < self.engine.checkpoint.spec.context else ""
            raise ContextError(
                f"the prompt has {len(ids)} tokens, the context holds {longest} and one must be left for the "
                f"answer: shorten it, set truncate_prompt_tokens (at most {longest - 1}){cure}."
            )
        return ids

    def _rows(self, id: str, ids: list[int], params: SamplingParams, lora: LoRARequest | None) -> list[Row]:
        self._check(params)
        eos = frozenset() if params.ignore_eos else self.engine.ending
        ending = eos | frozenset(params.stop_token_ids or ())
        if params.min_tokens and ending.issuperset(range(self.engine.checkpoint.spec.vocabulary)):
            raise RequestError(
                "min_tokens forbids the tokens that end the text, and here that is every token there is.",
                "min_tokens",
            )
        limit = min(self.engine.max_len, len(ids) + (params.max_tokens or self.engine.max_len))
        prediction = self._prediction(params)
        seed = params.seed if params.seed is not None else mix(self.seed + number_of(id))
        bad_words = self._bad_words(params)
        detokenizes = self.tokenizer is not None and params.detokenize and bool(params.stop)
        rows: list[Row] = []
        for index in range(params.n):
            processors = processors_of(params, len(ids), limit, ending, bad_words)
            if params.thinking_token_budget is not None:
                with self.lock:
                    processors += thinking_budget(params, ids, self)
            grammar = self._grammar(params, ids)
            if grammar is not None:
                processors.append(GrammarMask(grammar))  # the last: no other one can allow what it forbids
            rows.append(
                Row(
                    id=id,
                    index=index,
                    tokens=list(ids),
                    prompt=len(ids),
                    params=params,
                    distribution=params.distribution,
                    seed=seed,
                    processors=processors,
                    limit=limit,
                    ending=ending,
                    grammar=grammar,
                    prediction=prediction,
                    source=rows[0] if rows else None,
                    lora=lora,
                    logprobs=self._logprobs(params, index),
                    text=Detokenizer(self.tokenizer, params.skip_special_tokens) if detokenizes else None,
                )
            )
        return rows

    def _check(self, params: SamplingParams) -> None:
        """Check what depends on the model and its drafters."""
        self._exist("allowed_token_ids", params.allowed_token_ids or ())
        self._exist("stop_token_ids", params.stop_token_ids or ())
        self._exist("logit_bias", params.logit_bias or ())
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and the checkpoint has none: use stop_token_ids.", "stop"
            )
        loaded = self.engine.drafter.sources
        if params.draft_method not in (None, *loaded):
            names, got = ", ".join(loaded) or "none is", shortened(params.draft_method)
            raise RequestError(
                f"draft_method must be one that is loaded ({names}), got {got}.", "draft_method"
            )

    def _prediction(self, params: SamplingParams) -> list[int]:
        """Token ids of the predicted output, as far as the context goes."""
        given: Any = params.prediction or ()
        if isinstance(given, str):
            beginning = given[: LONG * self.engine.max_len]  # others wait for the tokenizer
            with self.lock:
                given = self.encode(beginning, "prediction", special=False)
        return self._exist("prediction", given[: self.engine.max_len])

    def _grammar(self, params: SamplingParams, prompt: Sequence[int]) -> GrammarState | None:
        """Position of a new row in the grammar of structured_outputs, if the request has one."""
        form = params.structured_outputs
        if not isinstance(form, StructuredOutputs):
            return None
        with self.lock:  # not while it compiles: others can be read meanwhile
            if not self.compilers:
                engine = self.engine
                vocabulary = engine.checkpoint.spec.vocabulary
                self.compilers.append(GrammarCompiler(self.tokenizer, vocabulary, engine.ending))
            if form.reasoning is not None and self.tokenizer is not None:
                form = form.behind(last_turn(prompt, form.reasoning, self))
        with about("structured_outputs"):
            return self.compilers[0].state(form, len(prompt), params.stop_token_ids or ())

    def _logprobs(self, params: SamplingParams, index: int) -> Logprobs | None:
        """Log-probability store of a sample, or None.  Only the first sample stores those of the prompt."""
        prompt = params.prompt_logprobs if index == 0 else None
        if params.logprobs is None and prompt is None:
            return None
        decode = self.piece if self.tokenizer is not None and params.detokenize else None
        return Logprobs(self.engine.options.logprobs_mode, params.logprobs, prompt, decode)

    def piece(self, token: int) -> str:
        """Decode one token, memoized."""
        if token not in self.pieces:
            self.pieces[token] = self.tokenizer.decode([token])
        return self.pieces[token]

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes of one token, which may be a part of a character."""
        text = self.piece(token)
        if "\ufffd" not in text:
            return text.encode(errors="replace")
        if not self.spellings:
            self.spellings.extend(spellings(self.tokenizer, len(self.tokenizer)))
        return self.spellings[token]

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of every bad word.

        As in vLLM, the word with a leading space is added if it has another first token and the same length.
        """
        found: list[list[int]] = []
        for word in params.bad_words or ():
            texts = [space + word.lstrip() for space in ("", " ")]
            with self.lock:
                plain, spaced = (self.encode(text, "bad_words", False, "use logit_bias") for text in texts)
            if not plain:
                text = f"bad_words: {word!r} is only whitespace, which is cut: use logit_bias."
                raise RequestError(text, "bad_words")
            found.append(plain)
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        for ids in found:
            self._exist("bad_words", ids)
        return found
