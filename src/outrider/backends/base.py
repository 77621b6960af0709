"""Interface of a backend: the operations under the decoder, the attention and the sampler, for one device.

`backends/cpu` calls compiled C kernels, `backends/triton` has those of CUDA devices.  `backends/torch` is
the reference.  It serves every other device, machines without a compiler, and the tests.  Optional parts,
`fused` to `top_next` of `Backend`, are None if a backend has none.

Shapes: N rows of a step, h hidden, I inner, H query heads, k K/V heads, D head dimensions, V vocabulary,
M rows with logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.backends.candidates import Candidates
from outrider.backends.launch import AttentionShape, Call, Launched
from outrider.backends.layer import DecoderLayer, LayerExperts
from outrider.backends.recurrence import Recurrence
from outrider.backends.rules import DistributionOps, TreeVerifier
from outrider.cache.pool import Pool
from outrider.core.lora import Adapted, LayerSizes, Runs
from outrider.core.params import DistributionParams
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, NodeFeatures, StopRule


class Weight(Protocol):
    """A linear layer's weight in the layout of its backend."""

    inputs: int
    outputs: int


class ModelShape(LayerSizes, Protocol):
    """Sizes of a decoder and the epsilon of its norms."""

    @property
    def eps(self) -> float: ...


class LayerKV(NamedTuple):
    """K/V of one layer of a pool, and the step that reads and writes it."""

    step_input: StepInput
    pool: Pool
    layer: int = 0


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


class Scores(NamedTuple):
    """How attention scores are computed: scale · (q · k), modified, of the keys in a window.

    window > 0: keys of the latest `window` positions
    window < 0: keys of the row's own chunk, for positions cut into chunks of -window
    window = 0: all keys
    """

    scale: float
    window: int = 0
    modifier: ScoreModifier | None = None


class Norms(NamedTuple):
    """Weights of the norms of embeddings and of states, None for the identity; and their epsilon."""

    token: Tensor | None
    state: Tensor | None
    eps: float


class Chain(NamedTuple):
    """A chain of draft tokens that begins after row `at` of a step.

    probs: if given, tokens are sampled.  float64 [levels, width], receives what each was sampled from, 0
        after the draft's vocabulary.  On the CPU, or on the draft's device if it verifies trees by q.
    first_node: number of the random stream of the first sampled token
    floor, joint_floor: with a `StopRule`: the chain ends after a token of lower probability, or with which
        the product of its probabilities is lower
    """

    at: int
    levels: int
    distribution: DistributionParams
    stream: int  # RNG stream of the sample
    floor: float = 0.0
    probs: Tensor | None = None
    first_node: int = 0
    joint_floor: float = 0.0


class Chains(NamedTuple):
    """Chains of draft tokens, the best of the first `vocabulary`, that are extended in one call.

    A chain ends after `levels` tokens, by `stop_rule`, or if no token can be picked.
    states: [chains, most levels, h], receives the residual stream that each token was picked from
    width: of `Chain.probs`, if any chain of this drafter has it, and 0 otherwise: one graph serves them all
    """

    chains: Sequence[Chain]
    vocabulary: int
    stop_rule: StopRule | None = None
    states: Tensor | None = None
    width: int = 0


# The best token of each row of logits [n, V], given the distribution and the key of the noise of each.
# int64 [n] on the device of the logits, -1 where none is finite; the host reads nothing.
PickNext = Callable[[Tensor, Sequence[DistributionParams], Sequence[int]], Tensor]


