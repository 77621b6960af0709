"""Fitting a control module: collect draft tokens that the target judged, and fit a correction of the bins.

All drafts are made and judged in full, so that what a controller would leave out is seen too.  Bins learn
beside it as they do while serving, and each node keeps the probability that they gave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.measure import Prompts, once
from outrider.control.acceptance import Calibration
from outrider.control.auto import AutoController
from outrider.control.fixed import FixedController
from outrider.control.module import (
    MOST_CORRECTION,
    NODE_INPUTS,
    ONLY_BINS,
    REQUEST_INPUTS,
    Corrected,
    Judged,
    Module,
    Network,
    method_name,
    node_inputs,
    sources,
)
from outrider.control.outcomes import judged
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.core.row import Row
from outrider.core.step import Commit
from outrider.draft import detect
from outrider.errors import ConfigError
from outrider.llm import LLM

HIDDEN, STEPS, RATE, DECAY = 16, 400, 0.01, 1e-3
COLD = 200  # judged nodes of a configuration before its bins are known
LEAST = 1000  # nodes that a network of some 200 weights needs
HOLD_OUT = 4  # one prompt in this many is held out


class Answered(NamedTuple):
    """Judged nodes of an answer.  names: of the drafters.  prompt: its number.  held_out: not fitted to."""

    names: Sequence[str]
    nodes: Sequence[Judged]
    prompt: int
    held_out: bool


@dataclass(frozen=True)
class Fitted:
    """nodes, held_out: numbers of judged nodes.  bins, loss: mean log losses of the held-out ones, in nats.

    spread: standard error of their difference, over held-out prompts: answers to one are alike.
    """

    network: Network
    nodes: int
    held_out: int
    bins: float
    loss: float
    spread: float

    @property
    def better(self) -> bool:
        """Whether the network predicts better, by two standard errors."""
        return self.bins - self.loss > 2 * self.spread


def configs(drafts: Sequence[str]) -> list[Mapping[str, Any]]:
    """The drafters that are recorded: look-up, each draft or head alone, and with look-up."""
    found: list[Mapping[str, Any]] = [{"method": "suffix"}, {"method": "ngram"}]
    for name in drafts:
        own = {"method": detect(name), "model": name}
        found += [own, {"method": "auto", "drafters": [{"method": "suffix"}, own]}]
    return [{**config, "adaptive": True, "control_module": ONLY_BINS} for config in found]


class Recorder(FixedController):
    """Controller that drafts as much as it may and has every judged node learned by a `Module`'s bins."""

    def __init__(self, limits: FixedController, names: Sequence[str]) -> None:
        super().__init__(limits.options, limits.depth, limits.size, limits.vocabulary)
        self.module, self.shared = Module(untrained(names), names, trusted=False), Calibration()
        self.rows: dict[Row, Corrected] = {}

    def learn(self, commit: Commit, times: Times) -> None:
        for step in commit.batch:
            ended = step.row.finish_reason is not None
            if step.row not in self.rows:
                self.rows[step.row] = Corrected(self.shared, self.module, step.row)
            own, found = self.rows[step.row], [*judged(step, ended)]
            for key, _ in found:
                own.probability(key)  # before any of them is learned
            for key, accepted in found:
                own.learn(key, accepted)
                self.shared.learn(key, accepted)
            own.refresh()
            if ended:
                del self.rows[step.row]
        self.shared.refresh()


def untrained(names: Sequence[str]) -> Network:
    """A network that corrects nothing."""
    methods = [method_name(names, source) for source in sources(len(names))]
    node, request = np.zeros((NODE_INPUTS, 1)), np.zeros((REQUEST_INPUTS + len(methods), 1))
    return network_of([node, request, np.zeros(1), np.zeros(1)], methods, {})


def network_of(weights: Sequence[Any], methods: Sequence[str], about: Mapping[str, str]) -> Network:
    """weights: of nodes, requests, bias and output, in the order of `fitted`.  about: the metadata."""
    node, request, bias, output = (weight.astype(np.float32) for weight in weights)
    return Network(node, request, bias, output, methods, about)


def record(
    llm: LLM,
    config: Mapping[str, Any],
    prompts: Prompts,
    params: Sequence[SamplingParams],
    tick: Callable[[str], None],
) -> list[Answered]:
    """Answer every prompt with each of `params`.  Those that are held out come last, when bins are warm.

    A drafter keeps what it learned from earlier prompts, but not from another answer to the same one.
    """
    variant = llm.variant(config)
    before = variant.engine.controller
    assert isinstance(before, AutoController)
    names = [arm.name for arm in before.arms]
    recorder = variant.engine.controller = Recorder(before.limits, names)
    answered: list[Answered] = []
    for held_out in (False, True):
        for i, (kind, prompt) in enumerate(prompts):
            if (i % HOLD_OUT == HOLD_OUT - 1) != held_out:
                continue
            memory = variant.engine.drafter.memory
            for each in params:
                recorder.module.pairs = []
                once(variant, kind, [prompt], each, memory)
                answered.append(Answered(names, recorder.module.pairs, i, held_out))
                tick(kind)
    return [*warm(answered)]


