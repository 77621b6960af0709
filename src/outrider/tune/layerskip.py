"""`outrider tune layerskip`: find the sublayers of a model to skip by Bayesian optimization of its decoding
speed (arXiv 2309.08168).

Trials are not timed, because noise would hide the differences on a small model.  A trial decodes the prompts
greedily and counts steps and draft tokens, which are the same on every machine.  The cost of a step and of a
draft token is measured once, as a sum over sublayers and rows.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bench.measure import PLAIN, Configs, Measured, Prompts
from outrider.core.params import SamplingParams
from outrider.core.row import Speculation
from outrider.draft.layerskip.sets import Skip
from outrider.errors import ConfigError, saving
from outrider.llm import LLM

METHOD = "layerskip"
THRESHOLDS = "tuned, with thresholds"
ROUNDS = 4  # of cost measurements; the fastest of each counts
Tick = Callable[[int, float], None]


def import_optuna() -> Any:
    """Return the module optuna.  Raises ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "`outrider tune` needs optuna: install it with  pip install 'outrider[tune]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


@dataclass(frozen=True)
class Trial:
    """speed: tokens/s, by the measured costs."""

    skip: Skip
    depth: int
    speed: float
    counts: Speculation

    @property
    def config(self) -> dict[str, Any]:
        return config_of(self.skip, self.depth)


@dataclass(frozen=True)
class Costs:
    """Seconds.

    step: a step that drafts nothing.  row: each draft token that a step verifies, in addition.
    full: drafting a token with all layers.  attention, mlp: what one skipped sublayer saves of it.
    floor: drafting a token with hardly more than embedding and head.
    """

    step: float
    row: float
    full: float
    attention: float
    mlp: float
    floor: float = 0.0

    def speed(self, skip: Skip, counts: Speculation) -> float:
        """Tokens/s of decoding with a set."""
        draft = self.full - len(skip.attention) * self.attention - len(skip.mlp) * self.mlp
        drafting = counts.drafted * (self.row + max(draft, self.floor))
        return counts.emitted / (counts.steps * self.step + drafting)


class Decoded(NamedTuple):
    """All prompts decoded with one config: the counts, and seconds of drafting and of everything else while
    decoding.
    """

    counts: Speculation
    drafting: float
    other: float


def config_of(skip: Skip, depth: int) -> dict[str, Any]:
    """speculative_config that skips these sublayers, in chains of `depth` draft tokens."""
    return {
        "method": METHOD,
        "skip_attention": list(skip.attention),
        "skip_mlp": list(skip.mlp),
        "exit_threshold": None,
        "num_speculative_tokens": depth,
    }


