"""What a device computes: the handful of operations under the decoder, the attention and the sampler.

`cpu.py` compiles and calls the C kernels, `reference.py` is the same in torch for every other device, for machines
without a compiler, and for the tests.  Both promise what `Backend` says.
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


class Weight(Protocol):
    """A packed linear layer, as one set of kernels likes it."""

    inputs: int
    outputs: int


class ModelShape(LayerSizes, Protocol):
    """Sizes of a decoder and the epsilon of its norms."""

    @property
    def eps(self) -> float: ...


class DecoderLayer(Protocol):
    """Weights of one decoder block, packed by the backend that runs it.  window: of its attention, in tokens, 0 for all."""

    norm_in: Any  # Tensor; None where the caller gives what the first linear reads
    qkv: Any
    o: Any
    norm_post: Tensor
    gate_up: Any
    down: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int


Answer = tuple[list[int], list[int]]  # accepted nodes of a tree, and the tokens to emit


class Chain(NamedTuple):
    """A chain of guesses that begins behind row `at` of a plan; where there is a `StopRule`, it ends after one less likely than `floor`."""

    at: int
    levels: int
    distribution: DistributionParams
    stream: int  # of the sample's noise
    floor: float = 0.0


class TreeQueries(Protocol):
    """Questions what `match` says of some trees, and room for the answers."""

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
        """The root has row `root` of the logits, node i row root + 1 + i; `position` is that of the token after the root."""

    def read(self) -> Mapping[int, Answer | None]:
        """By key: the accepted nodes and what is said.  None where a pick finds nothing; no keys where no loop is at hand."""


class AttentionShape(Protocol):
    """What `rope_store` and `attend` must know of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


@dataclass(frozen=True)
class ScoreModifier:
    """What some families do to scores before the softmax: cap · tanh(score / cap), a slope by head for the distance (ALiBi), and
    a sink by head, which takes its share of the softmax and has no value.  float32 [H]; None and 0 mean no."""

    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None


class Backend(Protocol):
    """Shapes: n rows, h hidden, I inner, H query heads of D, V vocabulary."""

    name: str
    exact: bool  # a row's result does not depend on the rows beside it, bit for bit
    device: torch.device
    activations: torch.dtype

    def pack(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Weight:
        """[O,K] in the layout that the others like; a quantised one stays in its bits."""

    def linear(self, x: Tensor, weight: Any, add: Tensor | None = None) -> Tensor:
        """x [n,K] -> [n,O]; with `add` the result is added into it and it is returned."""

    def embed(self, weight: Any, step_input: StepInput) -> Tensor:
        """The embeddings [n,h] of the plan's ids."""

    def pair(
        self,
        weight: Any,
        step_input: StepInput,
        g: Tensor,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
    ) -> Tensor:
        """[norm(e); norm(g)], [n,2h]: the embeddings e of the plan's ids beside the states g [n,h]; a norm that is None is none."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def rope_store(
        self, qkv: Tensor, spec: AttentionShape, turn: Tensor, step_input: StepInput, pool: Pool, layer: int
    ) -> Tensor:
        """qkv [n,(H+2k)D]: turns the heads by `turn` (no columns: not at all), K and V go to the pool; q in the form of `attend`."""

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
        """[n,H·D]: every row of the plan over the keys that it sees.

        window > 0: only the keys of the latest `window` positions.  window < 0: only those of the row's own
        chunk, positions being cut into chunks of -window.  0: all.
        """

    def prepare(self, spec: ModelShape, layers: Sequence[DecoderLayer], turn: Tensor) -> Any:
        """The blocks of a decoder in the form that `run` likes; turn [positions, rot] = cos, then sin."""

    def without(self, stack: Any, skips: Sequence[int]) -> Any:
        """The same blocks, for `run` and `chain`, without some sublayers: of every layer 1 the attention, 2 the MLP, 3 both, 0 none.

        What is skipped is the identity: no norm, and a skipped attention neither reads nor writes K/V.
        """

    def adapter(self, spec: LayerSizes, layers: Adapted) -> Any:
        """A LoRA adapter in the form that `run` likes."""

    def run(
        self,
        stack: Any,
        x: Tensor,
        step_input: StepInput,
        pool: Pool,
        runs: Runs = (),
        u: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x [n,h] through all blocks: x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x)).

        The linears of the rows in `runs` add what their adapters say.  u [n,K]: what the first qkv reads in place of norm(x); it may
        be x.  layer: where the K/V of the first block lies in the pool.
        """

    def ends(self, embedding: Any, norm: Tensor, head: Any) -> Any:
        """What stands around the blocks of a model, in the form that `read` and `chain` like."""

    def read(
        self, stack: Any, ends: Any, step_input: StepInput, pool: Pool, wanted: Sequence[int], kept: dict[int, Tensor], trees: Any,
        runs: Runs = (),
    ) -> Tensor | None:  # fmt: skip
        """A whole model in one call: see `Model.read`, and `run` for `runs`.  None, and nothing done, where that is no gain.
        The logits are there until the next call."""

    def chain(
        self, stack: Any, ends: Any, step_input: StepInput, pool: Pool, chains: Sequence[Chain], vocabulary: int, stop_rule: StopRule | None = None,
        states: Tensor | None = None,
    ) -> Chained | None:  # fmt: skip
        """`embed` and `run` over the plan, then for each chain the best of the first `vocabulary` tokens, which goes in as its next
        row, `levels` times, or until `stop_rule` says so; a chain may end early.  None, and nothing done, where no loop is at hand.

        states [chains, most levels, h] gets the residual stream that each token was read from.
        """

    def should_stop(
        self, stop_rule: StopRule, logits: Tensor, temperature: float, token: int, level: int, row: int = 0
    ) -> tuple[bool, NodeFeatures]:
        """Whether no guess should be made behind `token`, which was picked from one row, [V] or `row` of [M,V]; and its traits."""

    def pick(
        self, logits: Tensor, distribution: DistributionParams, key: int, k: int, probs: bool, row: int = 0
    ) -> tuple[list[int], list[float]]:
        """The k best tokens of one row, [V] or `row` of [M,V], under `distribution` with the noise of `key`, best first (fewer if the law
        allows fewer)."""

    def trees(self) -> TreeQueries:
        """For `follow` and `read`."""

    def follow(self, logits: Tensor, trees: Any) -> None:
        """Answers them, of logits [M,V]."""

    def picks(
        self,
        logits: Tensor,
        distribution: DistributionParams,
        keys: Sequence[int],
        k: int,
        ids: Tensor | None = None,
        probs: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`pick` for every row of [n,V], k <= 64, each with a key of its own: int32 and float32 [n,k], -1 and 0 where there are fewer, and
        no probabilities, all 0, unless they are asked for.

        ids: int32 [V], the token that each entry of a row stands for, whose noise it gets; what is returned are entries.
        """

    def candidates(self, k: int, wide: int, levels: int) -> Candidates:
        """Of a dynamic tree that begins: at most k <= 64 behind a node, `wide` nodes of a level that go on, so many levels."""
