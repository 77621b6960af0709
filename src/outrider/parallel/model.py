"""A model on several ranks, as the engine and the drafters see it: a `Model` whose calls are commands.

Over several stages, a forward of many rows runs in pieces, one after another:

    stage 0   a b c d
    stage 1     a b c d      d sees the K/V of a, b and c: every stage has computed these before
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.backends.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.checkpoints.spec import Spec
from outrider.core.lora import Adapted
from outrider.core.step_input import StepInput
from outrider.errors import RankError
from outrider.models.base import Model, Stream, Taps
from outrider.parallel.group import Group
from outrider.parallel.layout import split
from outrider.parallel.messages import Report
from outrider.parallel.stage import LAST, UNLOAD, AdapterHandle, Stage, Wanted

PIECE_ROWS = 32  # fewest rows of a piece: with fewer, linears take the time to read their weights
PIECES = 4  # most pieces for each stage
Skips = Sequence[int]  # of every layer: 1 its attention, 2 its MLP


class ParallelPool(Pool):
    """K/V cache that every rank has a part of, with the same slots."""

    def __init__(self, call: Callable[..., object], number: int) -> None:
        self.call, self.number = call, number

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.call("move", self.number, sources, targets)


class ParallelModel(Model):
    """`Model` on all ranks of a group.  The layers of rank 0 are in `stage`.

    number: among the models of the group.  reports: of all ranks.
    Every rank of the first stage has a slice of the embedding, which is not packed here.
    """

    spec: Spec
    in_process = False
    adapts = True

    def __init__(
        self, group: Group, stage: Stage, reports: Sequence[Report], max_len: int, number: int = 0
    ) -> None:
        self.group, self.stage, self.reports, self.max_len = group, stage, reports, max_len
        self.number, self._call = number, partial(group.call, number)
        options = stage.options
        self.spec, self.layout, self.precision = options.spec, options.layout, options.precision
        self.dtype, self.stages = options.precision.dtype, options.layout.pipeline
        self.backend, self.device = stage.backend, stage.backend.device
        self._numbers = itertools.count()
        self._everything = (0,) * self.spec.layers
        ended = (group.dropped.append, (number, UNLOAD)) if number else (group.close,)
        self.close = weakref.finalize(self, *ended)

    @property
    def failure(self) -> RankError | None:
        return self.group.failure

    @property
    def exact(self) -> bool:
        return all(report.exact for report in self.reports)

    @property
    def footprint(self) -> Counter[torch.device]:
        """`Model.footprint` on this machine; where a device of another one stores more, on that one.

        All machines are taken to have the memory of this one.
        """
        machines = defaultdict[str, Counter[torch.device]](Counter)
        for report in self.reports:
            machines[report.host][report.device] += report.slot_bytes
        own = machines[self.reports[0].host]
        most = max(size for sizes in machines.values() for size in sizes.values())
        return +own if most == max(own.values()) else Counter({self.device: most})

    def pool(self, slots: int) -> Pool:
        number = next(self._numbers)
        self._call("add_pool", number, slots)
        pool = ParallelPool(self._call, number)
        weakref.finalize(pool, self.group.dropped.append, (self.number, "drop_pool", number))
        return pool

    def pack_adapter(self, layers: Adapted) -> AdapterHandle:
        handle = AdapterHandle(next(self._numbers))
        self._call("add_adapter", handle.number, list(layers)).result()
        weakref.finalize(handle, self.group.dropped.append, (self.number, "drop_adapter", handle.number))
        return handle

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Skips:
        return tuple((i in attention) + 2 * (i in mlp) for i in range(self.spec.layers))

    def forward(
        self, step_input: StepInput, pool: Pool, blocks: Any = None, x: Stream = None, taps: Taps = None
    ) -> Tensor:
        taps = {} if taps is None else taps
        found, _ = self._begin(step_input, pool, Wanted((*taps, LAST)), blocks, x)()
        taps.update((layer, found[layer]) for layer in taps)
        return found[LAST]

    def forward_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Tensor:
        return self.begin_step(step_input, pool, states, queries)()

    def begin_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Callable[[], Tensor]:
        run = self._begin(step_input, pool, Wanted(tuple(states), tuple(step_input.logits_rows)))

        def complete() -> Tensor:
            found, logits = run()
            states.update((which, found[which]) for which in states)
            self.answer(logits, queries)
            return logits

        return complete

    def embed(self, ids: Sequence[int]) -> Tensor:
        x: Tensor = self._call("embed", list(ids)).result()[LAST]
        return x

    def final(self, x: Tensor) -> Tensor:
        return self.backend.rms_norm(x, self.stage.norm, self.spec.eps)

    def head_logits(self, x: Tensor) -> Tensor:
        return self._logits([self._call("head", len(x), x=x).result()])

    def _begin(
        self, step_input: StepInput, pool: Pool, wanted: Wanted, blocks: Skips | None = None, x: Stream = None
    ) -> Callable[[], tuple[dict[Any, Tensor], Tensor]]:
        """Start a forward.  The result waits for the wanted states and logits [M, V] (none: M = 0)."""
        assert isinstance(pool, ParallelPool)
        skips, calls = self._everything if blocks is None else blocks, []
        for rows in self._pieces(step_input.length):
            piece, own = step_input, x
            if len(rows) < step_input.length:
                piece = step_input.only(rows)
                own = None if x is None else x[rows.start : rows.stop]
            logits = tuple(piece.logits_rows) if wanted.logits else ()
            given = 0 if own is None else own.shape[1]
            args = pool.number, piece, skips, wanted._replace(logits=logits), given
            calls.append(self._call("forward", *args, x=own))

        def complete() -> tuple[dict[Any, Tensor], Tensor]:
            found = [call.result() for call in calls]
            return {key: _cat([part[key] for part in found]) for key in wanted.states}, self._logits(found)

        return complete

    def _pieces(self, num_rows: int) -> list[range]:
        stages = self.layout.pipeline
        count = 1 if stages == 1 else min(PIECES * stages, num_rows // PIECE_ROWS)
        return split(num_rows, max(1, count))

    def _logits(self, found: Sequence[Mapping[Any, Tensor]]) -> Tensor:
        """Logits [M, V] of pieces, each from the slices of all ranks of the last stage."""
        tensor = range(self.layout.tensor)
        joined = [_cat([part["logits", i] for i in tensor], dim=1) for part in found if ("logits", 0) in part]
        return _cat(joined) if joined else torch.empty(0, self.spec.vocabulary, device=self.device)


def _cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
