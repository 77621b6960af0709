"""Texts to train on: .jsonl with a conversation or a text a line, .json with one or a list of them, or plain
text in paragraphs.  `outrider.bench.conversations` lists the forms.

A conversation is cut at its last user message.  What follows is the answer, if answers are not regenerated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.conversations import Example, example_of, paragraphs, records
from outrider.engine.chat_template import render
from outrider.errors import RequestError, shortened
from outrider.llm import LLM
from outrider.train.options import TrainOptions

SHORTEST = 4  # tokens of an answer


@dataclass(frozen=True)
class Item:
    """A text as token ids: what the target is given, and the answer in the data."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Source:
    """A file.  bad: "line 3: reason" of the records that were left out."""

    path: str
    sha256: str
    lines: int = 0
    bad: list[str] = field(default_factory=list)


def read(llm: LLM, options: TrainOptions) -> tuple[list[Item], list[Source]]:
    """The items of all files in order.

    Raises RequestError for a file that cannot be read, for a target without a tokenizer, or without any
    usable line.
    """
    if llm.tokenizer is None:
        raise RequestError("training data needs a tokenizer, and the checkpoint has none: name one.")
    items: list[Item] = []
    sources: list[Source] = []
    for name in options.data:
        path = Path(name).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RequestError(f"the training data {name!r} cannot be read: {error}") from error
        source = Source(name, hashlib.sha256(content).hexdigest())
        sources.append(source)
        found = records(path.suffix, content)
        for place, raw in paragraphs(content) if found is None else found:
            if options.limit is not None and len(items) >= options.limit:
                break
            source.lines += 1
            try:
                items.append(encoded(llm, example_of(raw, path.suffix), options))
            except (RequestError, UnicodeDecodeError) as error:
                source.bad.append(f"{place}: {error}")
    if len(items) < 2:
        reasons = "; ".join(bad for source in sources for bad in source.bad[:3])
        raise RequestError(
            f"the training data has {len(items)} usable texts, and at least 2 are needed (a paragraph of a "
            f".txt file is one). {reasons}".rstrip()
        )
    return items, sources


def encoded(llm: LLM, example: Example, options: TrainOptions) -> Item:
    """Token ids of an example.  Raises RequestError if it is too long, or has no answer that is needed."""
    tokenizer = llm.tokenizer
    if example.text or not getattr(tokenizer, "chat_template", None):
        text = example.text or "\n\n".join(one["content"] for one in example.messages)
        ids = _tokens(tokenizer, text)
        cut = len(ids)
        if example.text:
            cut = options.prompt_tokens if options.regenerate else 1
    else:
        ids = render(tokenizer, {"messages": list(example.messages)})["prompt_token_ids"]
        cut = len(ids)
    answer = ids[cut:]
    if example.answer:
        answer = [*_tokens(tokenizer, example.answer, special=False), *sorted(llm.engine.ending)[:1]]
    prompt, room = ids[:cut], min(options.length, llm.engine.max_len) - cut
    if not prompt or room < SHORTEST:
        raise RequestError(f"a prompt of {len(prompt)} tokens, and texts have at most {options.length}")
    if not options.regenerate and len(answer) < SHORTEST:
        raise RequestError(f"an answer of {len(answer)} tokens, and answers are not regenerated")
    return Item(prompt, answer[:room])


def _tokens(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=special))
    except Exception as error:  # tokenizers raise any type, for a lone surrogate for instance
        raise RequestError(f"the tokenizer cannot read {shortened(text)}: {error}") from error
