"""Texts to train on: .jsonl with a conversation or a text a line, .json with a list of them, or plain text in
paragraphs.

    {"messages": [{"role": "user", "content": "…"}, …]}       OpenAI; also "from" and "value" (ShareGPT)
    {"turns": ["…", …]}                                       Spec-Bench: user messages
    {"prompt": "…", "response": "…"}                          also question/answer, instruction/output
    {"text": "…"}                                             a plain text

A conversation is cut at its last user message.  What follows is the answer, if answers are not regenerated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.engine.chat_template import render
from outrider.errors import RequestError, shortened
from outrider.llm import LLM
from outrider.train.options import TrainOptions

PAIRS = (("prompt", "response"), ("prompt", "answer"), ("question", "answer"), ("instruction", "output"))
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
SHORTEST = 4  # tokens of an answer


@dataclass(frozen=True)
class Item:
    """A text as token ids: what the target is given, and the answer in the data."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Source:
    """A file.  bad: "line: reason" of the lines that were left out."""

    path: str
    sha256: str
    lines: int = 0
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Example:
    """messages of a conversation, the last from the user; or a text.  answer: "" if the data has none."""

    messages: tuple[Mapping[str, str], ...] = ()
    answer: str = ""
    text: str = ""


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
        for number, raw in _records(path, content):
            if options.limit is not None and len(items) >= options.limit:
                break
            source.lines += 1
            try:
                items.append(encoded(llm, example_of(raw, path.suffix), options))
            except (RequestError, UnicodeDecodeError) as error:
                source.bad.append(f"line {number}: {error}")
    if len(items) < 2:
        reasons = "; ".join(bad for source in sources for bad in source.bad[:3])
        raise RequestError(
            f"the training data has {len(items)} usable texts, and at least 2 are needed (a paragraph of a "
            f".txt file is one). {reasons}".rstrip()
        )
    return items, sources


def _records(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every record: a line of .jsonl, an entry of a .json list, otherwise a paragraph."""
    lines = content.splitlines()
    if path.suffix == ".json" and isinstance(listed := _parsed(content), list):
        yield from ((n, json.dumps(entry).encode()) for n, entry in enumerate(listed, 1))
        return
    if path.suffix in (".jsonl", ".json"):
        yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
        return
    block: list[bytes] = []
    for number, line in enumerate([*lines, b""], 1):
        if line.strip():
            block.append(line)
        elif block:
            yield number - len(block), b"\n".join(block)
            block = []


def _parsed(content: bytes) -> Any:
    """The JSON of a file; None if it is not one value."""
    with suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def example_of(raw: bytes, suffix: str) -> Example:
    """Raise RequestError for a line of another form."""
    text = raw.decode()
    if suffix not in (".jsonl", ".json"):
        return Example(text=text)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"no JSON ({error})") from error
    example = _example_of_object(given) if isinstance(given, dict) else None
    if example is None:
        raise RequestError(f"neither messages nor turns, prompt or text: {shortened(given)}")
    return example


def _example_of_object(given: Mapping[str, Any]) -> Example | None:
    """A conversation, the first of several turns, a prompt with its answer, or a text; None if it is none."""
    listed = given.get("messages") or given.get("conversations")
    if isinstance(listed, list):
        return _conversation(listed)
    turns = given.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Example(({"role": "user", "content": turns[0]},))
    for asked, answered in PAIRS:
        if isinstance(given.get(asked), str):
            more = f"\n{given['input']}" if asked == "instruction" and given.get("input") else ""
            message = {"role": "user", "content": given[asked] + more}
            return Example((message,), str(given.get(answered) or ""))
    text = given.get("text")
    return Example(text=text) if isinstance(text, str) and text.strip() else None


def _conversation(listed: list[Any]) -> Example:
    messages = []
    for one in listed:
        role = one.get("role", one.get("from")) if isinstance(one, dict) else None
        content = one.get("content", one.get("value")) if isinstance(one, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise RequestError(f"a message has no role or no text: {shortened(one)}")
        messages.append({"role": ROLES.get(role, role), "content": content})
    last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if last is None:
        raise RequestError("no message of a user")
    rest = messages[last + 1 :]
    return Example(tuple(messages[: last + 1]), rest[0]["content"] if rest else "")


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
