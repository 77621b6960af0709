"""What heads with a transformer block are made of, on the target's kernels: pairs of a token and a state, and the block itself, whose
attention may read something wider than the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.backends.base import Kernels, Weight
from outrider.backends.torch.kernels import beside
from outrider.cache.pool import Pool, kv_dtype
from outrider.checkpoints.heads import Head
from outrider.core.limits import check_attention
from outrider.core.step_input import StepInput
from outrider.errors import ModelError, first_line
from outrider.heads.reader import Reader
from outrider.models.base import Model
from outrider.models.decoder import rotations


@dataclass(frozen=True)
class Sizes:
    """Of a block, by its tensors; the config only says what these cannot."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @staticmethod
    def of(head: Head, at: str, hidden: int) -> Sizes:
        """at: what the names of the block begin with, such as "layers.0".  Raises ModelError where the heads do not divide."""
        config, q, kv = (
            head.config,
            head.shape(f"{at}.self_attn.q_proj.weight")[0],
            head.shape(f"{at}.self_attn.k_proj.weight")[0],
        )
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

    def pool(self, layers: int, slots: int, model: Model) -> Pool:
        return Pool(
            layers,
            self.kv_heads,
            self.head_dim,
            slots,
            kv_dtype(model.kv_cache_dtype, model.dtype),
            model.kernels.device,
        )

    def slot_bytes(self, layers: int, model: Model) -> int:
        return Pool.bytes_per_slot(
            layers, self.kv_heads, self.head_dim, kv_dtype(model.kv_cache_dtype, model.dtype)
        )


def turn_of(config: Mapping[str, Any], sizes: Sizes, positions: int) -> Tensor:
    """cos and sin as `rope_store` wants them, [positions, head_dim].  A head has its own theta: 10000 unless its config says another."""
    from transformers import LlamaConfig

    known = {
        key: config[key]
        for key in ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
        if config.get(key)
    }
    try:
        made = LlamaConfig(
            hidden_size=sizes.heads * sizes.head_dim, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim, **known,
        )  # fmt: skip
    except Exception as error:  # transformers validates, and raises errors of several kinds
        raise ModelError(
            f"the rope of a head ({', '.join(known)}) cannot be computed: {first_line(error)}"
        ) from error
    return rotations(made, positions, 32)


class Block:
    """x += o(attend(qkv(u)));  x += down(silu(gate) * up)(norm(x)).  u is norm_in(x), x itself where it has no norm_in, or something
    wider that it is given.  window: of its attention, in tokens, 0 for all."""

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
        """inputs: width of u.  Raises ModelError for a config whose layers have another activation."""
        act = reader.head.config.get("hidden_act") or reader.head.config.get("hidden_activation") or "silu"
        if act not in ("silu", "swish"):
            raise ModelError(
                f"{reader.head.name!r} has hidden_act {act!r}; the layers of heads are supported with 'silu' only."
            )
        self.kernels: Kernels = reader.kernels
        self.heads, self.kv_heads, self.head_dim, self.eps = (
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.eps,
        )
        self.turn, self.window = turn.to(self.kernels.device), window
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        normed = f"{at}.self_attn.q_norm.weight" in reader.head
        self.q_norm = reader.vector(f"{at}.self_attn.q_norm.weight", sizes.head_dim) if normed else None
        self.k_norm = reader.vector(f"{at}.self_attn.k_norm.weight", sizes.head_dim) if normed else None
        self.qkv = reader.fused(
            [(f"{at}.self_attn.{name}_proj", size) for name, size in (("q", q), ("k", kv), ("v", kv))], inputs
        )
        self.o = reader.linear(f"{at}.self_attn.o_proj", sizes.hidden, q)
        self.norm_post = reader.vector(f"{at}.post_attention_layernorm.weight", sizes.hidden)
        self.gate_up = reader.fused(
            [(f"{at}.mlp.{name}_proj", sizes.inner) for name in ("gate", "up")], sizes.hidden
        )
        self.down = reader.linear(f"{at}.mlp.down_proj", sizes.hidden, sizes.inner)
        self.hidden, self.inner, self.norm_in = sizes.hidden, sizes.inner, norm_in
        layer: Any = self  # as `run` takes one
        self.stack = self.kernels.prepare(layer, [layer], self.turn)

    def __call__(
        self, x: Tensor, step_input: StepInput, pool: Pool, at: int = 0, u: Tensor | None = None
    ) -> Tensor:
        """x [n, hidden] (which it changes and returns) for the rows of the plan, u [n, inputs]; K/V goes to layer `at`."""
        return self.kernels.run(
            self.stack, x, step_input, pool, u=x if u is None and self.norm_in is None else u, layer=at
        )


class Pairs:
    """[norm(e(token)); norm(state)], what a head that recurs begins with; a norm that is None is none."""

    def __init__(
        self,
        model: Model,
        norm_token: Tensor | None,
        norm_state: Tensor | None,
        eps: float,
        embedding: Weight | None = None,
    ) -> None:
        """embedding: the head's own; the target's unless given."""
        self.model, self.kernels, self.embedding = (
            model,
            model.kernels,
            model.embedding if embedding is None else embedding,
        )
        self.norms = norm_token, norm_state, eps

    def __call__(self, step_input: StepInput, g: Tensor) -> Tensor:
        """[n, 2h] of the plan's tokens and the states g [n, h]."""
        if self.embedding is None:
            return beside(
                self.kernels,
                self.model.embed(step_input.host[: step_input.length]).to(g.dtype),
                g,
                *self.norms,
            )
        return self.kernels.pair(self.embedding, step_input, g, *self.norms)
