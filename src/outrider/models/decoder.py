"""The lean decoder: Llama, Mistral, Qwen2, Qwen3, Gemma, gpt-oss and others as one class with flags.

Pre-norm blocks with fused projections and residual stream x.  `StepInput` holds the rows and their visible
keys, `Pool` the K/V.  The backend provides the operations.

    x = embed(ids)
    per layer:  x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x))
    logits = head(norm(x))
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.backends.base import Backend, Chains, LayerKV
from outrider.backends.rules import TreeQueries
from outrider.backends.select import backend_for
from outrider.cache.pool import Pool, SplitPool
from outrider.cache.states import StatePool, StateShape
from outrider.checkpoints.delta_rule import DeltaRule
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.quantize import bits_of
from outrider.checkpoints.spec import Spec
from outrider.core.lora import Adapted, Runs
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained
from outrider.errors import CapacityError, ConfigError, ModelError, first_line
from outrider.models.base import Model, Stream, Taps
from outrider.models.chains import draft_chain
from outrider.models.family_layers import LeanLayers
from outrider.models.layers import LayerReader
from outrider.models.placement import Placement, Precision, place
from outrider.models.rope import rope_frequencies

SELF_TEST = 32  # positions of a table at least: the self-test computes 24
MAX_ROTATIONS = 1 << 31  # numbers: 16 million positions of 128 dimensions


@dataclass
class Part:
    """Consecutive layers on one device, packed by its backend."""

    backend: Backend
    stack: Any
    first: int
    layers: int
    idle: bool = False  # all its sublayers are skipped


Blocks = Sequence[Part]


class Decoder(Model):
    """Weights of one model.

    device, backend: those of the embedding and the head.  Results of `forward` and `logits` are on this
    device, wherever the layers are.
    """

    spec: Spec

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
        max_len: int,
        where: Placement | None = None,
    ) -> None:
        """where: placement of the layers, by default all on `device`."""
        assert isinstance(checkpoint.spec, Spec)
        self.spec = spec = checkpoint.spec
        self.adapts = spec.recurrent is None and not spec.variant.query_gates
        where = where or place(spec.layers, device, None)
        self.dtype, self.device, self.max_len = precision.dtype, where.outer, max_len
        self.precision = precision
        devices, activations = {where.outer, *where.layers}, precision.activations
        backends = {at: backend_for(at, self.dtype, activations) for at in devices}
        self.backend: Backend = backends[where.outer]
        bits = bits_of(precision.quantization)
        reader = LayerReader(checkpoint.tensors(), spec, self.dtype, bits)
        tables = rotation_tables(checkpoint.config, spec, max_len)
        self.rotations = next(iter(tables.values()))  # of layers without a table of their own
        self.embedding = reader.embedding(self.backend)
        self.layers = [reader.layer(backends[at], i) for i, at in enumerate(where.layers)]
        for layer, kind, at in zip(self.layers, spec.variant.ropes, where.layers):
            layer.rotations = tables[kind].to(at)
        self.parts: list[Part] = []
        for at, group in itertools.groupby(range(spec.layers), lambda i: where.layers[i]):
            numbers = list(group)
            first, count = numbers[0], len(numbers)
            own = self.layers[first : first + count]
            stack = backends[at].pack_layers(spec, own, self.rotations.to(at))
            self.parts.append(Part(backends[at], stack, first, count))
        self._layer_range = lru_cache(maxsize=8)(self._only)
        self.norm = reader.norm(self.backend)
        self.lm_head = self.embedding if spec.tied else reader.lm_head(self.backend)
        self.fused = self.backend.fused if len(backends) == 1 else None  # it runs on one device
        if self.fused is not None and spec.recurrent is not None and not self.fused.has_recurrent:
            self.fused = None
        # as transformers rounds it
        self.embedding_scale = torch.tensor(spec.variant.embedding_scale, dtype=self.dtype).item()
        self.ends: Any = None
        if self.fused is not None:
            scale, cap = self.embedding_scale, spec.variant.logit_cap
            self.ends = self.fused.pack_ends(self.embedding, self.norm, self.lm_head, scale, cap)

    def pool(self, slots: int) -> Pool:
        s, dtype = self.spec, self.precision.kv_dtype
        pools = [
            Pool(self._attending(part), s.kv_heads, s.head_dim, slots, dtype, part.backend.device)
            for part in self.parts
        ]
        if self.spec.recurrent is not None:
            pools[0].states = StatePool(state_shapes(self.spec.recurrent), self.device)
        return pools[0] if len(pools) == 1 else SplitPool(pools)

    def _attending(self, part: Part) -> int:
        """Number of layers with attention."""
        own = range(part.first, part.first + part.layers)
        return part.layers if (rule := self.spec.recurrent) is None else sum(not rule.layers[i] for i in own)

    @property
    def footprint(self) -> Counter[torch.device]:
        s, dtype, sizes = self.spec, self.precision.kv_dtype, Counter[torch.device]()
        for part in self.parts:
            own = Pool.bytes_per_slot(self._attending(part), s.kv_heads, s.head_dim, dtype)
            sizes[part.backend.device] += own
        return sizes

    def state_bytes(self, nodes: int) -> Counter[torch.device]:
        if (rule := self.spec.recurrent) is None:
            return Counter()
        return Counter({self.device: sum(shape.bytes(nodes) for shape in state_shapes(rule))})

    @property
    def exact(self) -> bool:
        return all(backend.exact for backend in (self.backend, *(part.backend for part in self.parts)))

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Blocks:
        self._refuse_ranges()
        return self._without(attention, mlp)

    def layer_range(self, first: int, last: int) -> Any:
        self._refuse_ranges()
        return self._layer_range(first, last)

    def _refuse_ranges(self) -> None:
        """A state goes through all draft nodes of a step at once, and no layer may leave some out."""
        if self.spec.recurrent is not None:
            raise ConfigError(
                f"layers can be skipped in models without recurrent ones, and {self.spec.architecture} has "
                "some: choose another method."
            )

    def _without(self, attention: Collection[int], mlp: Collection[int]) -> Blocks:
        skips = [(i in attention) + 2 * (i in mlp) for i in range(self.spec.layers)]
        parts = []
        for part in self.parts:
            own = skips[part.first : part.first + part.layers]
            stack = part.backend.skip_sublayers(part.stack, own)
            parts.append(replace(part, stack=stack, idle=all(skip == 3 for skip in own)))
        return parts

    def _only(self, first: int, last: int) -> Blocks:
        rest = {*range(first), *range(last, self.spec.layers)}
        return self._without(rest, rest)

    def more_layers(self, tensors: Mapping[str, Tensor], count: int) -> Any:
        """Layers with gates, which heads have no code for."""
        if not self.spec.variant.query_gates:
            return super().more_layers(tensors, count)
        like = LeanLayers.like(self.spec, tensors, count)
        return LeanLayers(like, tensors, self.precision, self.backend, self.rotations)

    def forward(
        self, step_input: StepInput, pool: Pool, blocks: Any = None, x: Stream = None, taps: Taps = None
    ) -> Tensor:
        """Residual stream [N, hidden] after the last layer."""
        if taps:
            return self._forward_with_taps(step_input, pool, taps)
        at = self.backend
        x = self._embedded(step_input) if x is None else x
        for i, (part, part_pool) in enumerate(zip(blocks or self.parts, pool.parts)):
            if part.idle:
                continue
            if part.backend is not at:
                at, x = part.backend, _move(x, part.backend)
            x = at.run_layers(part.stack, x, LayerKV(step_input, part_pool), _runs(step_input, i))
        return x if at is self.backend else _move(x, self.backend)

    def _embedded(self, step_input: StepInput) -> Tensor:
        """The residual stream [N, hidden] before the first layer."""
        x = self.backend.embed(self.embedding, step_input)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _forward_with_taps(self, step_input: StepInput, pool: Pool, taps: dict[int, Tensor]) -> Tensor:
        x, at = None, 0
        for layer in sorted(taps):
            x = self.forward(step_input, pool, self._layer_range(at, layer), x)
            taps[layer], at = x.clone(), layer  # x is changed in place
        if x is not None and at == self.spec.layers:
            return x
        return self.forward(step_input, pool, self._layer_range(at, self.spec.layers), x)

    def forward_step(
        self, step_input: StepInput, pool: Pool, states: dict[int, Tensor], queries: TreeQueries | None = None
    ) -> Tensor:
        if self.fused is None:
            return super().forward_step(step_input, pool, states, queries)
        stack, runs = self.parts[0].stack, _runs(step_input, 0) if step_input.adapters else ()
        return self.fused.forward(stack, self.ends, LayerKV(step_input, pool), states, queries, runs)

    def pack_adapter(self, layers: Adapted) -> list[Any]:  # an entry a part
        return [
            part.backend.pack_adapter(self.spec, layers[part.first : part.first + part.layers])
            for part in self.parts
        ]

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.backend.embed(self.embedding, StepInput.of_ids(ids))

    def final(self, x: Tensor) -> Tensor:
        return self.backend.rms_norm(x, self.norm, self.spec.eps)

    def head_logits(self, x: Tensor) -> Tensor:
        logits = self.backend.linear(x, self.lm_head)
        # `float` takes 30 µs here even if there is nothing to convert
        logits = logits if logits.dtype == torch.float32 else logits.float()
        cap = self.spec.variant.logit_cap
        return self.backend.soft_cap(logits, cap) if cap else logits

    @property
    def fuses_chains(self) -> bool:
        if self.spec.recurrent is not None:  # a state has to be set aside between forwards
            return False
        return self.fused is not None or self.backend.pick_next is not None

    def draft_chain(self, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None) -> Chained:
        if self.fused is None or not self.fused.extends(chains):
            return draft_chain(self, step_input, pool, chains, blocks)
        stack = (blocks or self.parts)[0].stack
        return self.fused.draft_chain(stack, self.ends, LayerKV(step_input, pool), chains)


def _runs(step_input: StepInput, part: int) -> Runs:
    """The rows with adapters, and their adapters as packed for a part."""
    return [(first, count, adapter[part]) for first, count, adapter in step_input.adapters]


def _move(x: Tensor, backend: Backend) -> Tensor:
    return x.to(backend.device, backend.activations)


def rotation_tables(config: Any, spec: Spec, max_len: int) -> dict[str, Tensor]:
    """The tables of `rotations` by kind of layer; one, of the kind "", where all layers share it."""
    kinds = dict.fromkeys(spec.variant.ropes or [""])
    return {kind: rotations(config, max_len, SELF_TEST, kind, spec.rotated) for kind in kinds}


def state_shapes(rule: DeltaRule) -> list[StateShape]:
    """Of the convolution, and of the delta rule, of each layer; both go through inputs kept for the first."""
    tails = StateShape((rule.taps - 1, rule.channels), 4 * rule.kept)
    states = StateShape((rule.heads, rule.dim, rule.key_dim), 0)
    return [tails, states] * sum(rule.layers)


def rotations(config: Any, max_len: int, positions: int = 0, kind: str = "", rotated: int = 0) -> Tensor:
    """RoPE table, float32 [positions, rotated]: cos, then sin, of the first half of what is rotated.

    Supports every scaling in transformers.  Scalings that depend on the text's length (longrope, dynamic) are
    computed for `max_len` tokens.

    max_len:   maximum tokens of a text
    positions: rows of the table, at least max_len
    kind:      of layers that have a set of parameters of their own
    rotated:   dimensions of a head, by default all
    """
    width = rotated or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (size := max(max_len, positions) * width) > MAX_ROTATIONS:
        raise CapacityError(
            f"the rotations of {max(max_len, positions):,} positions (max_position_embeddings) are {size:,} "
            f"numbers; at most {MAX_ROTATIONS:,} are held: lower max_model_len."
        )
    try:
        frequencies, scale = rope_frequencies(config, width, max_len, kind)
    except ConfigError:
        raise
    except Exception as error:
        raise ModelError(f"rope_parameters of the model cannot be computed: {first_line(error)}") from error
    half = torch.arange(max(max_len, positions))[:, None].float() * frequencies
    angles = torch.cat([half, half], dim=-1)  # as in transformers: the end of a tensor is computed otherwise
    table = torch.cat([part[:, : half.shape[1]] * scale for part in (angles.cos(), angles.sin())], dim=-1)
    if not table.isfinite().all():
        raise ModelError("rope_parameters of the model make rotations that are no finite numbers.")
    return table
