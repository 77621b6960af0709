"""One rank's part of a model: some layers, a slice of each, and their K/V.

All ranks run the same commands in the same order.  Rank 0 gets the results:

    stage 0     embed, layers ──x──▶ stage 1     layers ──x──▶ … last stage   layers, norm, head
    rank 0 ◀── tapped hidden states ─┘ ◀─────────────────────────┘ final states, logits (one slice a rank)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend, LayerKV
from outrider.backends.layer import DecoderLayer
from outrider.backends.select import backend_for
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import bits_of
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.lora import Adapted, Runs
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.models.layers import LayerReader
from outrider.models.placement import Precision
from outrider.parallel.layout import Layout, Share, vocabulary_ranges
from outrider.parallel.links import Answer, Links, add_parts
from outrider.parallel.slices import SlicedSource, slice_update

ATTENTION, MLP = 1, 2  # bits of a sublayer that is skipped
LAST = "x"  # key of the residual stream after the last layer
LOAD, UNLOAD = "load", "unload"  # commands that add and drop a model


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that every rank has.

    device: a kind of device; rotations: see `models.decoder.rotations`
    blocks: names and inputs of layers without a model around them, as `LayerReader.layer` takes them
    """

    spec: Spec
    layout: Layout
    device: str
    precision: Precision
    rotations: Tensor
    blocks: Sequence[tuple[str, int]] = ()


class Wanted(NamedTuple):
    """Results of a forward.

    states: layers whose input, FINAL, or LAST: [N, hidden] each
    logits: rows of the logits
    """

    states: tuple[int | str, ...]
    logits: tuple[int, ...] = ()


class Result(NamedTuple):
    """A tensor that a forward returns.  key: of `Answer.tensors`.  owner: the rank that computes it."""

    key: Any
    owner: int
    shape: tuple[int, int]
    dtype: torch.dtype


class Block(NamedTuple):
    """One layer.  stacks[skip]: packed, without some sublayers (`Backend.skip_sublayers`)."""

    layer: DecoderLayer
    stacks: Sequence[Any]


class AdapterHandle:
    """A LoRA adapter that every rank has packed under this number."""

    def __init__(self, number: int) -> None:
        self.number = number


