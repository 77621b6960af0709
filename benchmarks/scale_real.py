"""Real runs beside the simulation: recorded acceptance, and processes whose figures it has to meet.

A worker process runs two workloads in turns: requests of many lengths through a batch that they enter and
leave.  Every step of the first is timed, by the rows of the forward and by those that draft.  The simulation
gets these costs and the accepted lengths of each request of the second, and has to meet its seconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from simulation import Cost, Replica, Request, closed

from outrider import LLM, RequestOutput, SamplingParams
from outrider.bench.prompts import PROMPTS, TASKS, rendered

CONFIG = {"model": "builtin-draft"}
BATCH, LIMIT = 4, 0.1  # rows of a real batch; largest relative difference
DEPTH, ROUNDS = 3, 5
UNPACED = 1e6  # max_decode_slowdown: the simulation computes prompts at once
PROMPT = "The future of AI is"
SIZES = [20 + 37 * i % 120 for i in range(24)]  # output tokens of the requests


def record(depth: int) -> list[list[int]]:
    """Accepted lengths of drafts of a draft model, for each prompt, greedy and at temperature 0.8."""
    llm = LLM("builtin", speculative_config={**CONFIG, "num_speculative_tokens": depth})
    runs = []
    for temperature in (0.0, 0.8):
        for prompt in (*PROMPTS, *TASKS):
            text = rendered(prompt, llm.get_tokenizer())
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=256)
            runs.append(accepted(llm.generate([text], params)[0], depth, ended=False))
    return [run for run in runs if run]


def accepted(output: RequestOutput, depth: int, ended: bool = True) -> list[int]:
    """Accepted lengths of the steps of a request, after that of its prompt.

    ended: with the last step, which its end may have cut.
    """
    found, length = [], 0
    for source in output.outputs[0].token_sources[1:]:
        if source is None:
            found.append(min(length, depth))
            length = 0
        else:
            length += 1
    return [*found, length] if ended and length else found


class Step(NamedTuple):
    """A step of the engine.

    rows: of the target's forward.  drafting: rows with a draft.  prompt: prompt tokens.
    propose, rest: seconds of drafting, and all others since the step before.
    """

    rows: int
    drafting: int
    prompt: int
    propose: float
    rest: float


class Recorder:
    """Steps of an engine, which it learns of in place of the controller."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Step] = []
        self.last: float | None = None  # when the last step ended; None before the first of a run
        llm.engine.controller.learn = self.learn  # type: ignore[method-assign]

    def learn(self, commit: Any, times: Any) -> None:
        now = time.perf_counter()
        seconds = sum(times) if self.last is None else now - self.last
        self.last, batch = now, commit.batch
        rows = sum(step.known + len(step.tree.tokens) for step in batch)
        drafting = sum(bool(step.tree.tokens) for step in batch)
        prompt = sum(step.known for step in batch if step.start + step.known <= step.row.prompt)
        self.steps.append(Step(rows, drafting, prompt, times.propose, seconds - times.propose))


@dataclass(frozen=True)
class Measured(Cost):
    """Mean seconds of steps: of the forward by its rows, with the host's part; of drafts of DEPTH tokens by
    the number of chains; of the draft's part of a prompt, a token."""

    forwards: Mapping[int, float]
    drafts: Mapping[int, float]
    prompt: float

    @staticmethod
    def of(steps: Sequence[Step]) -> Measured:
        forwards = means((step.rows, step.rest) for step in steps)
        drafts = means((step.drafting, step.propose) for step in steps if not step.prompt)
        mixed = [step for step in steps if step.prompt]
        own = sum(step.propose - interpolated(drafts, step.drafting) for step in mixed)
        return Measured(forwards, drafts, max(0.0, own / sum(step.prompt for step in mixed)))

    def forward(self, rows: int, context: int) -> float:
        return interpolated(self.forwards, rows)

    def draft(self, depth: int, batch: int, prompt: int = 0) -> float:
        return (interpolated(self.drafts, batch) if depth else 0.0) + self.prompt * prompt


def means(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    found = defaultdict[int, list[float]](list)
    for key, value in pairs:
        found[key].append(value)
    return {key: mean(values) for key, values in sorted(found.items())}


def interpolated(known: Mapping[int, float], key: int) -> float:
    return float(np.interp(key, list(known), list(known.values())))


class Round(NamedTuple):
    seconds: float
    outputs: Sequence[RequestOutput]


def run(llm: LLM, recorder: Recorder, beginning: str) -> Round:
    """Answer requests of all SIZES; prompts differ, so that none is cached."""
    llm.engine.forget_prefixes()
    recorder.last = None
    params = [SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for size in SIZES]
    began = time.perf_counter()
    outputs = llm.generate([f"{beginning} {i} and" for i in range(len(SIZES))], params)
    return Round(time.perf_counter() - began, outputs)


def worker(config: Mapping[str, Any] | None) -> dict[str, float]:
    """Measured and simulated tokens a second of a workload, in this process."""
    torch.set_num_threads(1)
    llm = LLM("builtin", speculative_config=config, max_num_seqs=BATCH, max_decode_slowdown=UNPACED)
    recorder, depth = Recorder(llm), 0 if config is None else DEPTH
    run(llm, recorder, PROMPT)  # warm
    recorder.steps.clear()
    steps, rounds = list[Step](), list[Round]()
    for _ in range(ROUNDS):
        run(llm, recorder, "Once upon a time in a village")
        steps += recorder.steps
        rounds.append(run(llm, recorder, PROMPT))
        recorder.steps.clear()
    requests = [
        Request(0.0, len(output.prompt_token_ids), size, accepted(output, depth))
        for output, size in zip(rounds[-1].outputs, SIZES)
    ]
    simulated = closed(Replica(Measured.of(steps), (), depth, BATCH), requests)
    real = median(each.seconds for each in rounds)
    return {"real": sum(SIZES) / real, "simulated": sum(SIZES) / simulated}


def validate(processes: int) -> list[dict[str, Any]]:
    """Compare so many real processes at a time with the simulation.  Raises SystemExit beyond `LIMIT`."""
    found = []
    for name, config in (("plain", None), ("draft model", {**CONFIG, "num_speculative_tokens": DEPTH})):
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            figures = pool.map(worker, [config] * processes)
        real, simulated = (sum(one[key] for one in figures) for key in ("real", "simulated"))
        found.append({"mode": name, "processes": processes, "real": real, "simulated": simulated})
        if abs(simulated / real - 1) > LIMIT:
            raise SystemExit(f"more than {LIMIT:.0%} apart: {found[-1]}")
    return found
