"""Transformer blocks of heads on the target's kernels, and their inputs: pairs of a token and a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend, LayerKV, Norms, Weight
from outrider.backends.torch.backend import beside
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.checkpoints.plain_config import PlainConfig, plain_rope
from outrider.core.limits import check_attention
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.errors import ModelError, first_line
from outrider.heads.reader import Reader
from outrider.models.base import Model
from outrider.models.decoder import rotations
from outrider.models.rowwise import by_rows


@dataclass(frozen=True)
class Sizes:
    """Sizes of a block, from its tensors; the config gives what these cannot."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6

    @staticmethod
    def of(head: Head, at: str, hidden: int) -> Sizes:
        """Load one block.

        at: prefix of the block's names, such as "layers.0".  Raises ModelError if the heads do not divide.
        """
        config = head.config
        q = head.shape(f"{at}.self_attn.q_proj.weight")[0]
        kv = head.shape(f"{at}.self_attn.k_proj.weight")[0]
        heads = config.get("num_attention_heads")
        width = config.get("head_dim") or (q // heads if heads else 0)
        if not width or not kv or q % width or kv % width or (q // width) % (kv // width):
            raise ModelError(
                f"{head.name!r}: {at} has {q} outputs for queries and {kv} for keys, which are no heads of "
                f"head_dim {config.get('head_dim')} (num_attention_heads {heads})."
            )
        check_attention(f"{head.name!r}: {at}", q // width, kv // width, width, width + width % 2)
        inner = head.shape(f"{at}.mlp.gate_proj.weight")[0]
        return Sizes(hidden, inner, q // width, kv // width, width, float(config.get("rms_norm_eps") or 1e-6))


def rotary_table(config: Mapping[str, Any], sizes: Sizes, positions: int) -> Tensor:
    """cos and sin for `rope_store`, [positions, head_dim].  theta is the head's own, 10000 by default."""
    if (plain := plain_rope(config)) is not None:
        return rotations(PlainConfig(head_dim=sizes.head_dim, rope_parameters=plain), positions, 32)
    from transformers import LlamaConfig

    keys = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    rope = {key: config[key] for key in keys if config.get(key)}
    try:
        llama = LlamaConfig(
            hidden_size=sizes.heads * sizes.head_dim,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            **rope,
        )
    except Exception as error:  # transformers validates, and raises errors of several kinds
        raise ModelError(
            f"the rope of a head ({', '.join(rope)}) cannot be computed: {first_line(error)}"
        ) from error
    return rotations(llama, positions, 32)


class Block:
    """x += o(attend(qkv(u)));  x += down(silu(gate) * up)(norm(x)).

    u is norm_in(x), or x itself without norm_in, or a wider input that the caller gives.
    """

    def __init__(
        self,
        reader: Reader,
        at: str,
        sizes: Sizes,
        inputs: int,
        turn: Tensor,
        window: int = 0,
        norm_in: Tensor | None = None,
    ) -> None:
        """inputs: width of u.  turn: a `rotary_table`.  window: of attention, in tokens, 0 for all.

        Raises ModelError for a config with another activation.
        """
        act = reader.head.config.get("hidden_act") or reader.head.config.get("hidden_activation") or "silu"
        if act not in ("silu", "swish"):
            raise ModelError(
                f"{reader.head.name!r} has hidden_act {act!r}; "
                "the layers of heads are supported with 'silu' only."
            )
        self.backend: Backend = reader.backend
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.hidden, self.inner, self.eps, self.norm_in = sizes.hidden, sizes.inner, sizes.eps, norm_in
        self.turn, self.window = turn.to(self.backend.device), window
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        normed = f"{at}.self_attn.q_norm.weight" in reader.head
        self.q_norm = reader.vector(f"{at}.self_attn.q_norm.weight", sizes.head_dim) if normed else None
        self.k_norm = reader.vector(f"{at}.self_attn.k_norm.weight", sizes.head_dim) if normed else None
        projections = [(f"{at}.self_attn.{name}_proj", size) for name, size in zip("qkv", (q, kv, kv))]
        self.qkv = reader.fused(projections, inputs)
        self.o = reader.linear(f"{at}.self_attn.o_proj", sizes.hidden, q)
        self.norm_post = reader.vector(f"{at}.post_attention_layernorm.weight", sizes.hidden)
        gate_up = [(f"{at}.mlp.{name}_proj", sizes.inner) for name in ("gate", "up")]
        self.gate_up = reader.fused(gate_up, sizes.hidden)
        self.down = reader.linear(f"{at}.mlp.down_proj", sizes.hidden, sizes.inner)
        layer: Any = self  # has the attributes of a model's layer
        self.stack = self.backend.pack_layers(layer, [layer], self.turn)

    def __call__(
        self, x: Tensor, step_input: StepInput, pool: Pool, at: int = 0, u: Tensor | None = None
    ) -> Tensor:
        """The block's output, in place of x [n, hidden].

        u: [n, inputs].  K/V is written to layer `at` of the pool.
        """
        if u is None and self.norm_in is None:
            u = x
        return self.backend.run_layers(self.stack, x, LayerKV(step_input, pool, at), u=u)


class Stack:
    """The blocks of a head, with K/V in a pool of the head's own."""

    def __init__(
        self,
        reader: Reader,
        target: Target,
        names: Sequence[str],
        width: int,
        inputs: int | None = None,
        windows: Sequence[int] = (),
        more: int = 0,
        bare: bool = False,
    ) -> None:
        """names: prefixes of the blocks' names.  inputs: width of u of the first block, if the caller gives
        u.  windows: of each block.  more: positions after the target's last.  bare: blocks may lack an input
        norm.

        Raises ModelError for blocks whose K/V does not fit into one pool.
        """
        head, self.model = reader.head, target.decoder
        self.sizes = sizes = Sizes.of(head, names[0], width)
        turned = int(sizes.head_dim * (head.config.get("partial_rotary_factor") or 1))
        turn = rotary_table(head.config, replace(sizes, head_dim=turned), target.max_len + more)
        self.blocks: list[Block] = []
        for i, name in enumerate(names):
            own, norm = Sizes.of(head, name, width), None
            if (own.kv_heads, own.head_dim) != (sizes.kv_heads, sizes.head_dim):
                raise ModelError(
                    f"{head.name!r}: {name} has other K/V heads than its first layer, which is not supported."
                )
            given = inputs if i == 0 else None
            if given is None:
                norm = (reader.optional if bare else reader.vector)(f"{name}.input_layernorm.weight", width)
            window = windows[i] if windows else 0
            self.blocks.append(Block(reader, name, own, given or width, turn, window, norm))

    @property
    def slot_bytes(self) -> int:
        """Bytes of K/V of one slot."""
        dtype = self.model.precision.kv_dtype
        return Pool.bytes_per_slot(len(self.blocks), self.sizes.kv_heads, self.sizes.head_dim, dtype)

    def pool(self, slots: int) -> Pool:
        dtype, device = self.model.precision.kv_dtype, self.model.backend.device
        return Pool(len(self.blocks), self.sizes.kv_heads, self.sizes.head_dim, slots, dtype, device)

    def __call__(self, x: Tensor, step_input: StepInput, pool: Pool, u: Tensor | None = None) -> Tensor:
        """The output of the last block, in place of x [n, width]; u: input of the first."""
        for i, block in enumerate(self.blocks):
            x = block(x, step_input, pool, i, u if i == 0 else None)
        return x


def residual(backend: Backend, x: Tensor, blocks: Sequence[Any]) -> Tensor:
    """x += silu(linear(x)) for each of the linears."""
    for block in blocks:
        x = x + by_rows(F.silu, backend.linear(x, block))
    return x


class Pairs:
    """[norm(e(token)); norm(state)], the input of recurrent heads.  A norm of None is the identity."""

    def __init__(
        self,
        model: Model,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
        embedding: Weight | None = None,
    ) -> None:
        """embedding: the head's own; the target's unless given."""
        self.model, self.backend = model, model.backend
        self.embedding = model.embedding if embedding is None else embedding
        self.norms = Norms(norm_token, norm_state, eps)

    def __call__(self, step_input: StepInput, g: Tensor) -> Tensor:
        """[n, 2h] of the step's tokens and the states g [n, h]."""
        if self.embedding is None:
            embedded = self.model.embed(step_input.input_ids).to(g.dtype)
            return beside(self.backend, embedded, g, self.norms)
        return self.backend.pair(self.embedding, step_input, g, self.norms)
