"""Interface of a backend: the operations under the decoder, the attention and the sampler, for one device.

`backends/cpu` calls compiled C kernels.  `backends/torch` is the reference: every other device, machines without a compiler,
and the tests.  What a backend may leave out is declared: `Backend.fused` and `Backend.matcher` are None if it has none.

Shapes: N rows of a step, h hidden, I inner, H query heads, k K/V heads, D head dimensions, V vocabulary, M rows with logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.backends.candidates import Candidates
from outrider.cache.pool import Pool
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.params import DistributionParams
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, NodeFeatures, StopRule

Answer = tuple[list[int], list[int]]  # accepted nodes of a tree, and the tokens to emit


class Weight(Protocol):
    """A linear layer's weight in the layout of its backend."""

    inputs: int
    outputs: int


class ModelShape(LayerSizes, Protocol):
    """Sizes of a decoder and the epsilon of its norms."""

    @property
    def eps(self) -> float: ...


class AttentionShape(Protocol):
    """Heads of a layer, and the norms of its queries and keys, if any."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class DecoderLayer(AttentionShape, Protocol):
    """Weights of one decoder block, packed by the backend that runs it.  window: of its attention, in tokens, 0 for all."""

    norm_in: Any  # Tensor; None if the caller computes the input of `qkv`
    qkv: Any
    o: Any
    norm_post: Tensor
    gate_up: Any
    down: Any
    window: int


@dataclass(frozen=True)
class ScoreModifier:
    """Changes to attention scores before the softmax.  0 and None mean no change.

    cap:    soft cap, score <- cap · tanh(score / cap)
    slopes: float32 [H], ALiBi slopes, times the distance in positions
    sinks:  float32 [H], attention sinks: one more score, which has no value
    """

    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None


class LinearOps(Protocol):
    """Linear layers, embeddings and norms."""

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Weight:
        """[O, K] in the layout of the other operations.  A quantized weight keeps its bits."""

    def linear(self, x: Tensor, weight: Any, add: Tensor | None = None) -> Tensor:
        """x [n, K] -> [n, O].  With `add` [n, O] the result is added into it, and it is returned."""

    def embed(self, weight: Any, step_input: StepInput) -> Tensor:
        """Embeddings [N, h] of the step's ids."""

    def pair(
        self,
        weight: Any,
        step_input: StepInput,
        g: Tensor,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
    ) -> Tensor:
        """[norm(e); norm(g)], [N, 2h], of the embeddings e of the step's ids and states g [N, h].  None: no norm."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AttentionOps(Protocol):
    """Attention over the paged K/V of a pool."""

    def prepare(self, step_input: StepInput) -> Any:
        """Derives from a step what attention reads in every layer.

        Called once a step and kept in `StepInput.derived`; `attend` calls it if nobody has.  With graphs it is the part
        that runs before the replay.
        """

    def rope_store(
        self,
        qkv: Tensor,
        spec: AttentionShape,
        rotations: Tensor,
        step_input: StepInput,
        pool: Pool,
        layer: int,
    ) -> Tensor:
        """Rotates the heads of qkv [N, (H + 2k) D] and writes K and V to the step's slots.

        rotations: float32 [positions, rot], cos then sin; without columns nothing is rotated.
        Returns q in the form that `attend` takes.
        """

    def attend(
        self,
        q: Tensor,
        spec: AttentionShape,
        step_input: StepInput,
        pool: Pool,
        layer: int,
        scale: float,
        window: int,
        modifier: ScoreModifier | None = None,
    ) -> Tensor:
        """Attention of every row over the keys that it sees, [N, H·D].

        window > 0: keys of the latest `window` positions.  window < 0: keys of the row's own chunk, if positions are cut
        into chunks of -window.  0: all keys.
        """


class LayerOps(Protocol):
    """Decoder blocks: x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x))."""

    def pack_layers(self, spec: ModelShape, layers: Sequence[DecoderLayer], rotations: Tensor) -> Any:
        """The blocks of a decoder as `run_layers` takes them; rotations as in `rope_store`."""

    def skip_sublayers(self, stack: Any, skips: Sequence[int]) -> Any:
        """The same blocks without some sublayers; skips[i] is 1 for the attention of layer i, 2 for its MLP, 3 for both.

        A skipped sublayer is the identity, its norm included.  A skipped attention neither reads nor writes K/V.
        """

    def pack_adapter(self, spec: LayerSizes, layers: Adapted) -> Any:
        """A LoRA adapter as `run_layers` takes it."""

    def run_layers(
        self,
        stack: Any,
        x: Tensor,
        step_input: StepInput,
        pool: Pool,
        runs: Runs = (),
        u: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x [N, h] through all blocks.  It may be changed, and is returned.

        runs:  rows whose linears add the updates of an adapter
        u:     [N, K], what the first `qkv` reads instead of norm(x); it may be x
        layer: layer of the pool that holds the K/V of the first block
        """


