"""Interface of a model, as the engine and the drafters use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.backends.base import Backend, Chains
from outrider.backends.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.checkpoints.spec import Facts
from outrider.core.device import take
from outrider.core.lora import Adapted
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained
from outrider.errors import EngineError, ModelError
from outrider.models.placement import Precision

Taps = dict[int, Tensor] | None  # layer -> receives the residual stream [N, hidden] before it
Stream = Tensor | None  # residual stream [N, hidden]; None: the embeddings of the step


class Model(Protocol):
    """Weights of one model.  There is no state between calls: K/V and recurrent states are in the pool
    that a call gets.

    embedding:  packed for `backend`; None if only `embed` can compute it
    in_process: this process alone computes it
    stages:     steps that may be in flight at once, on a pipeline of so many stages
    adapts:     whether `pack_adapter` is supported
    """

    backend: Backend
    dtype: torch.dtype
    device: torch.device
    max_len: int
    precision: Precision
    spec: Facts
    embedding: Any = None
    in_process: bool = True
    stages: int = 1
    adapts: bool = False

    @property
    def exact(self) -> bool:
        """Whether a row's result does not depend on the other rows, bit for bit."""
        return self.backend.exact

    @property
    def footprint(self) -> Counter[torch.device]:
        """Bytes of K/V per token, by device."""
        raise NotImplementedError

    def state_bytes(self, nodes: int) -> Counter[torch.device]:
        """Bytes of one request's recurrent states, with the inputs of `nodes` draft nodes, by device.

        Empty for a model whose only memory is K/V.
        """
        return Counter()

    @property
    def failure(self) -> EngineError | None:
        """Why no forward is possible any more; None while it is."""
        return None

    def pool(self, slots: int) -> Pool: ...
    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Any:
        """Blocks for `forward` and `draft_chain` without the attention, or the MLP, of some layers.

        A skipped sublayer is the identity, and a skipped attention has no K/V.
        Raises ConfigError if a sublayer cannot be skipped.
        """

    def layer_range(self, first: int, last: int) -> Any:
        """Blocks of the layers first, …, last - 1 only."""
        rest = {*range(first), *range(last, self.spec.layers)}
        return self.skip_sublayers(rest, rest)

    def more_layers(self, tensors: Mapping[str, Tensor], count: int) -> Any:
        """Further decoder layers of this model's family, with the weights of a head.

        tensors: "{layer}.{name in it}" -> weight
        Raises ModelError if they are not such layers, or if the lean decoder runs the model.
        """
        raise ModelError(
            f"these are not layers of Llama or Qwen, and {self.spec.architecture} does not run in "
            "transformers' own code, which has others. Give a head with such layers, or another method."
        )

    def forward(
        self, step_input: StepInput, pool: Pool, blocks: Any = None, x: Stream = None, taps: Taps = None
    ) -> Tensor:
        """Hidden states [N, hidden] of the rows of a step, as `logits` takes them.  Writes K/V to the pool.

        blocks: blocks to run, by default all
        x:      input of the first block; it may be overwritten
        taps:   the number of layers receives the stream after the last
        """
        raise NotImplementedError

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows [n, hidden] of the embedding, without scaling."""
        raise NotImplementedError

    def final(self, x: Tensor) -> Tensor:
        """`forward`'s result [n, hidden] after the last norm: the input of the head."""
        raise NotImplementedError

    def head_logits(self, x: Tensor) -> Tensor:
        """Logits float32 [n, V] of states [n, hidden] after the last norm."""
        raise NotImplementedError

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """Logits float32 [len(rows), V] of some rows, ascending, of `forward`'s result."""
        return self.head_logits(self.final(take(x, rows)))

    def forward_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Tensor:
        """The forward of an engine step: logits float32 [M, V] of the step's `logits_rows`.

        The logits are valid until the next call: a backend may reuse their memory.
        states:  its keys are layers as in `taps` of `forward`, and FINAL; receives their states [N, hidden]
        queries: trees from the backend's `verifier`, answered from the logits
        """
        taps = {layer: state for layer, state in states.items() if layer != FINAL}
        x = self.forward(step_input, pool, taps=taps)
        states.update(taps)
        return self.finish_step(step_input, x, states, queries)

    def begin_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Callable[[], Tensor]:
        """Begin `forward_step`, so that another one may begin.  The result waits for its logits."""
        logits = self.forward_step(step_input, pool, states, queries)
        return lambda: logits

    def finish_step(
        self, step_input: StepInput, x: Tensor, states: dict[int, Tensor], queries: TreeQueries | None
    ) -> Tensor:
        """The part of `forward_step` after the last layer; x: the result of `forward`."""
        if FINAL in states:
            states[FINAL] = self.final(x)
        logits = self.logits(x, step_input.logits_rows)
        self.answer(logits, queries)
        return logits

    def answer(self, logits: Tensor, queries: TreeQueries | None) -> None:
        """Answer the trees of a step from its logits."""
        if queries is not None:
            assert self.backend.verifier is not None, "queries come from the backend's verifier"
            self.backend.verifier.verify(logits, queries)

    def pack_adapter(self, layers: Adapted) -> Any:
        """The weights of a LoRA adapter as `StepInput.adapt` takes them."""
        raise AssertionError("adapts is False")

    @property
    def fuses_chains(self) -> bool:
        """Whether `draft_chain` is supported."""
        return False

    def draft_chain(self, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None) -> Chained:
        """Run `forward` over the step, then extend chains of the best tokens after some rows, in one call."""
        raise AssertionError("fuses_chains is False")
