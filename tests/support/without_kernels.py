"""Engines on the Triton backend that compute nothing: which jobs find a graph, in seconds and for many rows.

Jobs are padded, looked up, recorded and launched as on a device.  Their results are made up: chains of random
tokens, of which the target accepts a part.
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
TOKENS = range(3, 40)


class NoKernels:
    """Computes nothing.  job: the one whose results are made up."""

    def __init__(self) -> None:
        self.job: Any = None
        self.random = random.Random(0)

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return run

    def reserved(self) -> int:
        return 0

    def load(self, job: Any, _: Any) -> None:
        self.job = job

    def inputs(self, job: Any) -> None:
        self.job = job

    def launch(self, job: Any) -> Any:
        self.job = job
        return job.compute(None)

    def step(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        job, wanted, rows = self.job, recorded.wanted, recorded.padded.step.rows
        layer = job.model.layers[0]
        found = [torch.zeros(wanted, job.model.ends.head.outputs)]
        if job.states:
            found.append(torch.zeros(rows, len(job.states) * layer.heads * layer.head_dim))
        if job.queries is not None:
            answers = self._answers if job.queries.rule == "match" else self._answers_of_rule
            found.append(answers(job.queries, wanted))
        return tuple(found)

    def _answers(self, queries: Any, wanted: int) -> Tensor:
        """As `TreeQueries.read` takes them."""
        answers = array("i")
        for first, n in zip(queries.trees[1::3], queries.trees[2::3]):
            tokens, parents = queries.tokens[first : first + n], queries.parents[first : first + n]
            path = self._path(parents)
            emitted = [*(tokens[node] for node in path), self.random.choice(TOKENS)]
            answers.extend(path + [0] * (n - len(path)))
            answers.extend(emitted + [0] * (n + 1 - len(emitted)))
            answers.append(len(emitted))
        answers.extend([0] * (2 * wanted - len(answers)))
        return torch.frombuffer(answers, dtype=torch.int32)

    def _answers_of_rule(self, queries: Any, wanted: int) -> Tensor:
        """As `RuleQueries.read` takes them."""
        from outrider.backends.triton.distributions import LINKS

        answers, rows = array("i", [0] * (2 * wanted)), queries.owners[::2]
        links = [queries.links[at :: LINKS.value] for at in (0, 1)]  # tokens and parents
        for number, root in enumerate(queries.roots.values()):
            tokens, parents = (column[root + 1 : root + rows.count(number)] for column in links)
            path = self._path(parents)
            answers[2 * root] = len(path) + 1
            for at, node in enumerate(path):
                answers[2 * root + 1 + 2 * at], answers[2 * root + 2 + 2 * at] = tokens[node], node
            answers[2 * root + 1 + 2 * len(path)] = self.random.choice(TOKENS)
        return torch.frombuffer(answers, dtype=torch.int32)

    def _path(self, parents: Sequence[int]) -> list[int]:
        """Nodes from the root down that are accepted."""
        path, at = list[int](), -1
        while (children := [i for i, parent in enumerate(parents) if parent == at]) and (
            self.random.random() < ACCEPTED
        ):
            at = self.random.choice(children)
            path.append(at)
        return path

    def chain(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        _, levels, count = recorded.padded
        return (self._chains(levels, count, 1 if recorded.chains.stop_rule is None else 7),)

    def layers(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        return (torch.zeros(recorded.sizes.rows, self.job.call.x.shape[1]),)

    def method(self, recorded: Any, _: Any) -> tuple[Tensor, ...]:
        return (self.result(self.job.method, self.job.call),)

    def result(self, method: Any, call: Any) -> Tensor:
        """Of a method of a head that drafts chains."""
        if method.__name__ == "catch_up":
            return torch.zeros(len(call.rows), 1)
        return self._chains(call.fixed[1].levels, len(call.rows), 2)

    def _chains(self, *shape: int) -> Tensor:
        """Tokens, and what is measured of them."""
        chains = torch.full(shape, 0.5, dtype=torch.float64)
        chains[..., 0] = self.random.choice(TOKENS)
        return chains


def install(patch: pytest.MonkeyPatch) -> NoKernels:
    """Let engines that are made from now on compute nothing."""
    from outrider.backends.torch.backend import TorchBackend
    from outrider.backends.triton import fused, graphs, jobs
    from outrider.backends.triton.backend import TritonBackend

    made = NoKernels()
    patch.setenv("OUTRIDER_KERNELS", "triton")
    patch.setattr("outrider.engine.engine.bit_exact", lambda decoder: True)
    patch.setattr(graphs, "graphs_for", lambda device: graphs.Graphs(made))
    jobs_and_results: list[tuple[Any, Any]] = [
        (fused._Step, made.step),
        (fused._Chain, made.chain),
        (jobs.Layers, made.layers),
        (jobs.Method, made.method),
    ]
    for job, compute in jobs_and_results:
        patch.setattr(job, "compute", lambda job, inputs, compute=compute: compute(job, inputs))
        patch.setattr(job, "inputs", lambda job: made.inputs(job))
        patch.setattr(job, "load", lambda job, inputs: made.load(job, inputs))
        patch.setattr(job, "launch", lambda job: made.launch(job))
    # of steps that are too long for a graph
    patch.setattr(TorchBackend, "launch", lambda backend, method, call: made.result(method, call))
    patch.setattr(TorchBackend, "run_layers", lambda backend, stack, x, *rest: x)
    patch.setattr(TritonBackend, "rms_norm", lambda backend, x, weight, eps: x)
    return made
