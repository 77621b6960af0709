"""Compilation of structured outputs for one tokenizer, by llguidance.

docs/structured-outputs.md gives the reasons for this library.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from outrider.core.reasoning import ReasoningMarkers
from outrider.core.structural_tag import tags_of
from outrider.core.structured import FORMS, WHERE, StructuredOutputs
from outrider.errors import RequestError, shortened
from outrider.sampling.grammar.faults import place_of, readable
from outrider.sampling.grammar.state import GrammarState, Source, too_complex
from outrider.sampling.grammar.tags import tagged, thought_first

CACHED = 64  # compiled grammars
CACHED_SOURCES = 2_000_000  # characters of their sources; a compiled one takes up to 100 bytes for each
MOST_RULES = 10_000  # lines of a grammar, or references of a schema
STACK = 256 << 20  # bytes to compile on: the library recurses along rules, with up to 10 KB for each
MOST_GBNF = 20_000  # characters: the conversion of n rules takes up to n² steps, a second for 1,000 rules
STACK_SIZE = Lock()  # of threads that start: of the whole process
T = TypeVar("T")
GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
# Between two JSON tokens: nothing, a space, or a line break with indentation.  Unbounded whitespace is where
# small models go on without end.
WHITESPACE = r"( |\n[ \t]{0,24})?"
SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~")  # that mean something in a regular expression
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(eq=False)
class Compiled:
    """A compiled grammar.

    seconds: that it took.  characters: of its source.  rows: number of rows that got a copy of the matcher.
    """

    matcher: Any
    seconds: float
    characters: int
    rows: int = 0


class GrammarCompiler:
    """Compiler of the grammars of requests, with a cache of the last ones.

    Thread-safe.  A compilation delays only requests with a grammar.

    vocabulary: number of logits.  ending: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ending: Iterable[int]) -> None:
        self.tokenizer, self.vocabulary, self.ending = tokenizer, vocabulary, frozenset(ending)
        self.compiled: dict[str, Compiled] = {}  # least recently used first
        self.lock = Lock()  # of compilations
        self.cache_lock = Lock()  # of `compiled`; never held for long, as steps take it

    def state(self, form: StructuredOutputs, prompt: int, stops: Iterable[int] = ()) -> GrammarState:
        """State of a new row with a prompt of so many tokens.

        stops: further tokens that end the text; the special ones are allowed where the grammar may end.
        Raises RequestError naming the fault and its place.
        """
        with self.lock:
            special = {token for token in stops if self.library.is_special_token(token)}
            found = self._compiled(form)
            found.rows += 1
            copied = found.matcher.deep_copy()
        again, forget = partial(self._again, form), partial(self._forget, form)
        source = Source(again, forget, lambda: found.rows > 1, found.seconds)
        return GrammarState(copied, prompt, self.ending | special, self.library.vocab_size, source)

    @cached_property
    def library(self) -> Any:
        """The tokenizer in llguidance's form.  Making it takes about a second for 100,000 tokens."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError(f"{WHERE} needs llguidance: pip install 'outrider[grammar]'.") from error
        if self.tokenizer is None or not getattr(self.tokenizer, "is_fast", False):
            raise RequestError(f"{WHERE} needs a tokenizer.json, and the checkpoint has none.")
        if not self.ending:
            raise RequestError(f"{WHERE} needs a model with an end-of-sequence token.")
        size = max(self.vocabulary, len(self.tokenizer))
        core = copy(self.tokenizer.backend_tokenizer)  # llguidance.hf would import all of transformers
        core.no_padding()
        core.no_truncation()
        return LLTokenizer(core.to_str(), n_vocab=size, eos_token=sorted(self.ending))

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the special tokens that an answer may contain, by text; none ends it."""
        added: Mapping[int, Any] = self.tokenizer.added_tokens_decoder
        known = {i: str(token) for i, token in added.items() if i not in self.ending}
        return {text: i for i, text in known.items() if text and self.library.is_special_token(i)}

    def _compiled(self, form: StructuredOutputs) -> Compiled:
        key = _key(form)
        _ = self.library  # made once: its seconds are no part of those of the first grammar
        with self.cache_lock:
            if (found := self.compiled.pop(key, None)) is not None:
                self.compiled[key] = found
                return found
        began = time.perf_counter()
        matcher = on_large_stack(lambda: self._compile(form))
        found = Compiled(matcher, time.perf_counter() - began, len(key))
        with self.cache_lock:
            self.compiled[key] = found
            self._evict()
        return found

    def _evict(self) -> None:
        """Drop the least recently used grammars while there are too many, or their sources are too long."""
        characters = sum(each.characters for each in self.compiled.values())
        while len(self.compiled) > CACHED or characters > CACHED_SOURCES:
            oldest = self.compiled.pop(next(iter(self.compiled)))
            characters -= oldest.characters

    # These two do not take the lock of compilations, for which a step would have to wait.

    def _again(self, form: StructuredOutputs) -> Any:
        """A matcher of a grammar that was compiled before: a step waits, so it is not checked again."""
        return on_large_stack(lambda: self._matcher(form, self._source(form)))

    def _forget(self, form: StructuredOutputs) -> None:
        with self.cache_lock:
            self.compiled.pop(_key(form), None)

    def _compile(self, form: StructuredOutputs) -> Any:
        """A matcher at the beginning of a grammar.  Raises RequestError if it allows no text.

        Also if the library gives up on the first token: of a large repetition it does after a second, for
        which a step would wait.
        """
        matcher = self._matcher(form, self._source(form))
        allowed = matcher.compute_bitmask()
        if not any(allowed) or matcher.is_error():
            kind = _kind(form)
            raise RequestError(f"{WHERE}: no text has the form of {kind} {shortened(getattr(form, kind))}.")
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
        first = next((int(token) for token in bits.nonzero()[0] if int(token) not in self.ending), None)
        if first is not None:
            matcher.try_consume_tokens([first])
            if matcher.is_error():
                raise too_complex(matcher)
            matcher.reset()
        return matcher

    def _source(self, form: StructuredOutputs) -> str:
        """The grammar in llguidance's JSON.  Raises RequestError if it is too large."""
        _ = self.library  # raises RequestError without llguidance
        try:
            grammar = self._grammar(form)
        except RequestError:
            raise
        except ValueError as error:  # of a text with half of a surrogate pair
            raise RequestError(f"{WHERE}: {_kind(form)}: {error}.") from error
        counts = {
            "references": grammar.count("$ref") if form.json or form.structural_tag else 0,
            "lines": len((form.grammar or "").splitlines()),
        }
        for what, count in counts.items():
            if count > MOST_RULES:
                raise RequestError(f"{WHERE}: a grammar may have {MOST_RULES} {what} at most, got {count}.")
        return grammar

    def _matcher(self, form: StructuredOutputs, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.library, grammar, log_level=0)
        if matcher.is_error():
            raise self._fault(form, self._refusal(grammar) or matcher.get_error())
        return matcher

    def _grammar(self, form: StructuredOutputs) -> str:
        grammar = self._answer(form)
        if form.reasoning is None:
            return grammar
        return thought_first(ReasoningMarkers.of(form.reasoning), grammar, self.special)

    def _answer(self, form: StructuredOutputs) -> str:
        from llguidance import LLMatcher

        if form.json is not None:
            return self._schema(form, form.json)
        if form.json_object:
            return self._schema(form, {"type": "object"})
        if form.structural_tag is not None:
            tags = tags_of(form.structural_tag)
            schemas = [json.loads(self._schema(form, tag.schema))["grammars"][0] for tag in tags]
            return tagged(tags, [each["json_schema"] for each in schemas], self.special)
        if form.regex is not None:
            return LLMatcher.grammar_from_regex(form.regex)
        if form.choice is not None:
            # as a rule of the grammar, it could have 2,000 alternatives
            return LLMatcher.grammar_from_regex("|".join(map(_literal, dict.fromkeys(form.choice))))
        return json.dumps({"grammars": [{"lark_grammar": _lark(str(form.grammar))}]})

    def _schema(self, form: StructuredOutputs, schema: Any) -> str:
        from llguidance import LLMatcher

        pattern = WHITESPACE if form.whitespace_pattern is None else form.whitespace_pattern
        options: Any = COMPACT if form.disable_any_whitespace else {"whitespace_pattern": pattern}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)

    def _refusal(self, grammar: str) -> str | None:
        """The library's message about a grammar that it refuses."""
        from llguidance import LLMatcher

        refused, messages = LLMatcher.validate_grammar_with_warnings(grammar, self.library)
        return str(messages[0]) if refused else None

    def _fault(self, form: StructuredOutputs, message: str) -> RequestError:
        from llguidance import LLMatcher

        pattern = form.whitespace_pattern
        if pattern and (fault := self._refusal(LLMatcher.grammar_from_regex(pattern))) is not None:
            return RequestError(f"{WHERE}: whitespace_pattern: {readable(fault)}.")
        tags = () if form.structural_tag is None else tags_of(form.structural_tag)
        for i, tag in enumerate(tags):
            if (fault := self._refusal(self._schema(form, tag.schema))) is not None:
                at = self._place(form, tag.schema, fault)
                return RequestError(f"{WHERE}: structural_tag, structure {i}, at {at}: {readable(fault)}.")
        if not isinstance(form.json, Mapping):
            return RequestError(f"{WHERE}: {_kind(form)}: {readable(message)}.")
        return RequestError(
            f"{WHERE}: json, at {self._place(form, form.json, message)}: {readable(message)}."
        )

    def _place(self, form: StructuredOutputs, schema: Mapping[str, Any], fault: str) -> str:
        return place_of(schema, fault, lambda part: self._refusal(self._schema(form, part)))


def _key(form: StructuredOutputs) -> str:
    return json.dumps(astuple(form))


def _kind(form: StructuredOutputs) -> str:
    """The key of structured_outputs that states the form."""
    return next(name for name in FORMS if getattr(form, name) is not None)


def on_large_stack(run: Callable[[], T]) -> T:
    """The result of `run` in a thread with a stack of `STACK` bytes.

    A stack overflow inside llguidance would end the process.
    """
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    with STACK_SIZE:
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=work).start()
        finally:
            threading.stack_size(usual)
    return future.result()


def _literal(text: str) -> str:
    """A regular expression that matches this text only."""
    return "".join(f"\\{letter}" if letter in SIGNS else letter for letter in text)


def _lark(grammar: str) -> str:
    """A GBNF grammar as a Lark one; others unchanged."""
    if not GBNF_RULE.search(grammar):
        return grammar
    if len(grammar) > MOST_GBNF:
        long = f"a GBNF grammar may have {MOST_GBNF} characters at most, got {len(grammar)}: write it in Lark"
        raise RequestError(f"{WHERE}: grammar: {long}.")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # of various types
        raise RequestError(f"{WHERE}: grammar: {error}.") from error
