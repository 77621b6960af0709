"""A step of a whole model, and a chain of draft tokens, as one job each: one transfer, one graph, one read.

Everything that the host knows of a step goes to the device in one array of numbers: ids, plan, the rows with
logits and the trees to verify.  What follows is launches alone, so a graph can hold all of them
(`graphs.py`).  Positions and slots of a chain are known before its tokens are, so the graph of a chain has
all its levels.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.backends.base import Backend, Chains, LayerKV
from outrider.backends.layer import places
from outrider.backends.torch.backend import Stack
from outrider.backends.triton import chain_numbers
from outrider.backends.triton.besides import NO_MORE, Besides
from outrider.backends.triton.chain_numbers import ChainInput, ChainNumbers, levels_of
from outrider.backends.triton.distributions import sample
from outrider.backends.triton.features import features_of
from outrider.backends.triton.graphs import LAUNCHED, LAUNCHED_DRAFT, Graphs, Results
from outrider.backends.triton.jobs import cost_of, frame, kind_of, padded, padded_rows
from outrider.backends.triton.linear import TritonWeight
from outrider.backends.triton.picking import next_tokens
from outrider.backends.triton.plan import Plan, Sizes, aligned, install, load_step, total
from outrider.backends.triton.rules import RuleQueries
from outrider.backends.triton.sizes import ChainSizes, StepSizes, first_rows, padded_wanted
from outrider.backends.triton.verifier import TreeQueries
from outrider.core.lora import Runs
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained

# Rows with logits that add as much as the first row of a step takes: by operations and bytes of 8 B weights,
# not measured.
WANTED_AS_LONG = 2000


@dataclass
class Ends:
    """scale: factor of embeddings.  cap: soft cap of logits, or 0."""

    embedding: TritonWeight
    norm: Tensor
    head: TritonWeight
    scale: float
    cap: float


class Launching(Backend, Protocol):
    """graphs: None where every kernel is launched from Python."""

    graphs: Graphs | None

    def launch_layers(self, stack: Stack, x: Tensor, kv: LayerKV, runs: Runs = ()) -> Tensor:
        """`run_layers` without a graph of its own."""


class TritonFusedModel:
    """`FusedModel`."""

    has_recurrent = False  # a recording holds no states

    def __init__(self, backend: Launching) -> None:
        self.backend = backend

    def pack_ends(
        self, embedding: TritonWeight, norm: Tensor, head: TritonWeight, scale: float = 1.0, cap: float = 0.0
    ) -> Ends:
        return Ends(embedding, norm, head, scale, cap)

    def forward(
        self, stack: Stack, ends: Ends, kv: LayerKV, states: dict[int, Tensor], queries: Any, runs: Runs = ()
    ) -> Tensor:
        model, graphs = _Model(self.backend, stack, ends, kv), self.backend.graphs
        sizes = None if graphs is None or runs else _step_sizes(model, queries)
        job = _Step(model, tuple(sorted(states)), queries, runs, sizes)
        logits, *found = _results(job, graphs)
        if queries is not None:
            answers = [found.pop() for _ in range(1 + (queries.more.values > 0))]
            queries.answered(*reversed(answers))
        if found:  # one copy, however many there are
            n = kv.step_input.length
            wide = found[0] if len(found[0]) == n else found[0][:n]
            wide = wide.clone() if job.graphed else wide
            states.update(zip(job.states, wide.chunk(len(job.states), dim=1)))
        logits = logits[: len(kv.step_input.logits_rows)]
        return logits.clone() if job.graphed else logits  # any graph's next replay may use this memory

    def extends(self, chains: Chains) -> bool:
        """Not chains that are read after every token, or samples whose distributions are for the host."""
        device, rule = self.backend.device, chains.stop_rule
        if any(chain.probs is not None and chain.probs.device != device for chain in chains.chains):
            return False
        if rule is None:
            return True
        return not rule.judges and not any(chain.floor or chain.joint_floor for chain in chains.chains)

    def draft_chain(self, stack: Stack, ends: Ends, kv: LayerKV, chains: Chains) -> Chained:
        model, graphs = _Model(self.backend, stack, ends, kv), self.backend.graphs
        if graphs is None or kv.step_input.adapters:
            sizes = None
        else:
            model, chains = _caught_up(model, chains)
            sizes = _chain_sizes(model, chains)
        job = _Chain(model, chains, sizes)
        found, *states = _results(job, graphs)
        levels = levels_of(chains)
        if chains.states is not None:
            chains.states[:, :levels].copy_(states[0][:levels, : len(chains.chains)].transpose(0, 1))
        return chain_numbers.read(found[:levels].tolist(), chains)


def _results(job: _Step | _Chain, graphs: Graphs | None) -> Results:
    return job.launch() if graphs is None or not job.graphed else graphs.run(job)


class _Model:
    """The parts of a model that a job computes with, and the step and the pool that it is for."""

    def __init__(self, backend: Launching, stack: Stack, ends: Ends, kv: LayerKV) -> None:
        self.backend, self.stack, self.ends, self.kv = backend, stack, ends, kv
        self.layers = stack.layers

    def at(self, step: StepInput) -> _Model:
        """The same for another step."""
        return _Model(self.backend, self.stack, self.ends, self.kv._replace(step_input=step))

    def embed(self, ids: Tensor) -> Tensor:
        embedded = self.ends.embedding.embed(ids, self.backend.activations)
        return embedded if self.ends.scale == 1.0 else embedded * self.ends.scale

    def run(self, x: Tensor, step: StepInput, runs: Runs = (), layers: slice = slice(None)) -> Tensor:
        """Some of the blocks.  The kernels of a block are launched one by one."""
        own_layers, skips = self.layers[layers], self.stack.skips[layers]
        part = Stack(own_layers, self.stack.rotations, skips, places(own_layers))
        kv = LayerKV(step, self.kv.pool, self.kv.layer + (layers.start or 0))
        own = [(first, count, adapter[layers]) for first, count, adapter in runs]  # updates of each layer
        return self.backend.launch_layers(part, x, kv, own)

    def final(self, x: Tensor) -> Tensor:
        return self.backend.rms_norm(x, self.ends.norm, self.layers[0].eps)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.backend.linear(x, self.ends.head).float()
        return self.backend.soft_cap(logits, self.ends.cap) if self.ends.cap else logits


def _step_sizes(model: _Model, queries: TreeQueries | RuleQueries | None) -> StepSizes | None:
    """The padded sizes of a step; None if it is too long for a graph."""
    step = model.kv.step_input
    sizes = padded(Sizes.of(step), model.layers[0])
    if sizes is None:
        return None
    more = NO_MORE if queries is None else queries.more
    return StepSizes(sizes, padded_wanted(len(step.logits_rows), sizes.rows), more)


def _caught_up(model: _Model, chains: Chains) -> tuple[_Model, Chains]:
    """What is left after the rows that the graph of these chains has no room for: few graphs serve all."""
    step, ends, levels = model.kv.step_input, [chain.at for chain in chains.chains], levels_of(chains)
    room = first_rows(len(ends), levels)
    if step.length <= room:
        return model, chains
    early, late, places = step.split(ends, max(1, min(1 + levels, room // len(ends))))
    backend, first = model.backend, step.only(early)
    x = model.embed(first.on(backend.device).input_ids)
    backend.run_layers(model.stack, x, model.at(first).kv)
    rest = [chain._replace(at=at) for chain, at in zip(chains.chains, places)]
    return model.at(step.only(late)), chains._replace(chains=rest)


def _chain_sizes(model: _Model, chains: Chains) -> ChainSizes | None:
    """The padded sizes of chains; None if their first forward is too long for a graph."""
    count, levels = len(chains.chains), levels_of(chains)
    exact = Sizes.of(model.kv.step_input, more=levels - 1)
    rows = max(exact.rows, first_rows(count, levels))
    sizes = padded(exact._replace(rows=rows), model.layers[0])
    return None if sizes is None else ChainSizes(sizes, levels, padded_rows(count))


def _with_plan(job: _Step | _Chain, plan: Plan) -> StepInput:
    """The step of a job for the kernels: itself, or padded."""
    if job.graphed:
        return frame(job.padded.step, plan)
    install(job.step, plan.slots.device, plan)
    return job.step


class _Step:
    """`Job` of a step.

    Its inputs are int32 numbers: ids [N], rows with logits [M], as many words of 8 bytes of each of these as
    the trees have, and the plan; and besides them those of `Asked.more_numbers`.  Its results: logits [M, V],
    states [N, states · h] side by side, answers and values, each if asked for.
    """

    launched = LAUNCHED

    def __init__(
        self,
        model: _Model,
        states: tuple[int, ...],
        queries: TreeQueries | RuleQueries | None,
        runs: Runs,
        sizes: StepSizes | None,
    ) -> None:
        self.model, self.step, self.states = model, model.kv.step_input, states
        self.queries, self.runs, self.graphed = queries, runs, sizes is not None
        more = NO_MORE if queries is None else queries.more
        self.padded = sizes or StepSizes(Sizes.of(self.step), len(self.step.logits_rows), more)
        step, self.wanted, self.more = self.padded
        self.sizes = *step, self.wanted, *self.more
        self.cost = cost_of(step.rows) + self.wanted / WANTED_AS_LONG
        self.uses = model.stack, model.kv.pool
        asked = None if queries is None else (queries.rule, more.edits > 0, queries.asked.mode)
        self.rest = model.kv.layer, *kind_of(step), states, asked
        words = 0 if queries is None else 2 * queries.words_each * self.wanted
        self.parts = [aligned(step.rows), aligned(self.wanted), aligned(words), total(step)]

    def at(self, sizes: tuple[int, ...]) -> _Step:
        return _Step(self.model, self.states, self.queries, self.runs, StepSizes.of(sizes))

    def launch(self) -> Results:
        exact = _Step(self.model, self.states, self.queries, self.runs, None) if self.graphed else self
        return exact.compute(exact.inputs())

    def inputs(self) -> tuple[Tensor, Tensor]:
        flat = torch.zeros(sum(self.parts), dtype=torch.int32, device=self.model.backend.device)
        besides = flat[:0]
        if self.more != NO_MORE:
            besides = flat.new_zeros(self.more.length(self.wanted))
        self.load((flat, besides))
        return flat, besides

    def load(self, inputs: tuple[Tensor, Tensor]) -> None:
        (flat, besides), (ids, rows, words, _) = inputs, self.parts
        if self.queries is not None and self.more != NO_MORE:
            more = torch.from_numpy(self.queries.more_numbers(self.wanted, self.more))
            besides[: len(more)].copy_(more, non_blocking=True)
        numbers = array("i", bytes(4 * (ids + rows + words)))
        numbers[: self.step.length] = array("i", self.step.input_ids)
        numbers[ids : ids + len(self.step.logits_rows)] = array("i", self.step.logits_rows)
        if self.queries is not None:
            trees = array("i", self.queries.words(self.wanted, self.model.ends.head.outputs).tobytes())
            numbers[ids + rows : ids + rows + len(trees)] = trees
        load_step(flat, numbers, self.step, self.padded.step)

    def compute(self, inputs: tuple[Tensor, Tensor]) -> Results:
        (flat, more), model = inputs, self.model
        ids, rows, words, numbers = flat.split(self.parts)
        step = _with_plan(self, Plan.of(numbers, self.padded.step))
        x, taps = self._run(model.embed(ids[: self.padded.step.rows]), step)
        wanted = x.index_select(0, rows[: self.wanted])
        logits = model.logits(model.final(wanted))
        kept = [model.final(x) if layer == FINAL else taps[layer] for layer in self.states]
        found = [torch.cat(kept, dim=1)] if len(kept) > 1 else kept
        if self.queries is not None:
            numbers = words[: 2 * self.queries.words_each * self.wanted].view(torch.int64)
            besides = Besides(self.more, more, self.queries.asked.mode)
            found += self.queries.answers_to(logits, numbers, self.graphed, besides)
        return logits, *found

    def _run(self, x: Tensor, step: StepInput) -> tuple[Tensor, dict[int, Tensor]]:
        """The stream after the last layer, and copies of it before the layers of `states`."""
        taps, at = dict[int, Tensor](), 0
        for layer in [layer for layer in self.states if layer != FINAL]:
            x = self.model.run(x, step, self.runs, slice(at, layer))
            taps[layer], at = x.clone(), layer  # x is changed in place
        return self.model.run(x, step, self.runs, slice(at, len(self.model.layers))), taps


class _Chain:
    """`Job` of chains of draft tokens.  Its inputs are the numbers of `ChainNumbers`.

    Its results: tokens and features of each level, float64 [levels, chains, 1 + features], and, if asked for,
    states [levels, chains, h].
    """

    launched = LAUNCHED_DRAFT

    def __init__(self, model: _Model, chains: Chains, sizes: ChainSizes | None) -> None:
        self.model, self.chains, self.step = model, chains, model.kv.step_input
        self.graphed, levels = sizes is not None, levels_of(chains)
        self.padded = sizes or ChainSizes(Sizes.of(self.step, more=levels - 1), levels, len(chains.chains))
        step, levels, count = self.padded
        self.sizes, self.cost = (*step, levels, count), cost_of(step.rows, *[count] * (levels - 1))
        self.uses = model.stack, model.kv.pool
        asked = chains.stop_rule is None, chains.states is None
        self.rest = model.kv.layer, *kind_of(step), chains.vocabulary, chains.width, *asked
        self.numbers = ChainNumbers(*self.padded)

    def at(self, sizes: tuple[int, ...]) -> _Chain:
        *step, levels, count = sizes
        return _Chain(self.model, self.chains, ChainSizes(Sizes(*step), levels, count))

    def launch(self) -> Results:
        exact = _Chain(self.model, self.chains, None) if self.graphed else self
        return exact.compute(exact.inputs())

    def inputs(self) -> Tensor:
        flat = torch.zeros(self.numbers.total, dtype=torch.int32, device=self.model.backend.device)
        self.load(flat)
        return flat

    def load(self, flat: Tensor) -> None:
        numbers = self.numbers.of(self.step, self.chains)
        flat[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.int32), non_blocking=True)

    def compute(self, flat: Tensor) -> Results:
        model, given = self.model, self.numbers.split(flat)
        step = _with_plan(self, given.plan)
        x = model.run(model.embed(given.ids), step).index_select(0, given.after)
        found, states = [self._picked(x, given, 0)], [x]
        for level, plan in enumerate(given.levels, 1):
            tokens = found[-1][:, 0].long().clamp_min(0)
            x = model.run(model.embed(tokens), frame(self.numbers.level_sizes, plan))
            found.append(self._picked(x, given, level))
            states.append(x)
        results = torch.stack(found)
        return (results,) if self.chains.states is None else (results, torch.stack(states))

    def _picked(self, x: Tensor, given: ChainInput, level: int) -> Tensor:
        """Tokens and features of a level, picked from the stream x [C, h]."""
        logits = self.model.logits(self.model.final(x))[:, : self.chains.vocabulary]
        tokens = next_tokens(logits, given.owners[level], given.params)
        if width := self.chains.width:
            sample(logits, given.owners[level], given.params, given.samples[level], tokens, width)
        parts = [tokens[:, None].double()]
        if self.chains.stop_rule is not None:
            parts.append(features_of(logits, given.temperatures, tokens.clamp_min(0)))
        return torch.cat(parts, 1)
