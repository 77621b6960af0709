"""Attention of transformers' modelling code on our cache and kernels.

    modelling code -> transformers' attention interface -> attend -> K/V into the pool, attention over
    StepInput's rows

A forward runs inside `intercepting(call)`.  Without a pool the call is a dry run: `attend` records the
layers it is called by and returns zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.backends.base import Backend, LayerKV, ScoreModifier, Scores
from outrider.cache.pool import Pool
from outrider.core.limits import check_attention
from outrider.core.step_input import StepInput
from outrider.errors import ModelError
from outrider.models.fallback.recurrent import RecurrentCall

# Names of our attention implementations.  With the second one transformers also asks for masks.
ATTENTION, RECORDING = "outrider", "outrider-listening"
# Tensors that layers hand to their attention and that change nothing in it.
IGNORED_TENSORS = {"position_ids", "cache_position", "position_embeddings", "attention_mask", "cos", "sin"}


@dataclass
class AttentionLayer:
    """Shape and settings of one attention layer, as the kernels take them.

    head_dim: of keys and values, the narrower one is padded with zeros.  out_dim: of the values.
    query_scales [positions]: factors of the queries by position.
    wide_keys: one dimension of K is far larger than the others, and int8 would round the others to nothing.
    """

    heads: int
    kv_heads: int
    head_dim: int
    out_dim: int
    scores: Scores
    module: nn.Module
    query_scales: Tensor | None = None
    wide_keys: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass
class ForwardCall:
    """One forward of the model.  rope: [positions, 0], as the modelling code applies RoPE itself.

    mixers: in a dry run, receives the modules that run attention or recurrences, in order
    """

    backend: Backend
    step_input: StepInput
    layers: list[AttentionLayer]
    rope: Tensor
    pool: Pool | None = None
    next_layer: int = 0
    recurrent: RecurrentCall | None = None
    mixers: list[nn.Module] = field(default_factory=list)


_CALL: ContextVar[ForwardCall] = ContextVar("call")


@contextmanager
def intercepting(call: ForwardCall) -> Iterator[None]:
    """Send attention in this thread to `call`, within the context."""
    before = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(before)


def is_intercepting() -> bool:
    return _CALL.get(None) is not None


def recurrent_call(module: nn.Module) -> RecurrentCall | None:
    """The call to which the recurrences of a module belong; None outside of `intercepting`."""
    call = _CALL.get(None)
    if call is None:
        return None
    if call.pool is None:
        call.mixers.append(module)
    return call.recurrent


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1,H,n,D], k and v [1,kv_heads,n,D] -> [1,n,H,D]."""
    call = _CALL.get()
    if call.pool is None:
        given = AttentionSettings.of(type(module).__name__, settings)
        call.mixers.append(module)
        call.layers.append(_layer_of(module, query, key, value, attention_mask, given))
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return torch.zeros(shape, dtype=query.dtype, device=query.device), None
    index = call.next_layer
    layer = call.layers[index]
    call.next_layer += 1
    if layer.query_scales is not None:
        query = query * layer.query_scales[call.step_input.on(query.device).positions, None]
    repeats = layer.kv_heads // key.shape[1]  # above 1 in a layer with fewer K/V heads than the pool
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    rows = torch.cat([_pad_heads(x, layer.head_dim) for x in (query, key, value)], dim=1).flatten(1)
    kv = LayerKV(call.step_input, call.pool, index)
    q = call.backend.rope_store(rows, layer, call.rope, kv)
    out = call.backend.attend(q, layer, kv, layer.scores)
    return out.view(1, len(rows), layer.heads, layer.head_dim)[..., : layer.out_dim], None


def _pad_heads(x: Tensor, head_dim: int) -> Tensor:
    """[1,H,n,D] -> [n,H,head_dim], padded with zeros."""
    padded = x if x.shape[3] == head_dim else F.pad(x, (0, head_dim - x.shape[3]))
    return padded[0].transpose(0, 1)


@dataclass(frozen=True)
class AttentionSettings:
    """Keyword arguments of an attention call that change its result.

    s_aux: attention sinks.  slopes, window, wide_keys: of our patches only (patches.py)
    """

    scaling: float | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    slopes: Tensor | None = None
    window: int | None = None
    wide_keys: bool = False

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> AttentionSettings:
        """Raise ModelError for a tensor of unknown meaning.  name: of the module, in errors."""
        own = {part.name: given[part.name] for part in fields(cls) if part.name in given}
        others = given.keys() - own.keys() - IGNORED_TENSORS
        if unknown := sorted(key for key in others if isinstance(given[key], Tensor)):
            raise ModelError(
                f"{name} gives its attention {', '.join(unknown)}, which Outrider does not know."
            )
        return cls(**own)

    @property
    def modifier(self) -> ScoreModifier | None:
        """What changes the scores beside their scale; None for nothing."""
        slopes = None if self.slopes is None else self.slopes.detach().float().contiguous()
        sinks = None if self.s_aux is None else self.s_aux.detach().float().contiguous()
        found = ScoreModifier(self.softcap or 0.0, slopes, sinks)
        return None if found == ScoreModifier() else found


def _layer_of(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: AttentionSettings
) -> AttentionLayer:
    """The layer of one attention call.  The window comes from the mask, as in transformers' own attention.

    Raises ModelError for a mask that the kernels do not apply.
    """
    if mask is not None and mask.dtype != torch.int32:
        name = type(module).__name__
        raise ModelError(f"{name} makes an attention mask of its own, which cannot be applied to a tree.")
    scale = q.shape[3] ** -0.5 if settings.scaling is None else settings.scaling
    window = settings.window or 0 if mask is None else int(mask)
    return AttentionLayer(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=max(k.shape[3], v.shape[3]),
        out_dim=v.shape[3],
        scores=Scores(scale, window, settings.modifier),
        module=module,
        query_scales=getattr(module, "query_scales", None),
        wide_keys=settings.wide_keys,
    )


def _window_mask(
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = None,
    mask_function: Any = None,
    **_: Any,
) -> Tensor | None:
    """Instead of a mask: None for full attention, or the window as int32 [1,1,1,1], negative for chunks."""
    if use_vmap:
        raise ModelError(
            "this model overlays its causal mask with another, which cannot be applied to a tree."
        )
    if local_size is None:
        return None
    # Of the keys before row `local_size`, a sliding window includes the last one; a chunk begins at the row
    # itself.
    row, key = torch.tensor(local_size), torch.tensor(local_size - 1)
    chunked = mask_function is not None and local_size > 1 and not mask_function(0, 0, row, key)
    return torch.full((1, 1, 1, 1), -local_size if chunked else local_size, dtype=torch.int32, device=device)


def unify(layers: list[AttentionLayer]) -> None:
    """Give all layers the shape of the pool: heads padded with zeros, K/V heads repeated."""
    kv_heads, head_dim = max(layer.kv_heads for layer in layers), max(layer.head_dim for layer in layers)
    for layer in layers:
        check_attention(type(layer.module).__name__, layer.heads, layer.kv_heads, head_dim)
        if kv_heads % layer.kv_heads or layer.heads % kv_heads:
            raise ModelError(
                f"its layers have {layer.kv_heads} and {kv_heads} K/V heads, which do not fit into one pool."
            )
        layer.kv_heads, layer.head_dim = kv_heads, head_dim


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(RECORDING, attend)
AttentionMaskInterface.register(RECORDING, _window_mask)
