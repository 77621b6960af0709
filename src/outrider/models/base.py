"""Interface of a model, as the engine and the drafters use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.backends.base import Backend, Chain, TreeQueries
from outrider.cache.pool import Pool
from outrider.checkpoints.spec import Facts
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, StopRule


class Model(Protocol):
    """Weights of one model on one device, without state between calls: K/V lives in the pool that a call is given."""

    backend: Backend
    dtype: torch.dtype
    device: torch.device
    max_len: int
    kv_cache_dtype: str
    embedding: Any  # packed for `kernels`; None where only `embed` knows it

    @property
    def spec(self) -> Facts: ...
    @property
    def exact(self) -> bool:
        """Whether its kernels promise that a row's numbers do not depend on the rows beside it."""

    @property
    def footprint(self) -> Counter[torch.device]:
        """Bytes of K/V a token, by device."""

    @property
    def slot_bytes(self) -> int:
        """The same, all together."""

    def pool(self, slots: int) -> Pool: ...
    def without(self, attention: Collection[int], mlp: Collection[int]) -> Any:
        """Its blocks without the attention, or the MLP, of some layers, for `forward` and `chain`: what is skipped is the identity,
        and a skipped attention has no K/V.  Raises ConfigError where it cannot be skipped."""

    def between(self, first: int, last: int) -> Any:
        """The same for layers first … last - 1 only."""

    def forward(
        self,
        step_input: StepInput,
        pool: Pool,
        blocks: Any = None,
        x: Tensor | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """[n, hidden] for the n rows of the plan: what `logits` takes; K/V of these rows is in the pool.

        blocks: those that run, all unless given.  x: where they begin, the embeddings unless given; it may be changed.
        taps: layer -> gets the residual stream [n, hidden] that enters it; the number of layers: what leaves the last one.
        """

    def embed(self, ids: Sequence[int]) -> Tensor:
        """[n, hidden]: the rows of the embedding, as they are."""

    def final(self, x: Tensor) -> Tensor:
        """[n, hidden] of `forward`'s result: after the last norm, what the head reads."""

    def head_logits(self, x: Tensor) -> Tensor:
        """float32 [n, V]: the logits of states [n, hidden] that the head may read."""

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), V] of some rows, in ascending order, of `forward`'s result."""

    def read(
        self,
        step_input: StepInput,
        pool: Pool,
        wanted: list[int],
        kept: dict[int, Tensor],
        trees: TreeQueries,
    ) -> Tensor:
        """What the engine does in every step: `forward`, and float32 [len(wanted), V], the logits behind these rows, which are there until
        the next call.  Answers the questions in `trees`.

        kept: what `taps` are in `forward`, and FINAL, which gets `final` of all rows.
        """

    def chain(
        self, step_input: StepInput, pool: Pool, chains: Sequence[Chain], vocabulary: int, stop_rule: StopRule | None = None,
        blocks: Any = None, states: Tensor | None = None,
    ) -> Chained | None:  # fmt: skip
        """`forward` over the plan, then a chain of the best tokens behind some of its rows; None where it does not pay.

        states [chains, most levels, hidden] gets what `logits` read for each of them.
        """
