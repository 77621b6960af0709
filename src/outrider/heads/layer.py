"""Transformer blocks of heads on the target's kernels, and their inputs: pairs of a token and a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend, LayerKV, Norms, Weight
from outrider.backends.layer import DecoderLayer
from outrider.backends.torch.backend import beside
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.checkpoints.plain_config import PlainConfig, plain_rope
from outrider.checkpoints.spec import Spec
from outrider.core.limits import check_attention
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.errors import ModelError, first_line
from outrider.heads.reader import Reader
from outrider.models.base import Model
from outrider.models.decoder import rotations
from outrider.models.layers import LayerReader, LayerSource
from outrider.models.rowwise import by_rows
from outrider.parallel.layout import Layout
from outrider.parallel.load import divide
from outrider.parallel.model import ParallelModel
from outrider.parallel.stage import ModelOptions

SKIP_MLP = 2  # of `Backend.skip_sublayers`


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
    def of(head: Head, at: str, hidden: int, mlp: bool = True) -> Sizes:
        """Sizes of the block at prefix `at`; without an MLP `inner` is 0.

        Raises ModelError for heads that do not divide.
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
        inner = head.shape(f"{at}.mlp.gate_proj.weight")[0] if mlp else 0
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


class Stack:
    """The blocks of a head, with K/V in a pool of the head's own.

    x += o(attend(qkv(u)));  x += down(silu(gate) * up)(norm(x))

    u is norm_in(x), or x itself without norm_in, or a wider input that the caller gives.
    divided: the blocks on several ranks, in place of `layers`
    """

    divided: ParallelModel | None = None
    unit_norms = False  # whether a norm multiplies with 1 + weight
    layers: list[DecoderLayer]
    packed: list[Any]

    def __init__(
        self,
        reader: Reader,
        target: Target,
        names: Sequence[str],
        width: int,
        *,
        first_inputs: int = 0,
        windows: Sequence[int] = (),
        extra_positions: int = 0,
        norm_optional: bool = False,
        mlp: bool = True,
    ) -> None:
        """names: prefixes of the blocks' names.  first_inputs: width of u of the first block, if the caller
        gives u.  windows: of each block; 0 or none: full attention.  extra_positions: after the target's
        last.  norm_optional: blocks may lack an input norm.  mlp: whether they have one.

        Raises ModelError for blocks whose K/V does not fit into one pool.
        """
        head, self.model = reader.head, target.decoder
        self.sizes = Sizes.of(head, names[0], width, mlp)
        windows = tuple(windows) or (0,) * len(names)
        specs = [_spec(head, name, width, windows, mlp) for name in names]
        for name, spec in zip(names, specs):
            if (spec.kv_heads, spec.head_dim) != (self.sizes.kv_heads, self.sizes.head_dim):
                raise ModelError(
                    f"{head.name!r}: {name} has other K/V heads than its first layer, which is not supported."
                )
        sources = list[LayerSource]()
        for name in names:
            lacks_norm = norm_optional and f"{name}.input_layernorm.weight" not in head
            sources.append(LayerSource(name, width if lacks_norm else 0))
        if first_inputs:
            sources[0] = LayerSource(names[0], first_inputs)
        rotated = int(self.sizes.head_dim * (head.config.get("partial_rotary_factor") or 1))
        rotated_sizes = replace(self.sizes, head_dim=rotated)
        table = rotary_table(head.config, rotated_sizes, target.max_len + extra_positions)
        if reader.ranks > 1:
            self._divide(reader, specs, table, sources)
        else:
            self._pack(reader, specs, table, sources)

    def _pack(
        self, reader: Reader, specs: Sequence[Spec], table: Tensor, sources: Sequence[LayerSource]
    ) -> None:
        self.backend, self.rotations = reader.backend, table.to(reader.backend.device)
        self.layers, self.packed = [], []
        for i, (spec, source) in enumerate(zip(specs, sources)):
            layers = LayerReader(reader.head, spec, torch.float32, reader.bits)
            layer = layers.layer(self.backend, i, source.prefix, source.inputs)
            self.layers.append(layer)
            packed = self.backend.pack_layers(spec, [layer], self.rotations)
            self.packed.append(packed if spec.inner else self.backend.skip_sublayers(packed, [SKIP_MLP]))

    def _divide(
        self, reader: Reader, specs: Sequence[Spec], table: Tensor, sources: Sequence[LayerSource]
    ) -> None:
        """Divide the blocks over the ranks.  Raises ModelError for blocks of several sizes."""
        if len({*specs}) > 1:
            raise ModelError(
                f"{reader.head.name!r} has layers of several sizes: leave draft_tensor_parallel_size out."
            )
        bits, layout = f"int{reader.bits}" if reader.bits else None, Layout(reader.ranks)
        precision, kind = self.model.precision._replace(quantization=bits), self.model.device.type
        options = ModelOptions(specs[0], layout, kind, precision, table, sources)
        self.divided = divide(self.model, reader.head, options)

    @property
    def eps(self) -> float:
        """Of the norms."""
        return self.sizes.eps

    @property
    def slot_bytes(self) -> int:
        """Bytes of K/V of one slot, on all ranks of this machine."""
        if self.divided is not None:
            return self.divided.footprint.total()
        dtype = self.model.precision.kv_dtype
        return Pool.bytes_per_slot(len(self.layers), self.sizes.kv_heads, self.sizes.head_dim, dtype)

    def pool(self, slots: int) -> Pool:
        if self.divided is not None:
            return self.divided.pool(slots)
        dtype, device = self.model.precision.kv_dtype, self.model.backend.device
        return Pool(len(self.layers), self.sizes.kv_heads, self.sizes.head_dim, slots, dtype, device)

    def __call__(
        self, x: Tensor, step_input: StepInput, pool: Pool, u: Tensor | None = None, only: int | None = None
    ) -> Tensor:
        """x [n, width] after all blocks, or after block `only` alone.  u: input of the first block."""
        if self.divided is not None:
            part = None if only is None else self.divided.layer_range(only, only + 1)
            return self.divided.forward(step_input, pool, part, x if u is None else torch.cat([x, u], dim=1))
        for i, (layer, packed) in enumerate(zip(self.layers, self.packed)):
            if only in (None, i):
                given = u if i == 0 else None
                if given is None and layer.norm_in is None:
                    given = x
                x = self.backend.run_layers(packed, x, LayerKV(step_input, pool, i), u=given)
        return x


def _spec(head: Head, at: str, width: int, windows: tuple[int, ...], mlp: bool) -> Spec:
    """Sizes and flags of a block, as a decoder's.  Raises ModelError for one with another activation."""
    act = head.config.get("hidden_act") or head.config.get("hidden_activation") or "silu"
    if act not in ("silu", "swish"):
        raise ModelError(
            f"{head.name!r} has hidden_act {act!r}; the layers of heads are supported with 'silu' only."
        )
    own, normed = Sizes.of(head, at, width, mlp), f"{at}.self_attn.q_norm.weight" in head
    heads = {name: value for name, value in vars(own).items() if name != "hidden"}
    return Spec(head.name, len(windows), width, 0, 0, 0, windows=windows, qk_norm=normed, tied=False, **heads)


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
