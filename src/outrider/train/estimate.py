"""Estimate of a training run: time by part, from a few measured texts, and sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.table import Table

from outrider.checkpoints.quantize import bits_of
from outrider.errors import RequestError
from outrider.llm import LLM
from outrider.train import answers, data, run
from outrider.train.base import parameter_count, stored_tensors
from outrider.train.loop import Trainer
from outrider.train.options import TrainOptions
from outrider.train.report import Report

MEASURED = 16  # texts
STEPS = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """seconds: by part.  weights: of the head.  tokens: of all answers.  head, features: bytes on disk."""

    texts: int
    tokens: int
    steps: int
    weights: int
    head: int
    features: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def estimate(llm: LLM, name: str, options: TrainOptions, report: Report) -> Estimate:
    """Measure a few texts and two steps, and extrapolate.  Nothing is written."""
    limit, options = options.cache_gb * 1e9, replace(options, cache_gb=0.0, minutes=None, schedule="steps")
    run.check(llm, name, options)
    items, sources = data.read(llm, options)
    report.sources(sources)
    some = items[:MEASURED]
    seconds, texts = _timed(lambda: _answers(llm, some, options))
    share = len(items) / len(some)
    sample = run.Texts(texts, [0], list(range(len(texts))), sources, "")
    steps = run.step_count(options, replace(sample, chosen=list(range(len(items)))))
    assert steps is not None, "the schedule is one of steps"
    method = run.new_method(llm, name, options, sample)
    features = run.new_features(llm, method, sample)
    spent = {"answers": seconds * share}
    spent["features"] = _timed(lambda: [features.sample(i) for i in range(len(texts))])[0] * share
    trainer = Trainer(method, features, sample.chosen, STEPS)
    for _ in range(STEPS):
        trainer.advance()
    for what in ("loss", "optimizer"):
        spent[what] = trainer.seconds[what] / STEPS * steps
    stored = stored_tensors(method.published()[1], bits_of(options.quantization))
    head = sum(tensor.nbytes for tensor in stored.values())
    places = features.states.starts[-1] * share
    tokens = round(share * sum(len(text.ids) - text.prompt for text in texts))
    size = round(2 * features.states.width * places)
    again = max(0.0, 1 - limit / size)  # share of the features that every step computes
    spent["features"] *= 1 - again
    spent["features"] += again * trainer.seconds["features"] / STEPS * steps
    return Estimate(
        texts=len(items),
        tokens=tokens,
        steps=steps,
        weights=parameter_count(method.network),
        head=head,
        features=size,
        seconds=spent,
    )


def _answers(llm: LLM, items: Sequence[data.Item], options: TrainOptions) -> list[answers.Text]:
    """Usable texts of the items; those of the data if the target answers none.

    Raises RequestError for none.
    """
    if not options.regenerate:
        return answers.given(items)
    texts = answers.texts_of(items, answers.answered(llm, dict(enumerate(items)), options))
    usable = [text for text in texts if text.usable]
    usable = usable or [text for text in answers.given(items) if text.usable]
    if not usable:
        raise RequestError(f"none of the first {len(texts)} answers has {data.SHORTEST} tokens or more.")
    return usable


def table(found: Estimate, limit: float) -> Table:
    """The estimate for the terminal.  limit: gigabytes of features that may be kept."""
    made = Table(show_header=False, show_edge=False)
    rows: Sequence[tuple[str, str]] = [
        ("texts, answer tokens", f"{found.texts:,}, about {found.tokens:,}"),
        ("steps", f"{found.steps:,}"),
        ("weights", f"{found.weights:,}, {found.head / 1e6:,.1f} MB on disk"),
        ("features on disk", f"{_size(min(found.features, limit * 1e9))} of {_size(found.features)}"),
        *((what, _time(seconds)) for what, seconds in found.seconds.items()),
        ("together, without evaluations", _time(found.total)),
    ]
    for row in rows:
        made.add_row(*row)
    return made


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    made = call()
    return time.perf_counter() - began, made
