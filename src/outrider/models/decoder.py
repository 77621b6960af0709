"""The lean decoder: Llama, Mistral, Qwen2 and Qwen3 as one class with flags.

Pre-norm blocks with fused projections; residual x.  Which rows see which keys is the plan's business, where K/V lies the
pool's, how it is computed the kernels': this file is the arithmetic of the model and nothing else.

    x = embed(ids);  per layer:  x += o(attend(rope(qkv(norm(x)))));  x += down(silu(gate) * up)(norm(x));  logits = head(norm(x))
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.backends.base import Chain, Kernels, TreeQueries, Weight
from outrider.backends.select import kernels_for
from outrider.cache.pool import Pool, SplitPool, kv_dtype
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.quantize import bits_of, reduced
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.lora import Adapted
from outrider.core.quantized import join
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, StopRule
from outrider.errors import CapacityError, ConfigError, ModelError, first_line
from outrider.models.placement import Placement, place
from outrider.models.rope import fix_rope
from outrider.models.steps import in_steps

MAX_ROTATIONS = 1 << 31  # numbers: 16 million positions of 128 dimensions


@dataclass
class Layer:
    """The weights of one block, and what `rope_store` must know of its heads."""

    norm_in: Tensor
    qkv: Weight  # [(heads + 2 kv_heads) head_dim, hidden]
    o: Weight
    norm_post: Tensor
    gate_up: Weight  # [2 inner, hidden]
    down: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int


@dataclass
class Part:
    """Neighbouring layers on one device, in the form that its kernels like."""

    kernels: Kernels
    stack: Any
    first: int
    layers: int
    idle: bool = False  # nothing of it runs


Blocks = Sequence[Part]


class Decoder:
    """Weights of one model.  Has no state between calls: K/V lives in the pool that a call is given.

    device, kernels: where the embedding and the head are; what `forward` and `logits` return is there, wherever the layers lie.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_len: int,
        quantization: str | None = None, kv_cache_dtype: str = "auto", where: Placement | None = None,
    ) -> None:  # fmt: skip
        """where: unless all is on `device`."""
        assert isinstance(checkpoint.spec, Spec)
        self.spec = spec = checkpoint.spec
        where = where or place(spec.layers, device, None)
        self.dtype, self.device, self.max_len = dtype, where.outer, max_len
        self.bits, self.kv_cache_dtype = bits_of(quantization), kv_cache_dtype
        kernels = {at: kernels_for(at, dtype) for at in {where.outer, *where.layers}}
        self.split = len(kernels) > 1  # over several devices
        self.kernels: Kernels = kernels[where.outer]
        weights = checkpoint.tensors()
        turn = rotations(checkpoint.config, max_len, 32)  # the self-test computes 24 positions
        self.embedding = self._fused(
            self.kernels, weights, [("model.embed_tokens", spec.vocabulary)], spec.hidden, outer=True
        )
        self.layers = [self._layer(kernels[at], weights, i) for i, at in enumerate(where.layers)]
        self.parts: list[Part] = []
        for at, group in itertools.groupby(range(spec.layers), lambda i: where.layers[i]):
            numbers = list(group)
            first, count = numbers[0], len(numbers)
            stack = kernels[at].prepare(spec, self.layers[first : first + count], turn.to(at))
            self.parts.append(Part(kernels[at], stack, first, count))
        self.between = lru_cache(maxsize=8)(self._between)
        self.norm = self._vector(self.kernels, weights, "model.norm", spec.hidden)
        self.lm_head = self.embedding
        if not spec.tied:
            self.lm_head = self._fused(
                self.kernels, weights, [("lm_head", spec.vocabulary)], spec.hidden, outer=True
            )
        self.ends = self.kernels.ends(self.embedding, self.norm, self.lm_head)

    def pool(self, slots: int) -> Pool:
        s, dtype = self.spec, kv_dtype(self.kv_cache_dtype, self.dtype)
        pools = [
            Pool(part.layers, s.kv_heads, s.head_dim, slots, dtype, part.kernels.device)
            for part in self.parts
        ]
        return pools[0] if len(pools) == 1 else SplitPool(pools)

    @property
    def footprint(self) -> Counter[torch.device]:
        """Bytes of K/V a slot, by device."""
        s, dtype, sizes = self.spec, kv_dtype(self.kv_cache_dtype, self.dtype), Counter[torch.device]()
        for part in self.parts:
            sizes[part.kernels.device] += Pool.bytes_per_slot(part.layers, s.kv_heads, s.head_dim, dtype)
        return sizes

    @property
    def slot_bytes(self) -> int:
        return self.footprint.total()

    @property
    def exact(self) -> bool:
        return all(kernels.exact for kernels in (self.kernels, *(part.kernels for part in self.parts)))

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Blocks:
        """The blocks without the attention, or the MLP, of some layers, for `forward` and `chain`."""
        skips = [(i in attention) + 2 * (i in mlp) for i in range(self.spec.layers)]
        parts = []
        for part in self.parts:
            here = skips[part.first : part.first + part.layers]
            parts.append(
                replace(
                    part, stack=part.kernels.without(part.stack, here), idle=all(skip == 3 for skip in here)
                )
            )
        return parts

    def _between(self, first: int, last: int) -> Blocks:
        """Layers first … last - 1 only."""
        rest = {*range(first), *range(last, self.spec.layers)}
        return self.without(rest, rest)

    def forward(
        self,
        step_input: StepInput,
        pool: Pool,
        blocks: Blocks | None = None,
        x: Tensor | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Residual stream after the last layer, [n, hidden] for the n rows of the plan; K/V of these rows is in the pool.

        blocks: all, unless given.  x: where they begin, the embeddings of the plan unless given; it may be changed.
        taps: layer -> gets the residual stream that enters it.
        """
        if taps:
            return self._tapped(step_input, pool, taps)
        here = self.kernels
        x = here.embed(self.embedding, step_input) if x is None else x
        for i, (part, own) in enumerate(zip(blocks or self.parts, pool.parts)):
            if part.idle:
                continue
            if part.kernels is not here:
                here, x = part.kernels, _carried(x, part.kernels)
            x = here.run(
                part.stack,
                x,
                step_input,
                own,
                [(first, count, adapter[i]) for first, count, adapter in step_input.adapted],
            )
        return x if here is self.kernels else _carried(x, self.kernels)

    def _tapped(self, step_input: StepInput, pool: Pool, taps: dict[int, Tensor]) -> Tensor:
        x, at = None, 0
        for layer in sorted(taps):
            x = self.forward(step_input, pool, self.between(at, layer), x)
            taps[layer], at = x.clone(), layer  # x is changed in place
        return (
            x
            if x is not None and at == self.spec.layers
            else self.forward(step_input, pool, self.between(at, self.spec.layers), x)
        )

    def read(
        self,
        step_input: StepInput,
        pool: Pool,
        wanted: list[int],
        kept: dict[int, Tensor],
        trees: TreeQueries,
    ) -> Tensor:
        if self.split:
            return in_steps(self, step_input, pool, wanted, kept, trees)
        runs = (
            [(first, count, adapter[0]) for first, count, adapter in step_input.adapted]
            if step_input.adapted
            else ()
        )
        logits = self.kernels.read(
            self.parts[0].stack, self.ends, step_input, pool, wanted, kept, trees, runs
        )
        return in_steps(self, step_input, pool, wanted, kept, trees) if logits is None else logits

    def adapter(self, layers: Adapted) -> list[Any]:
        """What `StepInput.adapt` wants for a LoRA adapter that has been read: its form for each part."""
        return [
            part.kernels.adapter(self.spec, layers[part.first : part.first + part.layers])
            for part in self.parts
        ]

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), V] of some rows, in ascending order, of `forward`'s result."""
        return self.head_logits(self.final(x if len(rows) == x.shape[0] else x[rows]))

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.kernels.embed(self.embedding, StepInput.bare(ids))

    def final(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.norm, self.spec.eps)

    def head_logits(self, x: Tensor) -> Tensor:
        logits = self.kernels.linear(x, self.lm_head)
        return (
            logits if logits.dtype == torch.float32 else logits.float()
        )  # even for nothing it takes 30 µs here

    def chain(
        self, step_input: StepInput, pool: Pool, chains: Sequence[Chain], vocabulary: int, stop_rule: StopRule | None = None,
        blocks: Blocks | None = None, states: Tensor | None = None,
    ) -> Chained | None:  # fmt: skip
        """`forward` over the plan, then a chain of the best tokens behind some of its rows; see `Kernels.chain`."""
        if self.split:
            return None
        return self.kernels.chain(
            (blocks or self.parts)[0].stack,
            self.ends,
            step_input,
            pool,
            chains,
            vocabulary,
            stop_rule,
            states,
        )

    def _layer(self, kernels: Kernels, weights: Source, i: int) -> Layer:
        s, at = self.spec, f"model.layers.{i}"
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = [(f"{at}.self_attn.{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))]
        mlp = [(f"{at}.mlp.{name}_proj", s.inner) for name in ("gate", "up")]
        return Layer(
            norm_in=self._vector(kernels, weights, f"{at}.input_layernorm", s.hidden),
            qkv=self._fused(kernels, weights, attention, s.hidden),
            o=self._linear(kernels, weights, f"{at}.self_attn.o_proj", s.hidden, q),
            norm_post=self._vector(kernels, weights, f"{at}.post_attention_layernorm", s.hidden),
            gate_up=self._fused(kernels, weights, mlp, s.hidden),
            down=self._linear(kernels, weights, f"{at}.mlp.down_proj", s.hidden, s.inner),
            q_norm=self._vector(kernels, weights, f"{at}.self_attn.q_norm", s.head_dim) if s.qk_norm else None,
            k_norm=self._vector(kernels, weights, f"{at}.self_attn.k_norm", s.head_dim) if s.qk_norm else None,
            heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, eps=s.eps, window=s.windows[i],
        )  # fmt: skip

    def _vector(self, kernels: Kernels, weights: Source, name: str, size: int) -> Tensor:
        return weights.get(f"{name}.weight", size).float().to(kernels.device).contiguous()

    def _linear(self, kernels: Kernels, weights: Source, name: str, outputs: int, inputs: int) -> Weight:
        return self._fused(kernels, weights, [(name, outputs)], inputs)

    def _fused(
        self,
        kernels: Kernels,
        weights: Source,
        parts: list[tuple[str, int]],
        inputs: int,
        outer: bool = False,
    ) -> Weight:
        """Several linears of the same input as one, their outputs side by side; a bias counts where the file has one.
        outer: the embedding or the head."""
        bits = 8 if outer and self.bits else self.bits
        read = [reduced(weights.linear(name, size, inputs), bits) for name, size in parts]
        biased = any(f"{name}.bias" in weights for name, _ in parts)
        bias = (
            torch.cat([weights.get(f"{name}.bias", size).float() for name, size in parts]) if biased else None
        )
        return kernels.pack(join(read, self.dtype), bias)


def _carried(x: Tensor, kernels: Kernels) -> Tensor:
    return x.to(kernels.device, kernels.activations)


def rotations(config: Any, max_len: int, positions: int = 0) -> Tensor:
    """float32 [positions, head_dim]: cos, then sin, of the first half of the head.

    Every scaling that transformers knows.  max_len: tokens of the longest text.  A scaling that depends on the
    length of a text (longrope, dynamic) is computed for this length.
    positions: max_len unless more are given.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (size := max(max_len, positions) * width) > MAX_ROTATIONS:
        raise CapacityError(
            f"the rotations of {max(max_len, positions):,} positions (max_position_embeddings) are {size:,} numbers; at most {MAX_ROTATIONS:,} are held: "
            "lower max_model_len."
        )
    try:
        rotary = LlamaRotaryEmbedding(config)
        fix_rope(rotary, max_len)
        cos, sin = rotary(torch.empty(0), torch.arange(max(max_len, positions))[None])
    except KeyError as error:
        raise ConfigError(
            f"the model's rope type {error} (rope_parameters) is unknown to transformers."
        ) from error
    except Exception as error:
        raise ModelError(f"rope_parameters of the model cannot be computed: {first_line(error)}") from error
    half = cos.shape[-1] // 2
    table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).contiguous()
    if not table.isfinite().all():
        raise ModelError("rope_parameters of the model make rotations that are no finite numbers.")
    return table
