"""Real runs beside the simulation: recorded acceptance, and processes whose figures it has to meet.

A worker process measures what steps cost in batches of equal requests, then runs another workload: requests
of many lengths through a batch that they enter and leave.  The simulation gets the costs and the accepted
lengths of each request, and is compared by tokens a second and by the times at which requests end.
"""

from __future__ import annotations

import multiprocessing
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.prompts import PROMPTS, TASKS, rendered

CONFIG = {"model": "builtin-draft"}
BATCH, LIMIT = 4, 0.1  # rows of a real batch; largest relative difference
PROMPT = "The future of AI is"


def record(depth: int) -> list[list[int]]:
    """Accepted lengths of drafts of a draft model, for each prompt, greedy and at temperature 0.8."""
    llm = LLM("builtin", speculative_config={**CONFIG, "num_speculative_tokens": depth})
    runs = []
    for temperature in (0.0, 0.8):
        for prompt in (*PROMPTS, *TASKS):
            text = rendered(prompt, llm.get_tokenizer())
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=256)
            runs.append(lengths(llm, text, params, depth))
    return [run for run in runs if run]


def lengths(llm: LLM, prompt: str, params: SamplingParams, depth: int) -> list[int]:
    """Accepted lengths of the steps of a request; the last one, which its end cut, is left out."""
    sources = llm.generate([prompt], params)[0].outputs[0].token_sources
    found, run = [], 0
    for source in sources[1:]:  # the first token is of the prompt's step
        if source is None:
            found.append(min(run, depth))
            run = 0
        else:
            run += 1
    return found


@dataclass(frozen=True)
class Measured:
    """Seconds of a step by its decoding rows' batch, at one depth; those of a prompt's step."""

    steps: Mapping[int, float]
    prefill: float

    def seconds(self, batch: int) -> float:
        known = sorted(self.steps)
        at = bisect_left(known, batch)
        if at == len(known) or known[at] == batch or at == 0:
            return self.steps[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        share = (batch - low) / (high - low)
        return (1 - share) * self.steps[low] + share * self.steps[high]


def measure(llm: LLM) -> Measured:
    """Costs from batches of equal requests, of which all start and end together."""
    steps, prefill = {}, []
    for batch in (1, 2, 3, 4):
        seconds = []
        for _ in range(5):
            short = timed(llm, batch, 8)
            long = timed(llm, batch, 72)
            seconds.append((long[0] - short[0]) / (long[1] - short[1]))
            prefill.append((short[0] - short[1] * seconds[-1]) / batch)
        steps[batch] = median(seconds)
    return Measured(steps, max(0.0, median(prefill)))


def timed(llm: LLM, batch: int, tokens: int) -> tuple[float, int]:
    """Seconds and steps of a batch; prompts differ, so that none is cached."""
    llm.engine.forget_prefixes()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [f"{PROMPT} {i}" for i in range(batch)]
    before, began = llm.engine.steps, time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began, llm.engine.steps - before


def worker(config: Mapping[str, Any] | None) -> dict[str, float]:
    """Measured and simulated tokens a second of a workload, in this process."""
    torch.set_num_threads(1)
    llm = LLM("builtin", speculative_config=config, max_num_seqs=BATCH)
    timed(llm, BATCH, 32)
    costs = measure(llm)
    sizes = [20 + 37 * i % 120 for i in range(24)]
    params = [SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for size in sizes]
    prompts = [f"{PROMPT} {i} and" for i in range(len(sizes))]
    real = []
    for _ in range(5):
        llm.engine.forget_prefixes()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        real.append(time.perf_counter() - began)
    runs = [_emitted([source is None for source in output.outputs[0].token_sources]) for output in outputs]
    return {"real": sum(sizes) / median(real), "simulated": sum(sizes) / _simulated(costs, runs)}


def _emitted(plain: list[bool]) -> list[int]:
    """Tokens of each step of a request: those up to one that the target itself gave."""
    found, run = [], 0
    for own in plain:
        run += 1
        if own:
            found.append(run)
            run = 0
    return [*found, run] if run else found


def _simulated(costs: Measured, runs: list[list[int]]) -> float:
    """Seconds of the workload: requests enter in order, each for as many steps as it took."""
    waiting, running, seconds = [len(run) for run in runs], list[int](), 0.0
    while waiting or running:
        while waiting and len(running) < BATCH:
            running.append(waiting.pop(0))
            seconds += costs.prefill
        seconds += costs.seconds(len(running))
        running = [left - 1 for left in running if left > 1]
    return seconds


def validate(processes: int) -> list[dict[str, Any]]:
    """Compare so many real processes at a time with the simulation.  Raises SystemExit beyond `LIMIT`."""
    found = []
    for name, config in (("plain", None), ("draft model", {**CONFIG, "num_speculative_tokens": 3})):
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            figures = pool.map(worker, [config] * processes)
        real, simulated = (sum(one[key] for one in figures) for key in ("real", "simulated"))
        found.append({"mode": name, "processes": processes, "real": real, "simulated": simulated})
        if abs(simulated / real - 1) > LIMIT:
            raise SystemExit(f"more than {LIMIT:.0%} apart: {found[-1]}")
    return found
