"""A training run from files to a head: data, answers, features, steps, evaluations, result."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.bench.conditions import conditions
from outrider.errors import ConfigError, RequestError
from outrider.llm import LLM
from outrider.train import answers, data
from outrider.train.answers import OutOfTime, Text
from outrider.train.base import Method, parameter_count, replace_text
from outrider.train.data import Source
from outrider.train.evaluate import Evaluation, write_log
from outrider.train.features import Features, States, needed_states
from outrider.train.folders import cache_folder, new_folders, only_run, only_writer
from outrider.train.loop import SEEDS, Trainer, check_same_run, identity, read_checkpoint
from outrider.train.methods import method
from outrider.train.options import TrainOptions, as_json
from outrider.train.processes import Processes
from outrider.train.report import Report

WEIGHTS = (".safetensors", ".bin")
ONE_FOLDER = "the processes have different answers or checkpoints: they need one folder for cache and out."
PROVENANCE = "training.json"
SHARE = 10  # at most one text of so many is held out


@dataclass(frozen=True)
class Texts:
    """held, chosen: numbers of texts for evaluation and training.  key: hash of their ids and the target."""

    texts: list[Text]
    held: list[int]
    chosen: list[int]
    sources: list[Source]
    key: str

    def counts(self, vocabulary: int) -> Tensor:
        """int64 [vocabulary]: how often the answers to train on have each token."""
        ids = [token for i in self.chosen for token in self.texts[i].ids[self.texts[i].prompt :]]
        return torch.bincount(torch.tensor(ids), minlength=vocabulary)


class Prepared(NamedTuple):
    """Texts, network and features, with which the steps can begin."""

    texts: Texts
    made: Method
    features: Features[Any]


class Supervision(NamedTuple):
    """Report, deadline and processes of a run.

    deadline: on the clock of `time.perf_counter`
    """

    report: Report
    deadline: float
    processes: Processes


@dataclass(frozen=True)
class Result:
    """finished: False if the time ran out before.  records: of evaluations, the last of the final weights."""

    finished: bool
    losses: list[float]
    records: list[dict[str, Any]]


def collect(llm: LLM, options: TrainOptions, report: Report, deadline: float, ask: bool = True) -> Texts:
    """Read the data, and generate the missing answers if `ask`.  Raises OutOfTime at the deadline."""
    items, sources = data.read(llm, options)
    report.sources(sources)
    target = target_parts(llm)
    if options.regenerate:
        asked = {name: as_json(options)[name] for name in ("temperatures", "answer_tokens", "length", "seed")}
        key = hashed([target, asked, [item.prompt for item in items]])
        with report.phase("Answers of the target", len(items)) as tick:
            path = cache_folder(options) / f"answers-{key}.jsonl"
            if not ask and not path.exists():
                raise ConfigError(ONE_FOLDER)
            file = answers.AnswerFile(path, items)
            tick(len(file.answers), 0)
            if ask:
                file.ask(llm, options, tick, report.failed, deadline)
            texts = file.texts
        report.empty(sum(len(text.ids) == text.prompt for text in texts), len(texts))
    else:
        texts = answers.given(items)
    usable = [text for text in texts if text.usable]
    if len(usable) < 2:
        raise RequestError(f"only {len(usable)} of {len(texts)} answers have {data.SHORTEST} tokens or more.")
    order = list(range(len(usable)))
    random.Random(options.seed).shuffle(order)
    held = max(1, min(options.held_out, len(usable) // SHARE))
    key = hashed([target, [[text.prompt, text.ids] for text in usable]])
    return Texts(usable, order[:held], sorted(order[held:]), sources, key)


def target_parts(llm: LLM) -> dict[str, Any]:
    """All that the target's numbers depend on: options, and name, size and time of its files."""
    checkpoint, options = llm.engine.checkpoint, llm.engine.options
    if checkpoint.gguf is not None:
        files = [checkpoint.gguf.path]
    else:
        files = sorted(path for path in checkpoint.folder.iterdir() if path.suffix in WEIGHTS)
        files.append(checkpoint.folder / "config.json")
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    names = ("dtype", "quantization", "activations", "kv_cache_dtype", "max_model_len")
    given = {name: getattr(options, name) for name in names}
    return {"files": found, "layers": checkpoint.spec.layers, **given}


