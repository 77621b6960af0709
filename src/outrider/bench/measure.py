"""Methods against plain decoding: the same prompts, the same seeds, one after the other, and whether the tokens agree."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import draft
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from outrider.sampling.params import SamplingParams
from outrider.types import Speculation

PLAIN = "plain decoding"
Configs = Mapping[str, Mapping[str, Any] | None]  # label -> speculative_config
Prompts = Sequence[tuple[str, Any]]  # (kind, what LLM.generate takes)


@dataclass
class Measured:
    """One method over some prompts.  seconds includes the prompts' own computation; tokens are new tokens."""

    method: str
    kinds: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    speculation: list[Speculation] = field(default_factory=list)
    drafting: float = 0.0  # share of the step time

    def only(self, kind: str) -> Measured:
        keep = [i for i, k in enumerate(self.kinds) if k == kind]
        return Measured(
            self.method,
            [self.kinds[i] for i in keep],
            [self.seconds[i] for i in keep],
            [self.tokens[i] for i in keep],
            [self.speculation[i] for i in keep],
            self.drafting,
        )

    @property
    def speed(self) -> float:
        """New tokens a second."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    @property
    def total(self) -> Speculation:
        return sum(self.speculation, Speculation())

    @property
    def repeated(self) -> float:
        """Share of 4-grams that occurred before in the same text: loops flatter every method that copies."""
        grams = [[tuple(t[i : i + 4]) for i in range(len(t) - 3)] for t in self.tokens]
        return 1 - sum(len(set(g)) for g in grams) / max(1, sum(map(len, grams)))


def demonstrations() -> dict[str, Mapping[str, Any] | None]:
    """Label -> speculative_config of everything that the methods want shown on the built-in pair; plain decoding first."""
    shown: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
    for name, method in sorted(draft.methods().items()):
        for label, config in method.demo.items():
            shown[label] = {"method": name, **config}
    return shown


def measure(
    llm: LLM,
    configs: Configs,
    prompts: Prompts,
    params: SamplingParams,
    repeats: int = 1,
    tick: Callable[[str], None] = lambda label: None,
) -> list[Measured]:
    """Every config over every (kind, prompt), one request at a time; the best of `repeats` times each.

    Methods take turns at each prompt, so that a machine that slows down for a while slows all of them; each turn runs twice,
    since a method that follows one with weights of its own finds the processor's caches cold.  What a method has learned from the
    prompts before stays with it, but no prompt finds what its own last run has left.
    """
    variants = {label: llm.variant(config) for label, config in configs.items()}
    results = [Measured(label) for label in configs]
    memory = {label: copy.deepcopy(variant.engine.drafter.memory) for label, variant in variants.items()}
    for label, variant in variants.items():
        variant.generate(prompts[0][1], params)  # warm up
        variant.engine.reset()
        variant.engine.drafter.memory = memory[label]
    for kind, prompt in prompts:
        best: dict[str, tuple[float, RequestOutput]] = {}
        memory = {label: copy.deepcopy(variant.engine.drafter.memory) for label, variant in variants.items()}
        for label, variant in itertools.chain.from_iterable(variants.items() for _ in range(repeats)):
            for _ in range(2):
                variant.engine.forget_prefixes()
                variant.engine.drafter.memory = copy.deepcopy(memory[label])
                began = time.perf_counter()
                (output,) = variant.generate(prompt, params)
                seconds = time.perf_counter() - began
                if label not in best or seconds < best[label][0]:
                    best[label] = (seconds, output)
            tick(label)
        for result in results:
            seconds, output = best[result.method]
            result.kinds.append(kind)
            result.seconds.append(seconds)
            result.tokens.append(output.outputs[0].token_ids)
            result.speculation.append(output.speculation)
    for result in results:
        times = variants[result.method].engine.times
        result.drafting = times.propose / sum(times)
        variants[result.method].engine.check()
    return results
