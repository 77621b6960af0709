"""Interface of a model, as the engine and the drafters use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.backends.base import Backend, Chains
from outrider.backends.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.checkpoints.spec import Facts
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained
from outrider.errors import EngineError
from outrider.models.placement import Precision

Taps = dict[int, Tensor] | None  # layer -> receives the residual stream [N, hidden] before it


class Model(Protocol):
    """Weights of one model.  There is no state between calls: K/V is in the pool that a call gets."""

    backend: Backend
    dtype: torch.dtype
    device: torch.device
    max_len: int
    precision: Precision
    embedding: Any  # packed for `backend`; None if only `embed` can compute it

    @property
    def spec(self) -> Facts: ...
    @property
    def exact(self) -> bool:
        """Whether a row's result does not depend on the other rows, bit for bit."""

    @property
    def footprint(self) -> Counter[torch.device]:
        """Bytes of K/V per token, by device."""

    def pool(self, slots: int) -> Pool: ...
    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Any:
        """Blocks for `forward` and `draft_chain` without the attention, or the MLP, of some layers.

        A skipped sublayer is the identity, and a skipped attention has no K/V.
        Raises ConfigError if a sublayer cannot be skipped.
        """

    def layer_range(self, first: int, last: int) -> Any:
        """Blocks of the layers first, …, last - 1 only."""

    def forward(
        self,
        step_input: StepInput,
        pool: Pool,
        blocks: Any = None,
        x: Tensor | None = None,
        taps: Taps = None,
    ) -> Tensor:
        """Hidden states [N, hidden] of the rows of a step, as `logits` takes them.  Writes K/V to the pool.

        blocks: blocks to run, by default all
        x:      input of the first block, by default the embeddings; it may be overwritten
        taps:   the number of layers receives the stream after the last
        """

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows [n, hidden] of the embedding, without scaling."""

    def final(self, x: Tensor) -> Tensor:
        """`forward`'s result [n, hidden] after the last norm: the input of the head."""

    def head_logits(self, x: Tensor) -> Tensor:
        """Logits float32 [n, V] of states [n, hidden] after the last norm."""

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """Logits float32 [len(rows), V] of some rows, ascending, of `forward`'s result."""

    def forward_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Tensor:
        """The forward of an engine step: logits float32 [M, V] of the step's `logits_rows`.

        The logits are valid until the next call: a backend may reuse their memory.
        states:  its keys are layers as in `taps` of `forward`, and FINAL; receives their states [N, hidden]
        queries: trees from the backend's `verifier`, answered from the logits
        """

    @property
    def failure(self) -> EngineError | None:
        """Why no forward is possible any more; None while it is."""

    @property
    def fuses_chains(self) -> bool:
        """Whether `draft_chain` is supported."""

    def draft_chain(self, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None) -> Chained:
        """Run `forward` over the step, then extend chains of the best tokens after some rows, in one call."""