def hashed(value: Any) -> str:
    """Hash of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def check(llm: LLM, name: str, options: TrainOptions) -> None:
    """Build the method without its texts and drop it: mistakes are found before the target answers.

    Raises ConfigError for options that do not fit the target or the engine, for a head in `init` that does
    not fit, for an unknown format, and for a folder that holds another model or run.
    """
    for option, needed in options.engine.items():
        if getattr(llm.engine.options, option) < needed:
            raise ConfigError(f"this run needs {option}={needed!r} as an option of the engine.")
    torch.manual_seed(options.seed % SEEDS)
    target = llm.engine.target
    made = method(name)(options, target, torch.zeros(target.vocabulary, dtype=torch.int64))
    made.published()
    out = Path(options.out).expanduser()
    held = any((out / name).exists() for name in ("config.json", "model.safetensors"))
    if held and not (options.work.is_dir() or (out / PROVENANCE).exists()):
        raise ConfigError(
            f"out: {options.out!r} holds a model of no run of this command: give a new folder as out."
        )
    if (state := read_checkpoint(options, mmap=True)) is not None:
        unknown = {"data"} if options.steps else {"data", "steps"}  # they depend on the texts
        before = {what: value for what, value in state["run"].items() if what not in unknown}
        now = {what: value for what, value in identity(made).items() if what not in unknown}
        check_same_run(options, before, now)


def new_method(llm: LLM, name: str, options: TrainOptions, texts: Texts) -> Method:
    """A method with its initial weights, always the same for a seed."""
    torch.manual_seed(options.seed % SEEDS)
    return method(name)(options, llm.engine.target, texts.counts(llm.engine.target.vocabulary))


def new_features(llm: LLM, made: Method, texts: Texts) -> Features[States]:
    """Features of all texts, with a file of their own for the states and texts that a method reads."""
    options: TrainOptions = made.options
    which = "-".join(map(str, sorted(made.wanted)))
    kind = f"{which}{'-logits' if made.logits else ''}"
    folder = cache_folder(options) / f"features-{texts.key}-{kind}" if options.cache_gb else None
    kept, model = needed_states(made.wanted, made.logits), llm.engine.decoder
    states = States(model, texts.texts, kept, folder, options.cache_gb * 1e9)
    return Features(model, texts.texts, made.logits, states)


def step_count(options: TrainOptions, texts: Texts) -> int | None:
    """None if the rate follows the time."""
    if options.schedule == "minutes":
        return None
    return options.steps or math.ceil(options.epochs * len(texts.chosen) / options.batch)


def train(llm: LLM, name: str, options: TrainOptions, report: Report) -> Result:
    """Train a head for the target and write it to `options.out`.  Afterwards `llm` has no drafter.

    Under a launcher every process calls it; the first one's result has the evaluations.
    """
    check(llm, name, options)
    deadline = time.perf_counter() + 60 * (options.minutes or math.inf)
    supervision = Supervision(report, deadline, Processes.joined())
    with new_folders(options), only_run(options) if supervision.processes.first else nullcontext():
        if (prepared := _prepare(llm, name, options, supervision)) is None:
            report.say("Stopped before the first step: the same command goes on.")
            return Result(False, [], [])
        return fit(llm, name, prepared, supervision)


def fit(llm: LLM, name: str, prepared: Prepared, supervision: Supervision) -> Result:
    """The steps of `train`, its evaluations and what it writes."""
    (texts, made, features), (report, deadline, processes) = prepared, supervision
    options: TrainOptions = made.options
    steps = step_count(options, texts)
    if steps is None and deadline == math.inf:
        deadline = time.perf_counter() + 60 * (options.minutes or 0)
    trainer = Trainer(made, features, texts.chosen, steps, texts.key, processes)
    resumed = trainer.load()
    _check_same(processes, str(trainer.step))
    if resumed and processes.first:
        write_log(trainer)  # a kill may have left evaluations of later steps in it
    report.start(trainer, texts.texts, parameter_count(made.network), resumed)
    evaluate = Evaluation(llm, trainer, texts.held, report)
    finished = _steps(trainer, evaluate, report, deadline)
    if not processes.first:
        return Result(finished, trainer.losses, [])
    made.save(Path(options.out).expanduser())
    if not trainer.records or trainer.records[-1]["step"] != trainer.step:
        evaluate()
    trainer.save()
    provenance = Path(options.out).expanduser() / PROVENANCE
    replace_text(provenance, _provenance(name, trainer, texts, provenance))
    report.finish(trainer, finished)
    return Result(finished, trainer.losses, trainer.records)


def _prepare(llm: LLM, name: str, options: TrainOptions, supervision: Supervision) -> Prepared | None:
    """Collect and compute what the steps need; None if the time is over before.

    The first process fills the cache.
    """
    report, deadline, processes = supervision

    def prepared() -> Prepared | None:
        try:
            texts = collect(llm, options, report, deadline, processes.first)
            made = new_method(llm, name, options, texts)
            features = new_features(llm, made, texts)
            with report.phase("Features of the target", features.states.cached) as tick:
                features.states.fill(lambda done: tick(done, 0), deadline)
        except OutOfTime:
            return None
        return Prepared(texts, made, features)

    found = None
    if processes.first:
        with only_writer(cache_folder(options)):
            found = prepared()
    if not processes.total(float(found is not None)):  # the others wait here
        return None
    found = found or prepared()
    _check_same(processes, "" if found is None else found.texts.key)
    return found


def _check_same(processes: Processes, key: str) -> None:
    if not processes.same(key):
        raise ConfigError(ONE_FOLDER)


def _steps(trainer: Trainer, evaluate: Evaluation, report: Report, deadline: float) -> bool:
    """Steps up to the last one; False if the time runs out before."""
    options, processes = trainer.options, trainer.processes
    if trainer.step == 0 and processes.first and not trainer.records:  # an earlier process may have made it
        evaluate()
    if processes.total(time.perf_counter() > deadline):  # no time for a step
        return trainer.done == 1
    trainer.schedule.begin(deadline)
    with report.steps(trainer) as tick:
        while trainer.done < 1:
            if trainer.steps is not None and processes.total(time.perf_counter() > deadline):
                return False
            tick(trainer.advance())
            if not processes.first:
                continue
            if trainer.step % options.evaluate_every == 0:
                evaluate()
            if trainer.step % options.checkpoint_every == 0:
                trainer.save()
                trainer.method.save(Path(options.out).expanduser())
    return True


def _provenance(name: str, trainer: Trainer, texts: Texts, path: Path) -> str:
    """Provenance of the weights, as JSON.  path: of the file, which has the times of earlier steps."""
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
        "answer tokens seen": trainer.seen,
        "evaluations": trainer.records,
        "seconds of the last process": _seconds(trainer, path),
    }
    return json.dumps(made, indent=1) + "\n"


def _seconds(trainer: Trainer, path: Path) -> dict[str, float]:
    """Seconds by part of the work, of the last process that took a step."""
    if not trainer.tokens:
        with suppress(OSError, ValueError, AttributeError):  # there is none, or it was changed
            before = json.loads(path.read_text("utf-8")).get("seconds of the last process")
            if isinstance(before, dict):
                return before
    return {what: round(spent, 2) for what, spent in trainer.seconds.items()}