class Stage:
    """Weights and K/V of one rank, and its side of every command.  Attribute `links` is set before use.

    position: of the stage among all stages; index: of the rank within its stage
    """

    links: Links

    def __init__(self, weights: Source, options: ModelOptions, rank: int, device: torch.device) -> None:
        self.options, self.rank = options, rank
        layout, spec, dtype = options.layout, options.spec, options.precision.dtype
        self.index, self.position = layout.index(rank), layout.stage(rank)
        self.last = self.position == layout.pipeline - 1
        self.share = Share.of(spec, layout.tensor, self.index)
        self.backend: Backend = backend_for(device, dtype, options.precision.activations)
        own = self.share.spec
        source = SlicedSource(weights, spec, self.share)
        reader = LayerReader(source, own, dtype, bits_of(options.precision.quantization))
        self.range = layout.layers(spec.layers)[self.position]
        table = options.rotations.to(device)
        named = options.blocks or [("", 0)] * spec.layers
        self.blocks = [self._block(reader.layer(self.backend, i, *named[i]), own, table) for i in self.range]
        self.pools: dict[int, Pool] = {}
        self.adapters: dict[int, list[Any]] = {}
        if options.blocks:
            return
        self.norm = reader.norm(self.backend)
        self.embedding: Any = None
        if self.position == 0 or (self.last and spec.tied):
            self.embedding = reader.embedding(self.backend)
        self.lm_head = self.embedding if spec.tied or not self.last else reader.lm_head(self.backend)

    @property
    def slot_bytes(self) -> int:
        own, dtype = self.share.spec, self.options.precision.kv_dtype
        return Pool.bytes_per_slot(len(self.range), own.kv_heads, own.head_dim, dtype)

    def _block(self, layer: DecoderLayer, spec: Spec, rotations: Tensor) -> Block:
        stack = self.backend.pack_layers(spec, [layer], rotations)
        return Block(layer, [self.backend.skip_sublayers(stack, [skip]) for skip in range(3)])

    # ---- commands

    def add_pool(self, number: int, slots: int) -> None:
        own, dtype = self.share.spec, self.options.precision.kv_dtype
        device = self.backend.device
        self.pools[number] = Pool(len(self.range), own.kv_heads, own.head_dim, slots, dtype, device)

    def drop_pool(self, number: int) -> None:
        del self.pools[number]

    def move(self, pool: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pools[pool].move(sources, targets)

    def add_adapter(self, number: int, layers: Adapted) -> None:
        spec, share = self.options.spec, self.share
        own = [slice_update(layers[i], spec, share) for i in self.range]
        self.adapters[number] = [self.backend.pack_adapter(share.spec, [layer]) for layer in own]

    def drop_adapter(self, number: int) -> None:
        del self.adapters[number]

    def embed(self, ids: Sequence[int]) -> Answer:
        """Embeddings of tokens, on the ranks of the first stage."""
        return Answer({LAST: self._embed(ids)} if self.position == 0 else {})

    def forward(
        self,
        pool: int,
        step_input: StepInput,
        skips: Sequence[int],
        wanted: Wanted,
        given: int,
        x: Tensor | None = None,
    ) -> Answer:
        """Run the layers over a step.

        skips: of every layer of the model, ATTENTION, MLP or both
        given: width of x, which rank 0 has: the input of the first stage in place of the embeddings, and
               beside it, if x is wider, what the first attention reads in place of norm(x)
        """
        self.links.settle()
        layout, num_rows = self.options.layout, step_input.length
        if self.position > 0:
            x = self._receive((num_rows, self.options.spec.hidden), self.rank - layout.tensor)
        elif given:
            x = self._from_rank_0(x, (num_rows, given), layout.peers(0))
        else:
            x = self._embed(step_input.input_ids)
        x, found = self._layers(x, step_input, self.pools[pool], skips, wanted)
        if self.last:
            self._finish(x, wanted, found)
        else:
            self.links.send(x, self.rank + layout.tensor)
        return self._answer(found, wanted, num_rows)

    def head(self, num_rows: int, x: Tensor | None = None) -> Answer:
        """Logits of states after the last norm, which rank 0 has."""
        self.links.settle()
        layout, found = self.options.layout, dict[Any, Tensor]()
        peers = layout.peers(layout.pipeline - 1)
        if self.last or self.rank == 0:
            x = self._from_rank_0(x, (num_rows, self.options.spec.hidden), peers)
        if self.last:
            assert x is not None
            found["logits", self.index] = self._logits(x)
        return self._answer(found, Wanted((), tuple(range(num_rows))), num_rows)

    # ---- parts of commands

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings [N, hidden] from all slices of the vocabulary.  Exactly one is not zero."""
        own, parts = self.share.vocabulary, self.options.layout.tensor
        local = [token - own.start if token in own else 0 for token in ids]
        x = self.backend.embed(self.embedding, StepInput.of_ids(local))
        if parts == 1:
            return x
        x[[i for i, token in enumerate(ids) if token not in own]] = 0.0
        return add_parts(self.links, torch.zeros_like(x), x)

    def _layers(
        self, x: Tensor, step_input: StepInput, pool: Pool, skips: Sequence[int], wanted: Wanted
    ) -> tuple[Tensor, dict[Any, Tensor]]:
        """The residual stream [N, hidden] after this stage's layers, and the wanted states, by layer.

        x: [N, hidden]; or [N, 2 hidden], with the input of the first attention beside it
        """
        hidden, u, found = self.options.spec.hidden, None, dict[Any, Tensor]()
        if x.shape[1] > hidden:
            x, u = x[:, :hidden].contiguous(), x[:, hidden:].contiguous()
        for at, (i, block) in enumerate(zip(self.range, self.blocks)):
            if i in wanted.states:
                found[i] = x.clone()  # x is changed in place
            if skips[i] == ATTENTION | MLP:
                continue
            runs, kv = self._runs(step_input, at), LayerKV(step_input, pool, at)
            if self.options.layout.tensor == 1:
                x = self.backend.run_layers(block.stacks[skips[i]], x, kv, runs)
                continue
            for sublayer, norm in ((ATTENTION, block.layer.norm_in), (MLP, block.layer.norm_post)):
                if not skips[i] & sublayer:
                    stack = block.stacks[ATTENTION + MLP - sublayer]  # without the other one
                    if u is None:
                        u = x if norm is None else self.backend.rms_norm(x, norm, self.options.spec.eps)
                    part = torch.zeros_like(x)
                    part = self.backend.run_layers(stack, part, kv, runs, u)
                    x, u = add_parts(self.links, x, part), None
        if self.last and (end := self.options.spec.layers) in wanted.states:
            found[end] = x.clone()
        return x, found

    def _finish(self, x: Tensor, wanted: Wanted, found: dict[Any, Tensor]) -> None:
        """Add what follows from the residual stream after the last layer."""
        if LAST in wanted.states:
            found[LAST] = x
        if FINAL in wanted.states:
            found[FINAL] = self._normalized(x)
        if wanted.logits:
            rows = x if len(wanted.logits) == len(x) else x[list(wanted.logits)]
            found["logits", self.index] = self._logits(self._normalized(rows))

    def _normalized(self, x: Tensor) -> Tensor:
        """Residual stream after the last norm."""
        return self.backend.rms_norm(x, self.norm, self.options.spec.eps)

    def _runs(self, step_input: StepInput, at: int) -> Runs:
        """Rows with an adapter, and it as packed for layer `at` of this stage."""
        return [
            (first, count, self.adapters[handle.number][at]) for first, count, handle in step_input.adapters
        ]

    def _logits(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.lm_head).float()

    def _receive(self, shape: Sequence[int], source: int) -> Tensor:
        x = torch.empty(*shape, dtype=self.backend.activations, device=self.backend.device)
        self.links.receive(x, source)
        return x

    def _from_rank_0(self, x: Tensor | None, shape: Sequence[int], to: range) -> Tensor:
        """Hand a tensor that rank 0 has to these ranks."""
        if self.rank:
            return self._receive(shape, 0)
        assert x is not None
        x = x.to(self.backend.device, self.backend.activations)
        for rank in to:
            if rank:
                self.links.send(x, rank)
        return x.clone() if 0 in to and len(to) > 1 else x  # `forward` may change it while it is sent

    def _answer(self, found: Mapping[Any, Tensor], wanted: Wanted, num_rows: int) -> Answer:
        """Send what this rank found to rank 0; there, expect what other ranks send."""
        answer = Answer()
        for result in self._results(wanted, num_rows):
            if result.owner == self.rank == 0:
                answer.tensors[result.key] = found[result.key]
            elif result.owner == self.rank:
                self.links.send(found[result.key], 0)
            elif self.rank == 0:
                x = torch.empty(result.shape, dtype=result.dtype, device=self.backend.device)
                answer.tensors[result.key] = x
                answer.arrivals.append(self.links.expect(x, result.owner))
        return answer

    def _results(self, wanted: Wanted, num_rows: int) -> list[Result]:
        """Every result, in the order in which it is sent."""
        layout, spec = self.options.layout, self.options.spec
        final, results = layout.pipeline - 1, list[Result]()
        for key in wanted.states:
            inner = isinstance(key, int) and key != FINAL
            stage = layout.stage_of(int(key), spec.layers) if inner else final
            shape = num_rows, spec.hidden
            results.append(Result(key, layout.rank(stage), shape, self.backend.activations))
        if wanted.logits:
            for index, tokens in enumerate(vocabulary_ranges(spec, layout.tensor)):
                shape = len(wanted.logits), len(tokens)
                results.append(Result(("logits", index), layout.rank(final, index), shape, torch.float32))
        return results


class Activity(NamedTuple):
    """State of a rank.  commands, transfers: completed ones.  computing: neither idle nor in a transfer."""

    commands: int = 0
    transfers: int = 0
    computing: bool = True


class Stages:
    """This rank's parts of one or several models, by number, which share links."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._stages: dict[int, Stage] = {}
        self._commands, self._thread = 0, 0  # completed; that runs a command, or 0

    @property
    def activity(self) -> Activity:
        thread, progress = self._thread, self.links.progress
        return Activity(self._commands, progress.completed(), thread != 0 and not progress.waits(thread))

    def add(self, number: int, stage: Stage) -> None:
        stage.links = self.links
        self._stages[number] = stage

    def run(self, number: int, name: str, *args: Any) -> Answer:
        """Run a command of a model.  One that is unloaded has nothing left to drop."""
        if name == UNLOAD:
            self._stages.pop(number, None)
        stage = self._stages.get(number)
        self._thread = threading.get_ident()
        answer: Answer | None = None if stage is None else getattr(stage, name)(*args)
        self._thread, self._commands = 0, self._commands + 1
        return answer or Answer()
