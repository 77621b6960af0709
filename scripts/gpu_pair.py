"""Part `pair` of gpu.py: tokens/s of methods on the built-in pair, whose target has a larger shape.

wide:  the target in the shape of Llama 3's 8 B (wide.py); its heads have 64 dimensions, not 128
grown: the target with more layers and a wider MLP, but its own width of 384, which suits no GPU

A cell is a batch size and a temperature. Methods take turns in every round, after `LLM.warm_up` of each, as
a server begins; `graphs_of_rounds` counts the graphs of all models, in every round, and `steps` has what
the steps of a further round took (gpu_steps.py). Prompts are included in tokens/s. For a method that
raises, its error takes the place of figures.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wide
from gpu_steps import Steps

from outrider import LLM, SamplingParams
from outrider.backends.triton.graphs import counts_of_all
from outrider.bench.measure import Run, once
from outrider.bench.prompts import PROMPTS, TASKS, rendered
from outrider.checkpoints.hub import Checkpoint
from outrider.core.row import Speculation

Rounds = dict[str, list[list[Run]]]  # of every method: the runs of each round, one for each group of requests
Configs = dict[str, dict[str, Any] | None]
GROWN = (32, 32768)  # layers and MLP of the grown target: 1.2 B weights
# Sizes for a dry run in Triton's interpreter.
TINY = {"hidden_size": 448, "intermediate_size": 1056, "num_hidden_layers": 9, "num_attention_heads": 8,
        "num_key_value_heads": 2}  # fmt: skip
PLAIN = "plain"
LEAST_REQUESTS = 4  # of a round, in groups of the batch size
SAMPLED = 128  # the largest batch that is measured at T = 0.8 too


class Options(NamedTuple):
    """targets: wide, grown.  methods: of `configs`, beside plain.  tokens: of an answer, at most.
    tiny: a dry run.
    """

    targets: Sequence[str]
    batches: Sequence[int]
    methods: Sequence[str]
    rounds: int = 2
    tokens: int = 96
    tiny: bool = False


def configs(eagle3: str) -> Configs:
    """speculative_config of every method.  eagle3: the head for the target."""
    return {
        PLAIN: None,
        "draft": {"model": "builtin-draft", "num_speculative_tokens": 5},
        "eagle3": {"model": eagle3, "tree": "chain", "num_speculative_tokens": 4},
        "eagle3-tree": {"model": eagle3, "num_speculative_tokens": 4, "nodes": 24},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "auto": {"method": "auto", "drafters": [{"model": "builtin-draft"}, {"model": eagle3}]},
    }


def pair(options: Options, device: torch.device, save: Callable[[Any], None]) -> dict[str, Any]:
    """Figures of all cells by target; `save` gets them after every cell."""
    found: dict[str, Any] = {}
    for name in options.targets:
        table = found[name] = {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                for cell, figures in cells(name, options, device, Path(folder)):
                    table[cell] = figures
                    save(found)
                    print(name, cell, line(figures), flush=True)
            except Exception as error:  # the next target may still work
                table["error"] = repr(error)
                save(found)
        gc.collect()
    return found


def line(figures: Mapping[str, Any]) -> str:
    """The tokens/s of all methods, for people."""
    parts = [
        f"{name} {method['tokens_per_second']}" if "tokens_per_second" in method else f"{name} failed"
        for name, method in figures["methods"].items()
    ]
    return f"({figures['seconds']} s): " + ", ".join(parts)


def load(name: str, options: Options, device: torch.device, folder: Path) -> tuple[LLM, str]:
    """The target, and its EAGLE-3 head."""
    if name == "grown":
        checkpoint, eagle3 = Checkpoint.open("builtin").grown(*GROWN), "builtin-eagle3"
    else:
        checkpoint = wide.widened("builtin", TINY if options.tiny else wide.LLAMA_8B, device)
        eagle3 = wide.widened_eagle3("builtin-eagle3", checkpoint, folder)
    with wide.opened_as(f"builtin-{name}", checkpoint) as model:
        llm = LLM(
            model,
            speculative_config=None,
            device=device.type,
            max_model_len=512,
            max_num_seqs=max(options.batches),
        )
    return llm, eagle3


def cells(name: str, options: Options, device: torch.device, folder: Path) -> Any:
    """Yields (cell, figures).  Cells of one batch share the engines, and thereby graphs."""
    began = time.perf_counter()
    llm, eagle3 = load(name, options, device, folder)
    yield "load", {"seconds": round(time.perf_counter() - began, 1), "methods": {}}
    wanted = {
        method: config for method, config in configs(eagle3).items() if method in (PLAIN, *options.methods)
    }
    questions = [*TASKS, *PROMPTS]
    for batch in options.batches:
        count = batch if options.tiny else max(batch, LEAST_REQUESTS)
        prompts = [rendered(questions[i % len(questions)], llm.tokenizer) for i in range(count)]
        began, engines = time.perf_counter(), Engines(llm, wanted)
        for temperature in (0.0, 0.8) if batch <= SAMPLED and not options.tiny else (0.0,):
            params = [
                SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, detokenize=False)
                for i in range(count)
            ]
            groups = [(prompts[i : i + batch], params[i : i + batch]) for i in range(0, count, batch)]
            methods = engines.measured(groups, options.rounds)
            seconds = round(time.perf_counter() - began, 1)
            yield f"batch {batch}, T = {temperature}", {"seconds": seconds, "methods": methods}
            began = time.perf_counter()
        del engines
        gc.collect()  # their graphs and K/V


class Engines:
    """An engine on the same weights for every method.  errors: of those that failed."""

    def __init__(self, llm: LLM, configs: Configs) -> None:
        self.errors: dict[str, str] = {}
        self.llms = {
            name: made for name, config in configs.items() if (made := self._variant(llm, name, config))
        }
        self.memories = {name: made.engine.drafter.memory for name, made in self.llms.items()}
        self.warm_up = {name: self._warmed(name) for name in [*self.llms]}

    def _variant(self, llm: LLM, name: str, config: dict[str, Any] | None) -> LLM | None:
        try:
            return llm.variant(config)
        except Exception as error:  # the other methods may still work
            self.errors[name] = repr(error)
            return None

    def _warmed(self, name: str) -> float:
        """Seconds that the warm-up of an engine took."""
        began = time.perf_counter()
        try:
            self.llms[name].warm_up()
        except Exception as error:  # the other methods may still work
            self.errors[name] = repr(error)
        return round(time.perf_counter() - began, 2)

    def measured(self, groups: Sequence[tuple[Any, Any]], rounds: int) -> dict[str, Any]:
        """Figures of every method."""
        failed, taken = dict(self.errors), Rounds()
        graphs: dict[str, list[dict[str, float]]] = {name: [] for name in self.llms}
        for _ in range(rounds):
            for name in [name for name in self.llms if name not in failed]:
                before = asdict(counts_of_all())
                try:
                    runs = self._round(name, groups)
                except Exception as error:  # the other methods may still work
                    failed[name] = repr(error)
                    continue
                after = asdict(counts_of_all())
                graphs[name].append({key: round(after[key] - before[key], 3) for key in after})
                taken.setdefault(name, []).append(runs)
        found = {name: figures(runs, taken.get(PLAIN)) for name, runs in taken.items() if name not in failed}
        for name, each in found.items():
            each["graphs_of_rounds"], each["warm_up_seconds"] = graphs[name], self.warm_up[name]
            with Steps(self.llms[name]) as steps:  # a further round, which is not timed
                self._round(name, groups)
            each["steps"] = steps.table()
            if report := self.llms[name].engine.report():
                each["chosen"] = chosen(report)
        return found | {name: {"error": error} for name, error in failed.items()}

    def _round(self, name: str, groups: Sequence[tuple[Any, Any]]) -> list[Run]:
        llm, memory = self.llms[name], self.memories[name]
        return [once(llm, "all", prompts, params, memory) for prompts, params in groups]


def figures(rounds: Sequence[Sequence[Run]], plain: Sequence[Sequence[Run]] | None) -> dict[str, Any]:
    """tokens_per_second, gain: medians of the rounds."""
    rates = [rate(runs) for runs in rounds]
    total = sum((answer.speculation for run in rounds[-1] for answer in run.answers), Speculation())
    found = {
        "tokens_per_second": round(statistics.median(rates), 1),
        "of_rounds": [round(each, 1) for each in rates],
        "tokens": sum(len(tokens) for tokens in texts(rounds[-1])),
        "tokens_per_step": round(total.tokens_per_step, 3),
        "acceptance": round(total.acceptance, 3),
    }
    if plain:
        gains = [mine / rate(runs) for mine, runs in zip(rates, plain)]
        expected = texts(plain[-1])
        found["gain"] = round(statistics.median(gains), 3)
        found["same_texts"] = sum(mine == other for mine, other in zip(texts(rounds[-1]), expected))
        found["texts"] = len(expected)
    return found


def rate(runs: Sequence[Run]) -> float:
    """Tokens/s of a round."""
    return sum(map(len, texts(runs))) / sum(run.seconds for run in runs)


def texts(runs: Sequence[Run]) -> list[list[int]]:
    return [tokens for run in runs for tokens in run.tokens]


def chosen(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the adaptive controller did so far, and its outlook for new requests."""
    outlooks = {name: drafter["outlook"] for name, drafter in report["drafters"].items()}
    return {
        "summary": report["summary"],
        "outlook": outlooks,
        "resting": report["resting"],
        "step_ms": report["step_ms"],
    }