def warm(answers: Sequence[Answered]) -> Iterator[Answered]:
    """The answers of one configuration without the first nodes."""
    seen = 0
    for answer in answers:
        seen += len(answer.nodes)
        if seen > COLD:
            yield answer


class Nodes(NamedTuple):
    """Inputs [n, NODE_INPUTS] and [n, REQUEST_INPUTS + methods], log-odds by the bins [n], acceptance [n]."""

    node: Tensor
    request: Tensor
    log_odds: Tensor
    accepted: Tensor


def tensors(answers: Sequence[Answered], methods: Sequence[str]) -> Nodes:
    """The judged nodes of all answers.  methods: those that a request's input may name."""
    places, inputs, odds, accepted = list[int](), list[list[float]](), list[float](), list[float]()
    for answer in answers:
        names = [method_name(answer.names, source) for source in sources(len(answer.names))]
        for node in answer.nodes:
            places.append(node.place)
            method = methods.index(names[node.request.method])
            inputs.append(node.request._replace(method=method).inputs(len(methods)))
            odds.append(math.log(node.probability / (1 - node.probability)))
            accepted.append(float(node.accepted))
    return Nodes(
        torch.from_numpy(node_inputs())[places],
        torch.tensor(inputs).view(-1, REQUEST_INPUTS + len(methods)),
        torch.tensor(odds),
        torch.tensor(accepted),
    )


def fit(answers: Sequence[Answered], about: Mapping[str, str], seed: int = 0) -> Fitted:
    """Fit a network to answers not held out.  Raises ConfigError for too few nodes, or none held out."""
    answers = [answer for answer in answers if answer.nodes]
    methods = sorted({method_name(a.names, n.request.method + 1) for a in answers for n in a.nodes})
    data = tensors([answer for answer in answers if not answer.held_out], methods)
    held_out = [answer for answer in answers if answer.held_out]
    if len(data.accepted) < LEAST or not held_out:
        raise ConfigError(
            f"{len(data.accepted)} draft tokens were judged, and a control module needs {LEAST} and further "
            f"prompts to test it, one in {HOLD_OUT}: give more --prompts, or raise -n."
        )
    weights, num_nodes = fitted(data, methods, seed), len(data.accepted)
    found = tested(weights, held_out, methods)
    figures = {"nodes": str(num_nodes), "held_out": str(found.nodes)}
    figures |= {"log_loss": f"{found.loss:.4f}", "log_loss_of_bins": f"{found.bins:.4f}"}
    network = network_of(weights, methods, {**about, **figures})
    return Fitted(network, num_nodes, found.nodes, found.bins, found.loss, found.spread)


class Tested(NamedTuple):
    """Number of judged nodes, and the rest as in `Fitted`."""

    nodes: int
    bins: float
    loss: float
    spread: float


def tested(weights: Sequence[Any], answers: Sequence[Answered], methods: Sequence[str]) -> Tested:
    """Test weights on held-out answers."""
    nodes, bins_loss, network_loss = 0, 0.0, 0.0
    gains = dict[int, float]()  # less loss than by the bins, by prompt
    for answer in answers:
        of_bins, of_network = losses(weights, tensors([answer], methods))
        nodes += len(of_bins)
        bins_loss += float(of_bins.sum())
        network_loss += float(of_network.sum())
        gains[answer.prompt] = gains.get(answer.prompt, 0.0) + float((of_bins - of_network).sum())
    spread = math.inf
    if len(gains) > 1:
        spread = float(torch.tensor([*gains.values()]).std()) * len(gains) ** 0.5 / nodes
    return Tested(nodes, bins_loss / nodes, network_loss / nodes, spread)


def fitted(data: Nodes, methods: Sequence[str], seed: int) -> list[Any]:
    """Weights as arrays, by full-batch Adam on the cross entropy; the first output is 0 everywhere."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(NODE_INPUTS, HIDDEN), (REQUEST_INPUTS + len(methods), HIDDEN), (HIDDEN,)]
    weights = [0.5 * torch.randn(shape, generator=generator) for shape in shapes] + [torch.zeros(HIDDEN)]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=RATE, weight_decay=DECAY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = data.log_odds + corrections(weights, data)
        loss = F.binary_cross_entropy_with_logits(logits, data.accepted)
        torch.autograd.backward(loss)
        optimizer.step()
    return [weight.detach().numpy() for weight in weights]


def corrections(weights: Sequence[Tensor], data: Nodes) -> Tensor:
    """float32 [n]: what the network adds to the log-odds of each node."""
    node, request, bias, output = weights
    return (data.node @ node + data.request @ request + bias).relu() @ output


def losses(network: Sequence[Any], data: Nodes) -> tuple[Tensor, Tensor]:
    """Cross entropies of bins and of the corrected probability, by node."""
    weights = [torch.from_numpy(part) for part in network]
    corrected = data.log_odds + corrections(weights, data).clamp(-MOST_CORRECTION, MOST_CORRECTION)
    cross = partial(F.binary_cross_entropy_with_logits, target=data.accepted, reduction="none")
    return cross(data.log_odds), cross(corrected)
