"""Answers of the target to the prompts of the data, in a file that grows as they are made."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.core.params import SamplingParams
from outrider.core.validate import is_whole
from outrider.errors import RequestError, writing
from outrider.llm import LLM
from outrider.train.data import SHORTEST, Item
from outrider.train.options import TrainOptions

CHUNK = 128  # prompts between two writes: what a kill can lose
TIMED_CHUNK = 16  # of a run with a deadline, which is checked after each


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


Tick = Callable[[int, int], None]  # (texts, their answer tokens)
Failed = Callable[[int, str], None]  # (number of an item, error)


class AnswerFile:
    """The target's answers to the prompts of `items`, by number.

    path: JSON lines of (number, ids), with which an interrupted run resumes; other processes read it.
    """

    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        self.path, self.items, self.answers = path, items, _read(path)

    def ask(
        self, llm: LLM, options: TrainOptions, tick: Tick, failed: Failed, deadline: float = math.inf
    ) -> None:
        """Generate the missing answers.  Those that fail stay missing, and are generated at the next call.

        Raises OutOfTime if answers are missing at `deadline`, of `perf_counter`.
        """
        missing = [i for i in range(len(self.items)) if i not in self.answers]
        size = CHUNK if deadline == math.inf else TIMED_CHUNK
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for first in range(0, len(missing), size):
            if time.perf_counter() > deadline:
                raise OutOfTime
            chunk = {i: self.items[i] for i in missing[first : first + size]}
            new = answered(llm, chunk, options, failed)
            self._append(new)
            tick(len(new), sum(map(len, new.values())))

    def _append(self, new: Mapping[int, list[int]]) -> None:
        self.answers.update(new)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([i, ids]) + "\n" for i, ids in new.items())
            file.flush()
            os.fsync(file.fileno())

    @property
    def texts(self) -> list[Text]:
        """The texts in the order of the items; a missing answer is empty."""
        return texts_of(self.items, self.answers)


def texts_of(items: Sequence[Item], answers: Mapping[int, list[int]]) -> list[Text]:
    """Prompts with their answers, by number; a missing one is empty."""
    return [Text(item.prompt + answers.get(i, []), len(item.prompt)) for i, item in enumerate(items)]


def answered(
    llm: LLM,
    items: Mapping[int, Item],
    options: TrainOptions,
    failed: Failed = lambda item, error: None,
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
    """The answers in the file.  A line that a kill has cut is removed, damaged ones count as missing."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with writing(path):
            os.truncate(path, end)  # a kill while the file is written anew would lose all answers
    found = dict[int, list[int]]()
    for line in content[:end].splitlines():
        with suppress(ValueError, TypeError):
            number, ids = json.loads(line)
            if is_whole(number) and isinstance(ids, list) and all(map(is_whole, ids)):
                found[number] = ids
    return found
