"""`outrider tune layerskip`: which sublayers of a model to skip, by Bayesian optimisation of its decoding speed (arXiv 2309.08168).

Speed is not timed trial by trial, which would be noise on a small model.  A trial decodes the prompts greedily and counts steps and
guesses, which are the same on every machine; what a step and a guess cost is measured once, as a sum over sublayers and rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.measure import PLAIN, Configs, Measured, Prompts
from outrider.core.params import SamplingParams
from outrider.core.row import Speculation
from outrider.draft.layerskip.sets import Skip
from outrider.errors import ConfigError
from outrider.llm import LLM

METHOD = "layerskip"
THRESHOLDS = "tuned, with thresholds"
TURNS = 4  # in which the costs are measured; the best of each counts
Tick = Callable[[int, float], None]


@dataclass(frozen=True)
class Trial:
    skip: Skip
    depth: int
    speed: float  # tokens/s, by the costs
    counts: Speculation

    @property
    def config(self) -> dict[str, Any]:
        return config_of(self.skip, self.depth)


@dataclass(frozen=True)
class Costs:
    """Seconds.  step: of one that guesses nothing.  row: more, for every guess that it verifies.  whole: of a guess with all layers.
    attention, mlp: less, for every one that is skipped.  least: of a guess with hardly more than embedding and head."""

    step: float
    row: float
    whole: float
    attention: float
    mlp: float
    least: float = 0.0

    def speed(self, skip: Skip, counts: Speculation) -> float:
        guess = self.whole - len(skip.attention) * self.attention - len(skip.mlp) * self.mlp
        return counts.emitted / (
            counts.steps * self.step + counts.drafted * (self.row + max(guess, self.least))
        )


def config_of(skip: Skip, depth: int) -> dict[str, Any]:
    return {
        "method": METHOD, "skip_attention": list(skip.attention), "skip_mlp": list(skip.mlp), "exit_threshold": None,
        "num_speculative_tokens": depth,
    }  # fmt: skip


@dataclass
class Tuner:
    llm: LLM
    prompts: Prompts
    depth: int  # guesses at most
    tokens: int  # new ones a prompt, at most
    seed: int = 0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = self.llm.engine.checkpoint.spec.layers
        if self.layers < 2:
            raise ConfigError("a model of one layer has none to spare.")
        self.params = SamplingParams(temperature=0, max_tokens=self.tokens)

    def run(self, minutes: float, tick: Tick) -> Trial:
        """The best set that was found in this time.  `tick` gets how many sets were tried, and the best speed so far."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.costs = self._costs()
        sampler = optuna.samplers.TPESampler(seed=self.seed, multivariate=True, n_startup_trials=20)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for skip in self._probes():
            study.enqueue_trial({**self._named(skip), "depth": self.depth})
        end = time.monotonic() + 60 * minutes
        while not self.trials or time.monotonic() < end:
            asked = study.ask()
            switches = [
                bool(asked.suggest_categorical(name, [False, True])) for name in self._named(Skip((), ()))
            ]
            study.tell(asked, self._try(switches, asked.suggest_int("depth", 1, self.depth)).speed)
            tick(len(self.trials), max(trial.speed for trial in self.trials))
        return max(self.trials, key=lambda trial: trial.speed)

    def _named(self, skip: Skip) -> dict[str, bool]:
        """The switches as the optimiser knows them."""
        parts = (("attention", skip.attention), ("mlp", skip.mlp))
        return {f"{kind} {i}": i in part for kind, part in parts for i in range(self.layers)}

    def _probes(self) -> list[Skip]:
        """Sensible beginnings: every second layer, the middle half, its attentions, and each sublayer by itself."""
        middle = tuple(range(self.layers // 4, self.layers - max(1, self.layers // 4)))
        ones = [part for i in range(1, self.layers) for part in (Skip((i,), ()), Skip((), (i,)))]
        return [Skip.alternating(self.layers), Skip(middle, middle), Skip(middle, ()), *ones]

    def _try(self, switches: Sequence[bool], depth: int) -> Trial:
        attention, mlp = (
            tuple(i for i, on in enumerate(part) if on) for part in (switches[: self.layers], switches[self.layers :])
        )  # fmt: skip
        skip = Skip(attention, mlp)
        counts = next(
            (trial.counts for trial in self.trials if trial.skip == skip and trial.depth == depth), None
        )
        if counts is None:  # nothing but embedding and head is no set
            counts = Speculation(1) if all(switches) else self._decode(config_of(skip, depth))[0]
        self.trials.append(Trial(skip, depth, self.costs.speed(skip, counts), counts))
        return self.trials[-1]

    def _decode(self, config: dict[str, Any] | None) -> tuple[Speculation, float, float]:
        """All prompts, one at a time: what was counted, and the seconds of guessing and of everything else while decoding."""
        self.llm.use(config)
        engine = self.llm.engine
        engine.forget_prefixes()
        engine.reset()
        outputs = [self.llm.generate([prompt], self.params)[0] for _, prompt in self.prompts]
        times = engine.decode.times
        return (
            sum((output.speculation for output in outputs), Speculation()),
            times.propose,
            times.forward + times.rest,
        )

    def _costs(self) -> Costs:
        """From plain decoding and four sets that guess as far ahead as they may, in turns: a slow moment slows all of them."""
        every = tuple(range(self.layers))
        sets = [
            Skip(attention, mlp)
            for attention in ((), every)
            for mlp in ((), every[1:] if attention else every)
        ]
        configs = [None, *(config_of(skip, self.depth) for skip in sets)]
        turns = [[self._decode(config) for config in configs] for _ in range(TURNS)]
        counts = [counted for counted, _, _ in turns[0]]
        guessing = [min(turn[i][1] for turn in turns) for i in range(len(configs))]
        other = [min(turn[i][2] for turn in turns) for i in range(len(configs))]
        steps = [count.steps - len(self.prompts) for count in counts]  # the first token comes with the prompt
        if not steps[0] or not all(count.drafted for count in counts[1:]):
            raise ConfigError(
                "the answers are too short to measure a guess: ask for more tokens, or with other prompts."
            )
        step = other[0] / steps[0]
        row = min(max(0.0, other[i] - step * steps[i]) / counts[i].drafted for i in range(1, len(configs)))
        whole, no_mlp, no_attention, least = (guessing[i] / counts[i].drafted for i in range(1, len(configs)))
        attention = max(0.0, whole - no_attention) / self.layers
        return Costs(step, row, whole, attention, max(0.0, whole - no_mlp) / self.layers, least)


def compared(best: Trial, layers: int) -> Configs:
    """What the end of the tuning measures: the set that was found against plain decoding and what needs no tuning."""
    return {
        PLAIN: None,
        "every second layer": config_of(Skip.alternating(layers), best.depth),
        f"the first {layers - max(1, layers // 4)} layers": {
            "method": METHOD, "early_exit": layers - max(1, layers // 4), "exit_threshold": None, "num_speculative_tokens": best.depth,
        },
        "tuned": best.config,
        THRESHOLDS: {**best.config, "exit_threshold": "auto"},
    }  # fmt: skip


def gain(results: Sequence[Measured]) -> float:
    """The speed-up that was measured for the set as a file of it is used: with its thresholds."""
    return next(result for result in results if result.method == THRESHOLDS).speed_up(results[0])


def save(best: Trial, layers: int, model: str, tried: int, measured: float, to: Path) -> None:
    """What `"layers": FILE` reads; the rest says where it comes from.  measured: the speed-up over plain decoding."""
    found = {
        "layers": layers, "skip_attention": list(best.skip.attention), "skip_mlp": list(best.skip.mlp),
        "num_speculative_tokens": best.depth, "model": model, "tried": tried, "estimated tokens/s": round(best.speed, 1),
        "tokens per step": round(best.counts.tokens_per_step, 3), "acceptance": round(best.counts.acceptance, 3),
        "measured speed-up": round(measured, 3),
    }  # fmt: skip
    try:
        to.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the set cannot be written to {str(to)!r}: {error}") from error
