"""Our own prompts by kind, as lists of turns (user, assistant, user …), for the demo, tests and examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from outrider.engine.chat_template import render
from outrider.errors import RequestError


class Prompt(NamedTuple):
    """turns: of the user and the assistant by turns; the last is the user's."""

    kind: str
    turns: tuple[str, ...]


def _read(name: str) -> tuple[Prompt, ...]:
    found = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Prompt(kind, tuple(turns)) for kind, *turns in found[name])


PROMPTS = _read("PROMPTS")
TASKS = _read("TASKS")  # that the built-in target answers correctly


def rendered(prompt: Prompt, tokenizer: Any, raw: bool = False) -> dict[str, list[int]]:
    """Token ids for `LLM.generate`, through the tokenizer's chat template.

    raw: encode the last turn unchanged, as is done without a template
    """
    if tokenizer is None:
        raise RequestError("prompts need a tokenizer, and the checkpoint has none: name one.")
    if raw or not getattr(tokenizer, "chat_template", None):
        return {"prompt_token_ids": tokenizer.encode(prompt.turns[-1])}
    turns = [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(prompt.turns)
    ]
    return {"prompt_token_ids": render(tokenizer, {"messages": turns})["prompt_token_ids"]}
