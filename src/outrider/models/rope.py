"""RoPE scaling as in transformers, with one set of frequencies for texts of every length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError


def rope_frequencies(config: Any, width: int, max_len: int, layers: str = "") -> tuple[Tensor, float]:
    """Frequencies float32 [width / 2] of heads of `width` dimensions, and the factor of cos and sin.

    layers: kind of layers whose set in rope_parameters it is, if there are several.
    Scalings that depend on the text's length are computed for `max_len` tokens.  `modeling_llama`, whose
    numbers these are, takes longer to import than all else.
    """
    rope = config.rope_parameters[layers] if layers else config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"the model's rope type {kind!r} (rope_parameters) is unknown to transformers.")
    longer = kind == "longrope" or (kind == "dynamic" and max_len > config.max_position_embeddings)
    given: dict[str, Any] = {"layer_type": layers} if layers else {}
    length = torch.tensor(max_len) if longer else None
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, **given)
    return frequencies.float(), scale


def fix_ropes(model: nn.Module, max_len: int) -> None:
    """Apply `fix_rope` to every RoPE module of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), (str, dict)):
            fix_rope(module, max_len)


def fix_rope(module: Any, max_len: int) -> None:
    """Compute a length-dependent scaling (dynamic, longrope) for `max_len` tokens, once for all calls.

    This makes the rotation of a token independent of other positions.  A module has one RoPE type, or a dict
    with one per kind of layer.
    """
    kinds, device = module.rope_type, next(module.buffers()).device
    last, x = torch.tensor([[max_len - 1]], device=device), torch.zeros(1, device=device)
    if isinstance(kinds, str):
        module(x, last)
        module.rope_type = "default"
        return
    for kind in kinds:
        module(x, last, kind)
    module.rope_type = dict.fromkeys(kinds, "default")
