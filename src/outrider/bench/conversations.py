"""Conversations and texts in files: .jsonl with one a line, or .json with a list of them or a single one.

{"messages": [{"role": "user", "content": "…"}, …]}   OpenAI; also "conversations", "from", "value" (ShareGPT)
{"body": {"messages": […]}}                           a request of OpenAI's batches
{"turns": ["…", …]}                                   Spec-Bench: user messages
{"prompt": "…", "response": "…"}                      also question/answer, instruction/output; answers may
                                                      be missing
{"text": "…"}                                         a plain text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import RequestError, shortened

FORMS = (".jsonl", ".json")
PAIRS = (("prompt", "response"), ("prompt", "answer"), ("question", "answer"), ("instruction", "output"))
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class Example:
    """messages of a conversation, the last from the user; or a text.

    answer: "" if the data has none.  later: user messages of further turns, whose answers are not known.
    """

    messages: tuple[Mapping[str, str], ...] = ()
    answer: str = ""
    text: str = ""
    later: tuple[str, ...] = ()
    category: str = "all"


def records(suffix: str, content: bytes) -> Iterator[tuple[str, bytes]] | None:
    """(place, such as "line 3", and bytes) of every record: a line, an entry of a .json list, or the only
    object of a .json file.  None for another suffix.
    """
    if suffix not in FORMS:
        return None
    whole = _parsed(content) if suffix == ".json" else None
    if isinstance(whole, dict):
        whole = [whole]
    if isinstance(whole, list):
        return ((f"entry {number}", json.dumps(entry).encode()) for number, entry in enumerate(whole, 1))
    return ((f"line {number}", line) for number, line in enumerate(content.splitlines(), 1) if line.strip())


def paragraphs(content: bytes) -> Iterator[tuple[str, bytes]]:
    """(place of its first line, bytes) of every paragraph."""
    block: list[bytes] = []
    for number, line in enumerate([*content.splitlines(), b""], 1):
        if line.strip():
            block.append(line)
        elif block:
            yield f"line {number - len(block)}", b"\n".join(block)
            block = []


def _parsed(content: bytes) -> Any:
    """The JSON of a file; None if it is not one value."""
    with suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def example_of(raw: bytes, suffix: str) -> Example:
    """Raise RequestError for a line of another form."""
    text = raw.decode()
    if suffix not in FORMS:
        return Example(text=text)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"no JSON ({error})") from error
    example = _example_of_object(given) if isinstance(given, dict) else None
    if example is None:
        raise RequestError(f"neither messages nor turns, prompt or text: {shortened(given)}")
    category = given.get("category")
    return replace(example, category=str(category)) if category is not None else example


def _example_of_object(given: Mapping[str, Any]) -> Example | None:
    """A conversation, user messages, a prompt with its answer, or a text; None if it is none."""
    if isinstance(body := given.get("body"), dict):
        return _example_of_object({name: value for name, value in body.items() if name != "body"})
    listed = given.get("messages") or given.get("conversations")
    if isinstance(listed, list):
        return _conversation(listed)
    turns = given.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns):
        return Example(({"role": "user", "content": turns[0]},), later=tuple(turns[1:]))
    if (pair := _pair(given)) is not None:
        asked, answered = pair
        more = f"\n{given['input']}" if asked == "instruction" and given.get("input") else ""
        message = {"role": "user", "content": given[asked] + more}
        return Example((message,), str(given.get(answered) or ""))
    text = given.get("text")
    return Example(text=text) if isinstance(text, str) and text.strip() else None


def _pair(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Names of prompt and answer: the first pair that has both, or else the first with a prompt."""
    asked = [pair for pair in PAIRS if isinstance(given.get(pair[0]), str) and given[pair[0]]]
    answered = [pair for pair in asked if given.get(pair[1])]
    return next(iter(answered or asked), None)


def _conversation(listed: list[Any]) -> Example:
    messages = []
    for one in listed:
        role = one.get("role", one.get("from")) if isinstance(one, dict) else None
        content = _content(one.get("content", one.get("value"))) if isinstance(one, dict) else None
        if not isinstance(role, str) or content is None:
            raise RequestError(f"a message has no role or no text: {shortened(one)}")
        messages.append({"role": ROLES.get(role, role), "content": content})
    last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if last is None:
        raise RequestError("no message of a user")
    rest = messages[last + 1 :]
    return Example(tuple(messages[: last + 1]), rest[0]["content"] if rest else "")


def _content(given: Any) -> str | None:
    """The text of a message: a string, or parts of type text.  None if it has others."""
    if not isinstance(given, list):
        return given if isinstance(given, str) else None
    texts = list[str]()
    for part in given:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts) if texts else None
