"""Methods on a GPU that is made up: the real engine and host work, kernels that compute nothing.

    python benchmarks/made_up_gpu.py [--acceptance 0.8] [--requests 32] [--rounds 4] [--steps]

The clock counts the processor's time of this process, and what kernels would take: those of an H200 for 8 B
weights (`TARGET`), a draft model and a head of EAGLE-3.  So it shows on any machine, also a busy one, what
the host and the controller make of a device: requests that begin together, prompts included, in milliseconds
by method and round, methods in turns.  Draft tokens are accepted at random.  --steps adds what the steps of
the last round took (scripts/gpu_steps.py).
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from command_line import parser_of, settings, write

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("plain", "draft_model", "eagle3", "auto")
DEPTH = 4  # of the fixed methods
# Milliseconds.  Of a step of the target by its rows, on a line in between.
TARGET = ((1, 4.5), (8, 4.6), (16, 4.7), (32, 5.1), (64, 6.0), (128, 8.0), (256, 12.0), (512, 17.0))
DRAFT_LEVEL, EAGLE_LEVEL, EAGLE_STATES = 0.12, 0.25, 0.25
EAGER, LAUNCHED = 8.0, 12.0  # what launches of layers, and of a job without a graph, take of the host
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


class Clock:
    """Seconds: of the processor, and those that it would have waited.

    busy: the device computes until then.
    """

    def __init__(self) -> None:
        self.waited = self.busy = 0.0

    def now(self) -> float:
        return time.process_time() + self.waited

    def compute(self, milliseconds: float) -> None:
        self.busy = max(self.busy, self.now()) + milliseconds / 1000

    def wait(self, until: float) -> None:
        self.waited += max(0.0, until - self.now())


def target_ms(rows: int) -> float:
    rows = max(1, min(rows, TARGET[-1][0]))
    for (low, least), (high, most) in pairwise(TARGET):
        if rows <= high:
            return least + (most - least) * (rows - low) / (high - low)
    return TARGET[-1][1]


def install(clock: Clock, acceptance: float) -> None:
    """Let the engines of this process compute on the made-up device."""
    import pytest
    import without_kernels

    from outrider.backends.torch.backend import TorchBackend
    from outrider.backends.triton import fused, jobs
    from outrider.control.cost import ROWS, ForwardCost
    from outrider.core import device
    from outrider.engine import adaptive, stored

    patch = pytest.MonkeyPatch()
    without_kernels.ACCEPTED = acceptance
    without_kernels.install(patch)

    def set_apart(self: Any, *_: Any) -> None:
        self.reached = self.at = clock.busy

    def wait(self: Any) -> None:
        clock.wait(self.reached or 0.0)
        self.reached = None

    def begin(self: Any, tensor: Any) -> None:
        self.numbers, self.at = tensor, clock.busy

    def read(self: Any) -> Any:
        clock.wait(self.at)
        return self.numbers.tolist()

    for kind, name, method in (
        (device.DeviceEvent, "__init__", set_apart),
        (device.DeviceEvent, "wait", wait),
        (device.HostCopy, "__init__", begin),
        (device.HostCopy, "tolist", read),
        (stored.StoredJson, "read", lambda self: None),
        (stored.StoredJson, "write", lambda self, value: None),
    ):
        patch.setattr(kind, name, method)

    def layers(backend: Any, stack: Any, x: Any, *rest: Any) -> Any:
        clock.waited += EAGER / 1000
        clock.compute(0.5)
        return x

    patch.setattr(TorchBackend, "run_layers", layers)
    costs = {rows: target_ms(rows) / 1000 for rows in ROWS if rows <= 32}
    patch.setattr(adaptive, "forward_cost", lambda *about: ForwardCost(costs))
    for job in (fused._Step, fused._Chain, jobs.Layers, jobs.Method):
        patch.setattr(job, "compute", computed(clock, job.compute))
        patch.setattr(job, "launch", launched(clock, job.launch))


def computed(clock: Clock, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The computation of a job, which takes its time on the device.  The host reads drafts at once."""

    def timed(job: Any, inputs: Any) -> Any:
        found, kind = compute(job, inputs), type(job).__name__
        if kind == "_Step":
            clock.compute(target_ms(job.padded.step.rows))
        elif kind == "_Chain":
            clock.compute(DRAFT_LEVEL * job.padded.levels)
            clock.wait(clock.busy)
        elif kind == "Method" and job.method.__name__ != "catch_up":
            clock.compute(EAGLE_LEVEL * job.call.fixed[1].levels)
            clock.wait(clock.busy)
        else:
            clock.compute(EAGLE_STATES)
        return found

    return timed


