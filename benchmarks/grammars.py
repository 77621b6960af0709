"""Which grammar library: xgrammar and llguidance on the schemas of benchmarks/schemas.jsonl.

    python benchmarks/grammars.py [--tokenizer FOLDER_OR_ID] [--walks 20] [--json OUT]

A schema is taken if it compiles, and kept if no random walk under its masks ends with a value that
`jsonschema` refuses.  A walk picks uniformly among the allowed tokens, half of them letters, digits and
JSON's own signs where those are allowed, and ends at 400 tokens.  Both libraries get the same schema, any
whitespace or none.  Needs `pip install xgrammar` beside the extra `grammar`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import llguidance
import llguidance.hf
import numpy as np
import torch
import xgrammar
from command_line import parser_of, write
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from outrider.bench.conditions import conditions
from outrider.checkpoints.hub import locate

SCHEMAS = Path(__file__).parent / "schemas.jsonl"
LIMIT = 400  # tokens of a walk
SHORT = 2  # characters of a token that half of the picks prefer: keeps walks from endless strings


class Matcher(Protocol):
    def mask(self) -> bytes: ...
    def consume(self, token: int) -> bool: ...
    def rollback(self, count: int) -> None: ...


class LLGuidance:
    def __init__(self, tokenizer: Any, vocabulary: int, eos: int) -> None:
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)

    def compile(self, schema: Any, compact: bool) -> Matcher:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options if compact else {})
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return _LLMatcher(matcher)


class _LLMatcher:
    def __init__(self, matcher: Any) -> None:
        self.mask, self.consume, self.rollback = (
            matcher.compute_bitmask,
            matcher.consume_token,
            matcher.rollback,
        )


class XGrammar:
    def __init__(self, tokenizer: Any, vocabulary: int, eos: int) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[eos])
        self.vocabulary, self.compiler = (
            vocabulary,
            xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=1),
        )

    def compile(self, schema: Any, compact: bool) -> Matcher:
        compiled = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=not compact)
        return _XMatcher(xgrammar.GrammarMatcher(compiled), self.vocabulary)


class _XMatcher:
    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.matcher, self.bits = matcher, xgrammar.allocate_token_bitmask(1, vocabulary)
        self.consume, self.rollback = matcher.accept_token, matcher.rollback

    def mask(self) -> bytes:
        self.matcher.fill_next_token_bitmask(self.bits)
        return self.bits.numpy().tobytes()


class Walker:
    """Random walks, timed.  seconds: of every mask, and of every rollback of three tokens and back."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: int) -> None:
        self.tokenizer, self.eos, self.random = tokenizer, eos, random.Random(0)
        texts = [tokenizer.decode([token]) for token in range(vocabulary)]
        self.short = np.array([len(text) <= SHORT and text.isascii() for text in texts])
        self.masks: list[float] = []
        self.rollbacks: list[float] = []

    def walk(self, matcher: Matcher) -> str | None:
        """The text of a walk that ended, or None."""
        tokens: list[int] = []
        while len(tokens) < LIMIT:
            began = time.perf_counter()
            mask = matcher.mask()
            self.masks.append(time.perf_counter() - began)
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
            allowed = allowed[: len(self.short)]
            if allowed[self.eos] and (self.random.random() < 0.3 or allowed.sum() == 1):
                return str(self.tokenizer.decode(tokens))
            allowed[self.eos] = False
            some = allowed & self.short
            choices = np.flatnonzero(some if some.any() and self.random.random() < 0.8 else allowed)
            if not len(choices):
                return None
            tokens.append(int(self.random.choice(choices)))
            if not matcher.consume(tokens[-1]):
                return None
            if len(tokens) % 8 == 0:
                self._roll(matcher, tokens[-3:])
        return None

    def _roll(self, matcher: Matcher, last: Sequence[int]) -> None:
        began = time.perf_counter()
        matcher.rollback(len(last))
        for token in last:
            matcher.consume(token)
        self.rollbacks.append(time.perf_counter() - began)


def measure(library: Any, walker: Walker, walks: int, compact: bool) -> dict[str, Any]:
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    compiles: list[float] = []
    ended = 0
    for entry in map(json.loads, SCHEMAS.read_text().splitlines()):
        name, schema = entry["name"], entry["schema"]
        began = time.perf_counter()
        try:
            library.compile(schema, compact)
        except Exception as error:
            refused[name] = str(error).splitlines()[0][:160]
            continue
        compiles.append(time.perf_counter() - began)
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for _ in range(walks):
            text = walker.walk(library.compile(schema, compact))
            ended += text is not None
            if text is not None and not valid(check, text):
                wrong[name] = text[:160]
                break
    return {
        "taken": len(compiles),
        "kept": len(compiles) - len(wrong),
        "refused": refused,
        "wrong": wrong,
        "walks that ended": ended,
        "compile, ms": spread(compiles, 1e3),
        "mask, us": spread(walker.masks, 1e6),
        "roll back 3, us": spread(walker.rollbacks, 1e6),
    }


def valid(check: Any, text: str) -> bool:
    try:
        return bool(check.is_valid(json.loads(text)))
    except ValueError:
        return False


def spread(seconds: list[float], scale: float) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"median": round(cuts[49] * scale, 2), "p99": round(cuts[98] * scale, 2)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", default="builtin")
    parser.add_argument("--walks", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    source = locate("builtin") if given.tokenizer == "builtin" else given.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(source)  # both libraries take transformers' only
    vocabulary, eos = len(tokenizer), tokenizer.eos_token_id
    table = Table("library", "whitespace", "taken", "kept", "compile ms", "mask µs", "p99", "roll back 3 µs")
    results: dict[str, Any] = {}
    for kind in (LLGuidance, XGrammar):
        library = kind(tokenizer, vocabulary, eos)
        for compact in (False, True):
            found = measure(library, Walker(tokenizer, vocabulary, eos), given.walks, compact)
            form = "none" if compact else "any"
            results[f"{kind.__name__}, {form}"] = found
            table.add_row(
                kind.__name__,
                form,
                str(found["taken"]),
                str(found["kept"]),
                str(found["compile, ms"]["median"]),
                str(found["mask, us"]["median"]),
                str(found["mask, us"]["p99"]),
                str(found["roll back 3, us"]["median"]),
            )
    Console(width=110).print(table)
    schemas = len(SCHEMAS.read_text().splitlines())
    about = {"conditions": conditions(), "vocabulary": vocabulary, "schemas": schemas}
    write(given.json, {**about, "libraries": results})


if __name__ == "__main__":
    main()