class TokenPicker(Protocol):
    """Choice of tokens from logits under a sampling distribution and the noise of a key."""

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        """The k best tokens of one row and their probabilities, best first; fewer if fewer are allowed.

        logits: [V], or [M, V] of which `row` counts.
        """

    def pick_rows(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`pick` for every row of [n, V], k <= 64, each with its own key: int32 and float32 [n, k], padded with -1 and 0.

        ids:   int32 [V], the token that each entry of a row stands for, whose noise it gets; entries are returned
        probs: False leaves all probabilities 0
        """

    def should_stop(
        self,
        stop_rule: StopRule,
        logits: Tensor,
        temperature: float,
        token: int,
        depth: int,
        row: int = 0,
    ) -> tuple[bool, NodeFeatures]:
        """Whether no draft token follows `token`, which was picked from `row` of the logits; and its features."""

    def candidates(self, k: int, wide: int, levels: int) -> Candidates:
        """An empty dynamic tree: at most k <= 64 children a node, `wide` nodes of a level expanded, `levels` levels."""


class TreeQueries(Protocol):
    """Trees for match verification, and room for the results."""

    def add(
        self,
        key: int,
        root: int,
        distribution: DistributionParams,
        stream: int,
        position: int,
        tokens: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        """Adds the tree of `key`.

        root:     row of the logits behind the root; those behind node i are in row root + 1 + i
        stream:   RNG stream of the sample
        position: position of the token after the root
        """

    def read(self) -> Mapping[int, Answer | None]:
        """By key: accepted nodes and tokens to emit.  None if a token could not be picked (logits not finite)."""


class TreeMatcher(Protocol):
    """Match verification of whole trees in one call."""

    def queries(self) -> TreeQueries: ...
    def match(self, logits: Tensor, queries: Any) -> None:
        """Answers the queries from logits [M, V]."""


class Chain(NamedTuple):
    """A chain of draft tokens that begins behind row `at` of a step."""

    at: int
    levels: int
    distribution: DistributionParams
    stream: int  # RNG stream of the sample
    floor: float = 0.0  # with a `StopRule`: the chain ends after a token of lower probability


class FusedModel(Protocol):
    """A whole model in one call.  After a forward has swept the processor's caches, steps outside cost more than inside."""

    def pack_ends(self, embedding: Any, norm: Tensor, head: Any) -> Any:
        """What stands around the blocks of a model."""

    def forward(
        self,
        stack: Any,
        ends: Any,
        step_input: StepInput,
        pool: Pool,
        states: dict[int, Tensor],
        queries: Any,
        runs: Runs = (),
    ) -> Tensor:
        """Logits float32 [M, V] of the step's `logits_rows`.  The next call may overwrite them.

        states:  see `Model.forward_step`
        queries: from `Backend.matcher`, answered; None for none
        """

    def draft_chain(
        self,
        stack: Any,
        ends: Any,
        step_input: StepInput,
        pool: Pool,
        chains: Sequence[Chain],
        vocabulary: int,
        stop_rule: StopRule | None = None,
        states: Tensor | None = None,
    ) -> Chained:
        """Blocks over the step, then chains: the best of the first `vocabulary` tokens is the next row, and so on.

        A chain ends after `levels` tokens, by `stop_rule`, or if no token can be picked.
        states: [chains, most levels, h], gets the residual stream that each token was picked from.
        """


class Backend(LinearOps, AttentionOps, LayerOps, TokenPicker, Protocol):
    """Operations of one device in one dtype of weights."""

    name: str
    exact: bool  # a row's result does not depend on the other rows, bit for bit
    device: torch.device
    activations: torch.dtype

    @property
    def fused(self) -> FusedModel | None: ...
    @property
    def matcher(self) -> TreeMatcher | None: ...