def launched(clock: Clock, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def timed(job: Any) -> Any:
        clock.waited += LAUNCHED / 1000
        return launch(job)

    return timed


class Engines(NamedTuple):
    """Makes engines: one target, and small models."""

    base: Any
    draft: str

    def made(self, name: str) -> Any:
        """An `LLM` of a method, after its warm-up, which computes ahead as on a device."""
        from outrider.config import SpeculativeOptions
        from outrider.draft.auto import Auto

        llm = self.base.variant(None)
        config: dict[str, Any] = {"method": name, "num_speculative_tokens": DEPTH}
        if name == "draft_model":
            config["model"] = self.draft
        if name == "auto":
            config = {"method": name, "drafters": [{"method": "ngram"}]}  # others take its place
        if name != "plain":
            speculation = SpeculativeOptions.of(config)
            target = llm.engine.target_for(speculation)
            makers = {"draft_model": self.draft_model, "eagle3": self.eagle3}
            both = list(makers.values())
            drafter = Auto(Auto.Options(), target, both) if name == "auto" else makers[name](target)
            llm.engine.use(drafter, speculation)
        llm.engine.ahead, llm.engine.times_device = True, bool(llm.engine.adaptive)
        for controller in llm.engine.adaptive:
            controller.settles = True
        llm.warm_up()
        return llm

    def draft_model(self, target: Any) -> Any:
        from outrider.draft.union import parse

        method, options, _ = parse({"model": self.draft})
        drafter = method.create(options, target)
        drafter.heeds_floors = False  # as on a device
        return drafter

    def eagle3(self, target: Any) -> Any:
        from outrider.draft.eagle3 import Eagle3, Network
        from outrider.heads.base import random_head

        return Eagle3(Eagle3.Options(tree="chain"), target, random_head(Network.like, target))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a draft token behind accepted ones")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["plain", "eagle3", "auto"])
    parser.add_argument("--steps", action="store_true")
    given, clock = parser.parse_args(), Clock()
    time.perf_counter = clock.now  # before the engine is imported
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "scripts")]
    import torch

    torch.set_num_threads(1)
    install(clock, given.acceptance)
    figures = measured(given, clock)
    write(given.json, {"settings": settings(given), "milliseconds": figures})


def measured(given: Any, clock: Clock) -> dict[str, list[float]]:
    """Milliseconds of every method by round."""
    from gpu_steps import Steps

    from outrider import LLM, SamplingParams
    from outrider.testing import tiny_checkpoint

    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, 40) for _ in range(draw.randint(30, 60))]}
        for _ in range(given.requests)
    ]
    params = [
        SamplingParams(max_tokens=draw.choice((96, 96, draw.randint(8, 96))), ignore_eos=True, temperature=0)
        for _ in range(given.requests)
    ]
    with tempfile.TemporaryDirectory() as folder:
        models = [tiny_checkpoint(Path(folder) / name, **SIZES) for name in ("target", "draft")]
        base = LLM(models[0], speculative_config=None, device="cpu", max_num_seqs=given.requests)
        engines = {name: Engines(base, models[1]).made(name) for name in given.methods}
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(given.rounds):
            for name, llm in engines.items():
                llm.engine.forget_prefixes()
                with Steps(llm) as steps:
                    began = clock.now()
                    llm.generate(prompts, params)
                taken[name].append(round(1000 * (clock.now() - began), 1))
                if given.steps and number == given.rounds - 1:
                    for kind, found in steps.table().items():
                        print(name, kind, {key: found[key] for key in ("n", "ms", "rows", "nodes", "parts")})
            print(f"round {number + 1}:", {name: times[-1] for name, times in taken.items()}, flush=True)
    return taken


if __name__ == "__main__":
    main()