class TopNext(Protocol):
    """`Backend.pick_rows` for rows of several requests; the host reads nothing."""

    def asked(self, distributions: Sequence[DistributionParams], keys: Sequence[int], vocabulary: int) -> Any:
        """Pack the sampling distribution and the RNG key of each row [n] for a call.

        Returns `Numbers`, which `on_device` moves, or a list of pairs, which stays on the host.
        """

    def with_keys(self, asked: Any, keys: Sequence[int]) -> Any:
        """What `asked` returned, with other keys."""

    def __call__(self, logits: Tensor, asked: Any, k: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The best entries int64 and their probabilities float32, [n, min(k, V)], padded with -1 and 0.

        Both are on the device of the logits.  asked: as `on_device` returns it, or a slice of it.
        ids: as in `pick_rows`.
        """


class FusedModel(Protocol):
    """A whole model in one call.  It evicts the processor's caches: operations after it are slower.

    has_recurrent: whether its layers may be recurrent
    """

    has_recurrent: bool

    def pack_ends(self, embedding: Any, norm: Tensor, head: Any, scale: float = 1.0, cap: float = 0.0) -> Any:
        """Pack the ends of a model.  scale: factor of embeddings.  cap: soft cap of logits, or 0."""

    def forward(
        self, stack: Any, ends: Any, kv: LayerKV, states: dict[int, Tensor], queries: Any, runs: Runs = ()
    ) -> Tensor:
        """Logits float32 [M, V] of the step's `logits_rows`.  The next call may overwrite them.

        states:  see `Model.forward_step`
        queries: trees from `Backend.verifier`, answered by this call; None for none
        """

    def extends(self, chains: Chains) -> bool:
        """Whether `draft_chain` takes these chains; else `Backend.pick_next` extends them, if it is there."""

    def draft_chain(self, stack: Any, ends: Any, kv: LayerKV, chains: Chains) -> Chained:
        """Run the blocks over the step, then extend the chains."""


class Backend(Protocol):
    """Operations of one device in one dtype of weights."""

    name: str
    exact: bool  # a row's result does not depend on the other rows, bit for bit
    device: torch.device
    activations: torch.dtype

    @property
    def fused(self) -> FusedModel | None: ...
    @property
    def verifier(self) -> TreeVerifier | None: ...
    @property
    def distributions(self) -> DistributionOps | None: ...
    @property
    def pick_next(self) -> PickNext | None: ...
    @property
    def top_next(self) -> TopNext | None: ...
    @property
    def recurrence(self) -> Recurrence: ...

    # ---- linear layers, embeddings and norms

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Weight:
        """Pack [O, K] in the layout of the other operations.  A quantized weight keeps its bits."""

    def pack_experts(self, experts: LayerExperts) -> LayerExperts:
        """Experts whose weights are packed one by one, in the layout of `run_layers`."""

    def linear(self, x: Tensor, weight: Any, add: Tensor | None = None) -> Tensor:
        """Product x [n, K] -> [n, O].  With `add` [n, O], accumulates into `add` and returns it."""

    def launch(self, method: Launched, call: Call) -> Tensor:
        """The result of a bound method, whose launches may be recorded; valid until the next call.

        The method, and so the result, may see more rows than `call` has: blank ones, behind those of each
        step, of `rows` and of every part of `numbers`.
        """

    def embed(self, weight: Any, step_input: StepInput) -> Tensor:
        """Embeddings [N, h] of the step's ids."""

    def pair(self, weight: Any, step_input: StepInput, g: Tensor, norms: Norms) -> Tensor:
        """Concatenation [norm(e); norm(g)], [N, 2h], of embeddings e of the ids and states g [N, h]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of float32 [n, V]; x may be overwritten, and may be the result."""

    # ---- attention over the paged K/V of a pool

    def prepare(self, step_input: StepInput) -> Any:
        """Derive from a step the data that attention reads in every layer.

        Called once per step; the result is kept in `StepInput.derived`.  `attend` calls it if it has not
        been called.
        """

    def rope_store(self, qkv: Tensor, spec: AttentionShape, rotations: Tensor, kv: LayerKV) -> Tensor:
        """Rotate the heads of qkv [N, (H + 2k) D] and write K and V to the step's slots.

        rotations: float32 [positions, rot], cos then sin; no rotation if rot is 0.
        Returns q in the form that `attend` takes.
        """

    def attend(self, q: Tensor, spec: AttentionShape, kv: LayerKV, scores: Scores) -> Tensor:
        """Attention output [N, H·D] of every row over its visible keys."""

    # ---- decoder blocks: x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x)), or the
    #      weighted sum of a row's experts, each such an MLP; a delta rule (`LayerDelta`) in place of `attend`

    def pack_layers(self, spec: ModelShape, layers: Sequence[DecoderLayer], rotations: Tensor) -> Any:
        """The blocks of a decoder as `run_layers` takes them; rotations as in `rope_store`."""

    def skip_sublayers(self, stack: Any, skips: Sequence[int]) -> Any:
        """The same blocks without some sublayers.

        skips: for layer i, 1 skips its attention, 2 its MLP, 3 both.  A skipped sublayer is the identity,
        its norm included.  A skipped attention neither reads nor writes K/V.
        """

    def pack_adapter(self, spec: LayerSizes, layers: Adapted) -> Any:
        """A LoRA adapter as `run_layers` takes it."""

    def run_layers(
        self, stack: Any, x: Tensor, kv: LayerKV, runs: Runs = (), u: Tensor | None = None
    ) -> Tensor:
        """Residual stream [N, h] after all blocks.  `x` [N, h] may be overwritten, and may be the result.

        kv:   of the first block with attention; the others have the layers after it
        runs: rows whose linears add the updates of an adapter
        u:    [N, K], input of the first `qkv` in place of norm(x), or of the first `gate_up` if that
              attention is skipped; it may be x
        """

    # ---- choice of tokens from logits, under a sampling distribution and the noise of an RNG key

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        """The k best tokens of one row and their probabilities, best first; fewer if fewer are allowed.

        logits: [V], or [M, V] of which row `row` is used
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
        """`pick` for every row of [n, V], k <= 64, each row with its own key.

        ids:   int32 [V], token of each column of the logits; its noise is used.  The result holds columns.
        probs: False leaves all probabilities 0
        Returns int32 and float32 [n, k], padded with -1 and 0.
        """

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, depth: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        """Whether the draft ends after `token`, picked from `row` of the logits; and its features."""

    def candidates(self, k: int, wide: int, levels: int) -> Candidates:
        """An empty dynamic tree of `levels` levels.

        k:    maximum children per node, at most 64
        wide: nodes expanded per level
        """
