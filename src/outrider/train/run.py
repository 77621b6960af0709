"""A training run from files to a head: data, answers, features, steps, evaluations, result."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.conditions import conditions
from outrider.errors import RequestError
from outrider.llm import LLM
from outrider.train import answers, data
from outrider.train.answers import Text
from outrider.train.base import Method, parameter_count, replace_text
from outrider.train.data import Source
from outrider.train.evaluate import Evaluator
from outrider.train.features import Features
from outrider.train.loop import Trainer
from outrider.train.methods import method
from outrider.train.options import TrainOptions, as_json
from outrider.train.report import Report

SHARE = 10  # at most one text of so many is held out


@dataclass(frozen=True)
class Texts:
    """Texts of a run.  held, chosen: numbers of those for evaluation and for training.  key: of the cache."""

    texts: list[Text]
    held: list[int]
    chosen: list[int]
    sources: list[Source]
    key: str

    def counts(self, vocabulary: int) -> Tensor:
        """int64 [vocabulary]: how often the answers to train on have each token."""
        ids = [token for i in self.chosen for token in self.texts[i].ids[self.texts[i].prompt :]]
        return torch.bincount(torch.tensor(ids), minlength=vocabulary)


@dataclass(frozen=True)
class Result:
    """finished: False if the time ran out before.  records: of evaluations, the last of the final weights."""

    finished: bool
    losses: list[float]
    records: list[dict[str, Any]]


def cache_folder(options: TrainOptions) -> Path:
    return Path(options.cache).expanduser() if options.cache else options.work


def collect(llm: LLM, options: TrainOptions, report: Report) -> Texts:
    """Read the data and have the target answer it."""
    items, sources = data.read(llm, options)
    report.sources(sources)
    engine = llm.engine
    names = ("regenerate", "temperatures", "prompt_tokens", "answer_tokens", "length", "limit", "seed")
    parts = {name: as_json(options)[name] for name in names}
    parts |= {"data": [source.sha256 for source in sources], "target": engine.checkpoint.fingerprint}
    parts |= {name: getattr(engine.options, name) for name in ("model", "dtype", "quantization")}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    if options.regenerate:
        with report.phase("Answers of the target", len(items)) as tick:
            path = cache_folder(options) / f"answers-{key}.jsonl"
            texts = answers.regenerated(llm, items, options, path, tick)
    else:
        texts = answers.given(items)
    usable = [text for text in texts if text.usable]
    if len(usable) < 2:
        raise RequestError(f"only {len(usable)} of {len(texts)} answers have {data.SHORTEST} tokens or more.")
    order = list(range(len(usable)))
    random.Random(options.seed).shuffle(order)
    held = max(1, min(options.held_out, len(usable) // SHARE))
    return Texts(usable, order[:held], sorted(order[held:]), sources, key)


def new_method(llm: LLM, name: str, options: TrainOptions, texts: Texts) -> Method:
    """A method with its initial weights, always the same for a seed."""
    torch.manual_seed(options.seed)
    return method(name)(options, llm.engine.target, texts.counts(llm.engine.target.vocabulary))


def new_features(llm: LLM, made: Method, texts: Texts) -> Features:
    options: TrainOptions = made.options
    states = "-".join(map(str, sorted(made.wanted)))
    kind = f"{states}{'-logits' if made.logits else ''}"
    folder = cache_folder(options) / f"features-{texts.key}-{kind}" if options.cache_gb else None
    limit = options.cache_gb * 1e9
    return Features(llm.engine.decoder, texts.texts, made.wanted, made.logits, folder, limit)


def step_count(options: TrainOptions, texts: Texts) -> int:
    return options.steps or math.ceil(options.epochs * len(texts.chosen) / options.batch)


def train(llm: LLM, name: str, options: TrainOptions, report: Report) -> Result:
    """Train a head for the target and write it to `options.out`.  Afterwards `llm` has no drafter."""
    method(name)  # refuses unknown names before anything slow
    began, texts = time.perf_counter(), collect(llm, options, report)
    made = new_method(llm, name, options, texts)
    features = new_features(llm, made, texts)
    with report.phase("Features of the target", features.cached) as tick:
        features.fill(lambda done: tick(done, 0))
    trainer = Trainer(made, features, texts.chosen, step_count(options, texts), texts.key)
    resumed = trainer.load()
    report.start(trainer, texts.texts, parameter_count(made.network), resumed)
    evaluate = Evaluation(llm, trainer, texts, report)
    finished = _steps(trainer, evaluate, report, began)
    made.save(Path(options.out).expanduser())
    if not trainer.records or trainer.records[-1]["step"] != trainer.step:
        evaluate()
    trainer.save()
    replace_text(Path(options.out).expanduser() / "training.json", _provenance(name, trainer, texts))
    report.finish(trainer, finished)
    return Result(finished, trainer.losses, trainer.records)


def _steps(trainer: Trainer, evaluate: Evaluation, report: Report, began: float) -> bool:
    """Steps up to the last one; False if the time runs out before."""
    options = trainer.options
    if trainer.step == 0:
        evaluate()
    with report.steps(trainer) as tick:
        while trainer.step < trainer.steps:
            if options.minutes is not None and time.perf_counter() - began > 60 * options.minutes:
                return False
            tick(trainer.advance())
            if trainer.step % options.evaluate_every == 0:
                evaluate()
            if trainer.step % options.checkpoint_every == 0:
                trainer.save()
    return True


class Evaluation:
    """Evaluates the weights as they are, and adds a record: held-out loss, and acceptance in the engine."""

    def __init__(self, llm: LLM, trainer: Trainer, texts: Texts, report: Report) -> None:
        options = trainer.options
        self.trainer, self.report = trainer, report
        self.held = texts.held[: options.evaluate_prompts]
        prompts = [texts.texts[i].ids[: texts.texts[i].prompt] for i in self.held]
        self.engine = Evaluator(llm, prompts, options.evaluate_tokens)

    def __call__(self) -> None:
        trainer, began = self.trainer, time.perf_counter()
        folder = trainer.options.work / "head"
        trainer.method.save(folder)
        found = self.engine.measure(trainer.method.speculation(folder, trainer.options.depth))
        record = {"step": trainer.step, "held_loss": trainer.held_loss(self.held), **asdict(found)}
        trainer.records.append(record)
        trainer.seconds["evaluation"] += time.perf_counter() - began
        with (trainer.options.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.report.evaluated(record)


def _provenance(name: str, trainer: Trainer, texts: Texts) -> str:
    """What the weights were made from, as JSON."""
    checkpoint = trainer.method.target.checkpoint
    used: Sequence[Text] = [texts.texts[i] for i in texts.chosen]
    made = {
        **conditions(),
        "method": name,
        "target": {"name": checkpoint.name, "fingerprint": checkpoint.fingerprint},
        "options": as_json(trainer.options),
        "rate": trainer.method.rate,
        "data": [asdict(source) for source in texts.sources],
        "texts": len(used),
        "answer tokens": sum(len(text.ids) - text.prompt for text in used),
        "held out": len(texts.held),
        "weights": parameter_count(trainer.method.network),
        "steps": trainer.step,
        "of steps": trainer.steps,
        "evaluations": trainer.records,
        "seconds of the last process": {what: round(spent, 2) for what, spent in trainer.seconds.items()},
    }
    return json.dumps(made, indent=1) + "\n"