@dataclass
class Tuner:
    """depth: draft tokens of a step, at most.  tokens: new tokens of a prompt, at most."""

    llm: LLM
    prompts: Prompts
    depth: int
    tokens: int
    seed: int = 0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = self.llm.engine.checkpoint.spec.layers
        if self.layers < 2:
            raise ConfigError("a model of one layer has none to spare.")
        self.params = SamplingParams(temperature=0, max_tokens=self.tokens)

    def run(self, minutes: float, tick: Tick) -> Trial:
        """Search for this time; the best trial.  tick(trials, best speed so far) is called after each."""
        optuna = import_optuna()
        self.costs = self._measure_costs()
        sampler = optuna.samplers.TPESampler(seed=self.seed, multivariate=True, n_startup_trials=20)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for skip in self._initial_sets():
            study.enqueue_trial({**self._switches(skip), "depth": self.depth})
        names = list(self._switches(Skip((), ())))
        end = time.monotonic() + 60 * minutes
        while not self.trials or time.monotonic() < end:
            trial = study.ask()
            switches = [bool(trial.suggest_categorical(name, [False, True])) for name in names]
            study.tell(trial, self._try(switches, trial.suggest_int("depth", 1, self.depth)).speed)
            tick(len(self.trials), max(trial.speed for trial in self.trials))
        return max(self.trials, key=lambda trial: trial.speed)

    def _switches(self, skip: Skip) -> dict[str, bool]:
        """A set as optuna's parameters: name of a sublayer -> whether it is skipped, all attentions first."""
        parts = (("attention", skip.attention), ("mlp", skip.mlp))
        return {f"{kind} {i}": i in part for kind, part in parts for i in range(self.layers)}

    def _initial_sets(self) -> list[Skip]:
        """Every second layer, the middle half, its attentions, and each sublayer by itself."""
        middle = tuple(range(self.layers // 4, self.layers - max(1, self.layers // 4)))
        single = [part for i in range(1, self.layers) for part in (Skip((i,), ()), Skip((), (i,)))]
        return [Skip.alternating(self.layers), Skip(middle, middle), Skip(middle, ()), *single]

    def _try(self, switches: Sequence[bool], depth: int) -> Trial:
        """Run a trial, or take the counts of an equal one."""
        attention, mlp = switches[: self.layers], switches[self.layers :]
        layers = range(self.layers)
        skip = Skip(tuple(itertools.compress(layers, attention)), tuple(itertools.compress(layers, mlp)))
        equal = [trial for trial in self.trials if trial.skip == skip and trial.depth == depth]
        if equal:
            counts = equal[0].counts
        elif all(switches):  # without any sublayer there is no model left
            counts = Speculation(1)
        else:
            counts = self._decode(config_of(skip, depth)).counts
        self.trials.append(Trial(skip, depth, self.costs.speed(skip, counts), counts))
        return self.trials[-1]

    def _decode(self, config: dict[str, Any] | None) -> Decoded:
        """Decode all prompts, one at a time, from an empty prefix cache."""
        self.llm.use(config)
        engine = self.llm.engine
        engine.forget_prefixes()
        engine.reset()
        outputs = [self.llm.generate([prompt], self.params)[0] for _, prompt in self.prompts]
        counts = sum((output.speculation for output in outputs), Speculation())
        times = engine.decode.times
        return Decoded(counts, times.propose, times.forward + times.rest)

    def _measure_costs(self) -> Costs:
        """Measure plain decoding and four sets: all layers, no MLPs, no attentions, and almost none."""
        every, prompts = tuple(range(self.layers)), len(self.prompts)
        sets = [Skip((), ()), Skip((), every), Skip(every, ()), Skip(every, every[1:])]
        plain, *drafted = self._fastest([None, *(config_of(skip, self.depth) for skip in sets)])
        if plain.counts.steps == prompts or not all(run.counts.drafted for run in drafted):
            raise ConfigError(
                "the answers are too short to measure a draft token: ask for more tokens, or with other "
                "prompts."
            )
        step = plain.other / (plain.counts.steps - prompts)  # the first token comes with the prompt

        def row(run: Decoded) -> float:
            return max(0.0, run.other - step * (run.counts.steps - prompts)) / run.counts.drafted

        full, no_mlp, no_attention, floor = (run.drafting / run.counts.drafted for run in drafted)
        attention = max(0.0, full - no_attention) / self.layers
        mlp = max(0.0, full - no_mlp) / self.layers
        return Costs(step, min(map(row, drafted)), full, attention, mlp, floor)

    def _fastest(self, configs: Sequence[dict[str, Any] | None]) -> list[Decoded]:
        """Decode with every config; the shortest times of several rounds, whose counts are equal.

        The configs take turns, so that a slow moment of the machine slows down all of them.
        """
        best = [self._decode(config) for config in configs]
        for _ in range(ROUNDS - 1):
            for i, config in enumerate(configs):
                run = self._decode(config)
                drafting, other = min(run.drafting, best[i].drafting), min(run.other, best[i].other)
                best[i] = Decoded(best[i].counts, drafting, other)
        return best


def compared(best: Trial, layers: int) -> Configs:
    """Configs measured at the end: the best set, plain decoding, and sets that need no tuning."""
    first = layers - max(1, layers // 4)
    early_exit = {"method": METHOD, "early_exit": first, "exit_threshold": None}
    return {
        PLAIN: None,
        "every second layer": config_of(Skip.alternating(layers), best.depth),
        f"the first {first} layers": {**early_exit, "num_speculative_tokens": best.depth},
        "tuned": best.config,
        THRESHOLDS: {**best.config, "exit_threshold": "auto"},
    }


def gain(results: Sequence[Measured]) -> float:
    """The measured speed-up of the set as a file of it is used: with thresholds."""
    return next(result for result in results if result.method == THRESHOLDS).speed_up(results[0])


def save(best: Trial, layers: int, model: str, tried: int, measured: float, to: Path) -> None:
    """Write the file that `"layers": FILE` reads.  measured: the speed-up over plain decoding."""
    found = {
        "layers": layers,
        "skip_attention": list(best.skip.attention),
        "skip_mlp": list(best.skip.mlp),
        "num_speculative_tokens": best.depth,
        "model": model,
        "tried": tried,
        "estimated tokens/s": round(best.speed, 1),
        "tokens per step": round(best.counts.tokens_per_step, 3),
        "acceptance": round(best.counts.acceptance, 3),
        "measured speed-up": round(measured, 3),
    }
    with saving("set", to):
        to.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
