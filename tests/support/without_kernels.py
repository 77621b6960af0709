"""Engines on the Triton backend that compute nothing: which jobs find a graph, in seconds and for many rows.

Jobs are padded, looked up, recorded and launched as on a device.  Their results are made up: drafts of random
tokens, of which targets accept `ACCEPTED`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

ACCEPTED = 0.6  # of the children of accepted nodes


class NoKernels:
    """The job that is being computed, and what is made up for it.

    launched: kinds and sizes of jobs without a graph, those that are too long for one included
    """

    def __init__(self) -> None:
        self.job: Any = None
        self.rng = random.Random(0)
        self.launched = list[tuple[Any, ...]]()

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return run

    def reserved(self) -> int:
        return 0

    def load(self, job: Any, inputs: Any) -> None:
        self.job = job

    def inputs(self, job: Any) -> Any:
        self.job = job
        return torch.zeros(1)

    def step(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        job, wanted, rows = self.job, recorded.wanted, recorded.padded.step.rows
        found = [torch.zeros(wanted, job.model.ends.head.outputs)]
        if job.states:
            found.append(torch.zeros(rows, len(job.states) * job.model.stack.layers[0].heads * 16))
        if job.queries is not None:
            found.append(self._answers(job.queries, wanted))
        return tuple(found)

    def _answers(self, queries: Any, wanted: int) -> Tensor:
        answers = array("i")
        for first, n in zip(queries.trees[1::3], queries.trees[2::3]):
            nodes = queries.nodes[2 * first : 2 * (first + n)]
            tokens, parents = nodes[::2], nodes[1::2]
            path, at = list[int](), -1
            while (children := [i for i in range(n) if parents[i] == at]) and self.rng.random() < ACCEPTED:
                at = self.rng.choice(children)
                path.append(at)
            emitted = [*(tokens[node] for node in path), self.rng.randrange(3, 40)]
            answers.extend(path + [0] * (n - len(path)))
            answers.extend(emitted + [0] * (n + 1 - len(emitted)))
            answers.append(len(emitted))
        answers.extend([0] * (2 * wanted - len(answers)))
        return torch.frombuffer(answers, dtype=torch.int32)

    def chain(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        _, levels, count = recorded.padded
        features = 0 if recorded.chains.stop_rule is None else 6
        return (self._tokens(levels, count, 1 + features),)

    def layers(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        return (torch.zeros(recorded.sizes.rows, self.job.call.x.shape[1]),)

    def method(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        return (self.result(self.job.method, self.job.call),)

    def result(self, method: Any, call: Any) -> Tensor:
        """Of a method of heads with chains."""
        if method.__name__ == "catch_up":
            return torch.zeros(len(call.rows), 1)
        return self._tokens(call.fixed[1].levels, 512, 2)

    def _tokens(self, *shape: int) -> Tensor:
        """Draft tokens, and what is measured of them."""
        return torch.full(shape, 0.5, dtype=torch.float64).index_fill_(2, torch.tensor(0), self.rng.randrange(3, 40))


def install(patch: pytest.MonkeyPatch) -> NoKernels:
    """Let engines that are made from now on compute nothing."""
    from outrider.backends.torch.backend import TorchBackend
    from outrider.backends.triton import backend, fused, graphs, jobs

    made = NoKernels()
    patch.setenv("OUTRIDER_KERNELS", "triton")
    patch.setattr("outrider.engine.engine.bit_exact", lambda decoder: True)
    patch.setattr(graphs, "graphs_for", lambda device: graphs.Graphs(made))
    for job, compute in (
        (fused._Step, made.step), (fused._Chain, made.chain), (jobs.Layers, made.layers),
        (jobs.Method, made.method),
    ):  # fmt: skip
        patch.setattr(job, "compute", lambda job, inputs, compute=compute: compute(job, inputs))
        patch.setattr(job, "inputs", lambda job: made.inputs(job))
        patch.setattr(job, "load", lambda job, inputs: made.load(job, inputs))

    def launched(job: Any) -> Any:
        kind = [part for part in job.rest if isinstance(part, (str, int, tuple))]
        made.launched.append((type(job).__name__, *kind, job.sizes))
        made.job = job
        return job.compute(None)

    for job in (fused._Step, fused._Chain, jobs.Layers, jobs.Method):
        patch.setattr(job, "launch", launched)

    def method(self: Any, method: Any, call: Any) -> Tensor:
        made.launched.append((method.__name__, call.shape.steps[0].length))
        return made.result(method, call)

    def run_layers(self: Any, stack: Any, x: Tensor, *rest: Any) -> Tensor:
        made.launched.append(("layers", len(x)))
        return x

    patch.setattr(TorchBackend, "launch", method)
    patch.setattr(TorchBackend, "run_layers", run_layers)
    patch.setattr(backend.TritonBackend, "rms_norm", lambda self, x, weight, eps: x)
    return made


def sizes_seen(launched: Sequence[tuple[Any, ...]]) -> Any:
    from collections import Counter

    return Counter(launched)
