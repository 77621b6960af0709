"""Plain configs of the lean decoder's families, read without transformers, whose import takes seconds.

A config is plain if it states every size, scales no rotation, and has no unknown key.  transformers reads all
others, and gives the same values for these.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

# model type -> class of the whole model
TYPES = {name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
STATED = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "eos_token_id",
}  # fmt: skip
OWN = {"mistral": {"sliding_window"}, "qwen3": {"head_dim"}}  # stated by plain configs of one type
KNOWN = STATED | {
    "head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype",
    "bos_token_id", "pad_token_id", "initializer_range", "attention_bias", "attention_dropout", "mlp_bias",
    "pretraining_tp", "use_cache", "transformers_version", "pard_token", "spd_type",
}  # fmt: skip
DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = {"full_attention", "sliding_attention"}
THETA = 10000.0  # where no config names another


class PlainConfig(SimpleNamespace):
    """The attributes that are read of a transformers config."""

    def get_text_config(self) -> PlainConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def plain_config(settings: Mapping[str, Any]) -> PlainConfig | None:
    """The config in the keys of a config.json, whose values were checked; None if it is not plain."""
    kind, rope = settings.get("model_type"), plain_rope(settings)
    if kind not in TYPES or rope is None or not STATED | OWN.get(kind, set()) <= settings.keys() <= KNOWN:
        return None
    windows = _windows(kind, settings)
    if settings["architectures"] != [TYPES[kind]] or windows is None or not _complete(kind, settings):
        return None
    dtypes = settings.get("dtype"), settings.get("torch_dtype")
    if not {*dtypes} <= DTYPES.keys():
        return None
    own = {"rope_parameters": rope, "dtype": DTYPES[dtypes[0] or dtypes[1]], **windows}
    return PlainConfig(**{"tie_word_embeddings": False, **settings, **own})


def _complete(kind: str, settings: Mapping[str, Any]) -> bool:
    """Whether no needed value is null, and every head has as many dimensions."""
    needed = STATED - {"eos_token_id"} | {"tie_word_embeddings"} | OWN.get(kind, set()) - {"sliding_window"}
    heads = settings["num_attention_heads"]
    if any(settings.get(key, False) is None for key in needed) or not isinstance(heads, int):
        return False
    return bool(settings["hidden_size"] % heads == 0)


def _windows(kind: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """sliding_window and layer_types; None if another key, or transformers alone, says which layers slide."""
    types, window = settings.get("layer_types"), settings.get("sliding_window")
    if types is not None and (not types or not {*types} <= LAYER_TYPES):
        return None
    if kind == "llama":  # transformers' Llama ignores the key
        window = None
    elif kind == "mistral":
        if types is not None:  # which transformers reads as ministral
            return None
    elif not settings.get("use_sliding_window"):
        window = None
    elif types is None and window is not None:  # max_window_layers says which slide
        return None
    return {"sliding_window": window, "layer_types": types}


def plain_rope(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """rope_parameters without a scaling; None if there is one, or one set for each kind of layer."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" or not rope.keys() <= {"rope_type", "type", "rope_theta"}:
        return None
    theta = rope.get("rope_theta") or settings.get("rope_theta") or THETA
    return {"rope_type": "default", "rope_theta": theta}
