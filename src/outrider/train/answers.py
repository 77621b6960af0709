"""Answers of the target to the prompts of the data, in a file that grows as they are made."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.params import SamplingParams
from outrider.errors import RequestError, writing
from outrider.llm import LLM
from outrider.train.data import SHORTEST, Item
from outrider.train.options import TrainOptions

CHUNK = 128  # prompts between two writes: what a kill can lose
TIMED_CHUNK = 16  # of a run with a deadline, which is looked at as often


class OutOfTime(Exception):
    """The minutes of a run are over before its steps have begun."""


@dataclass(frozen=True)
class Text:
    """A prompt of `prompt` tokens and its answer."""

    ids: list[int]
    prompt: int

    @property
    def usable(self) -> bool:
        return len(self.ids) - self.prompt >= SHORTEST


def given(items: Sequence[Item]) -> list[Text]:
    """The answers of the data."""
    return [Text(item.prompt + item.answer, len(item.prompt)) for item in items]


def regenerated(
    llm: LLM,
    items: Sequence[Item],
    options: TrainOptions,
    path: Path,
    tick: Callable[[int, int], None],
    failed: Callable[[int, str], None],
    deadline: float = math.inf,
    ask: bool = True,
) -> list[Text]:
    """The target's answers, in the order of the items.  One that failed is empty, and asked for next time.

    path: JSON lines of (item, ids), which an interrupted run goes on with.  tick(texts, tokens) is called
    for what has become known, failed(item, error) for requests that fail now.  ask: otherwise only those of
    the file, which another process has written.  Raises OutOfTime if answers are missing at `deadline`, of
    `perf_counter`.
    """
    answers = _read(path)
    tick(len(answers), 0)
    todo = [i for i in range(len(items)) if i not in answers] if ask else []
    size = CHUNK if deadline == math.inf else TIMED_CHUNK
    path.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(todo), size):
        if time.perf_counter() > deadline:
            raise OutOfTime
        new = answered(llm, {i: items[i] for i in todo[first : first + size]}, options, failed)
        answers.update(new)
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([i, ids]) + "\n" for i, ids in new.items())
            file.flush()
            os.fsync(file.fileno())
        tick(len(new), sum(map(len, new.values())))
    return [Text(item.prompt + answers.get(i, []), len(item.prompt)) for i, item in enumerate(items)]


def answered(
    llm: LLM,
    items: Mapping[int, Item],
    options: TrainOptions,
    failed: Callable[[int, str], None] = lambda item, error: None,
) -> dict[int, list[int]]:
    """Answers by the items' numbers, in one batch, without those that failed."""
    prompts = [{"prompt_token_ids": item.prompt} for item in items.values()]
    try:
        outputs = llm.generate(prompts, [_params(i, item, options) for i, item in items.items()])
    except RequestError as error:
        if len(items) > 1:  # not of a prompt: then it would be in the prompt's output
            raise
        failed(next(iter(items)), str(error))
        return {}
    for i, out in zip(items, outputs):
        if out.error:
            failed(i, str(out.error))
    return {i: list(out.outputs[0].token_ids) for i, out in zip(items, outputs) if not out.error}


def _params(i: int, item: Item, options: TrainOptions) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperatures[i % len(options.temperatures)],
        max_tokens=min(options.answer_tokens, options.length - len(item.prompt)),
        seed=options.seed + i,
        detokenize=False,
    )


def _read(path: Path) -> dict[int, list[int]]:
    """The answers in the file.  A line that a kill has cut is removed."""
    if not path.exists():
        return {}
    content = path.read_text(encoding="utf-8")
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        with writing(path):
            path.write_text(whole, encoding="utf-8")
    return dict(map(json.loads, whole.splitlines()))
