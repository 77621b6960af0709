"""Prompts from files: a text file with a prompt per line, or conversations, prompts and texts in .jsonl and
.json (`conversations.py` lists the forms), such as `question.jsonl` of Spec-Bench and MT-bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.bench.conversations import example_of, records
from outrider.bench.measure import Prompts
from outrider.bench.prompts import PROMPTS, rendered
from outrider.core.params import SamplingParams
from outrider.core.validate import text_of
from outrider.engine.chat_template import render
from outrider.errors import RequestError
from outrider.llm import LLM

CHAT = "multi-turn"  # Spec-Bench's name for the categories of MT-bench
MT_BENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


class Question(NamedTuple):
    """turns: user messages in order; if `raw`, a single text to continue.

    before: messages before the first turn, such as one of the system.
    """

    category: str
    turns: tuple[str, ...]
    raw: bool = False
    before: tuple[Mapping[str, str], ...] = ()


def read(
    path: Path, limit: int | None = None, raw: bool = False, unread: Callable[[str], None] | None = None
) -> list[Question]:
    """Read at most `limit` questions of each category.

    raw: without a chat template.  unread: called with the place and the fault of each line or entry that
    holds no prompt; without it, they raise RequestError.
    """
    text = text_of(path, "the prompts", RequestError)
    found = records(path.suffix, text.encode())
    if found is None:
        questions = [Question(path.stem, (line,), raw) for line in text.splitlines() if line.strip()]
    else:
        questions = list(_questions(found, path, raw, unread))
    if not questions:
        raise RequestError(f"{path} holds no prompts.")
    if set(MT_BENCH) <= {question.category for question in questions}:
        questions = [q._replace(category=CHAT) if q.category in MT_BENCH else q for q in questions]
    return list(_limited(questions, limit))


def _questions(
    found: Iterable[tuple[str, bytes]], path: Path, raw: bool, unread: Callable[[str], None] | None
) -> Iterator[Question]:
    for place, line in found:
        try:
            yield _question(line, f"{path}, {place}", raw)
        except RequestError as error:
            if unread is None:
                raise
            unread(str(error))


def _limited(questions: Iterable[Question], limit: int | None) -> Iterable[Question]:
    """The first `limit` questions of each category."""
    seen: dict[str, int] = {}
    for question in questions:
        seen[question.category] = seen.get(question.category, 0) + 1
        if limit is None or seen[question.category] <= limit:
            yield question


def _question(line: bytes, where: str, raw: bool) -> Question:
    try:
        example = example_of(line, ".jsonl")
    except RequestError as error:
        raise RequestError(f"{where}: {error}.") from error
    if not example.messages:
        return Question(example.category, (example.text,), True)
    *before, first = example.messages
    return Question(example.category, (first["content"], *example.later), raw, tuple(before))


def prompts_of(
    llm: LLM, questions: Sequence[Question], params: SamplingParams, all_turns: bool = False
) -> tuple[Prompts, int]:
    """(category, token ids) of every question, and the number left out because they exceed the context.

    A question yields a prompt for its first turn, or for all turns, each after the previous turns and
    answers.  The answers are those of plain decoding, so every method gets the same prompts.  Prompts go
    through the chat template.  Raw ones, or all without a template, are a first turn only, unchanged.
    """
    if llm.tokenizer is None:
        raise RequestError("prompts need a tokenizer, and the checkpoint has none: name one.")
    templated = bool(getattr(llm.tokenizer, "chat_template", None))
    if all_turns and not templated:
        raise RequestError("all turns need a chat template, and the model has none: ask for the first turn.")
    asked = [
        prompt for question in questions for prompt in _asked(llm, question, params, templated, all_turns)
    ]
    made = _fitting(llm, asked, params)
    if not made:
        raise RequestError(
            f"no prompt and {params.max_tokens} new tokens fit into the context of {llm.engine.max_len}."
        )
    return [(kind, {"prompt_token_ids": ids}) for kind, ids in made], len(asked) - len(made)


def prompts_for(
    llm: LLM,
    questions: Sequence[Question] | None,
    params: SamplingParams,
    raw: bool = False,
    all_turns: bool = False,
) -> tuple[Prompts, int]:
    """`prompts_of`; our own prompts if there are no questions.

    Raises RequestError for raw prompts with all turns.
    """
    if raw and all_turns:
        raise RequestError(
            "all turns need the chat template: ask for raw prompts or for all turns, not both."
        )
    if questions is not None:
        return prompts_of(llm, questions, params, all_turns)
    own = [(each.kind, rendered(each, llm.tokenizer, raw)["prompt_token_ids"]) for each in PROMPTS]
    made = _fitting(llm, own, params) or own
    return [(kind, {"prompt_token_ids": ids}) for kind, ids in made], len(own) - len(made)


def _fitting(
    llm: LLM, asked: Sequence[tuple[str, list[int]]], params: SamplingParams
) -> list[tuple[str, list[int]]]:
    """The prompts that fit into the context together with their answers."""
    return [(kind, ids) for kind, ids in asked if len(ids) + (params.max_tokens or 1) <= llm.engine.max_len]


def _asked(
    llm: LLM, question: Question, params: SamplingParams, templated: bool, all_turns: bool
) -> Iterator[tuple[str, list[int]]]:
    """(category, token ids) of the turns that are asked, each after the answers to those before it."""
    history: list[Mapping[str, str]] = [*question.before]
    for turn in question.turns if all_turns else question.turns[:1]:
        if question.raw or not templated:
            texts = [one["content"] for one in question.before] + [turn]
            yield question.category, llm.tokenizer.encode("\n\n".join(texts))
            return
        history.append({"role": "user", "content": turn})
        ids = render(llm.tokenizer, {"messages": history})["prompt_token_ids"]
        yield question.category, ids
        if turn is question.turns[-1] or not all_turns or len(ids) >= llm.engine.max_len:
            return
        (output,) = llm.generate({"prompt_token_ids": ids}, params)
        history.append({"role": "assistant", "content": output.outputs[0].text})
