"""The transformers config of a GGUF file, from its metadata."""

from __future__ import annotations

import math
from typing import Any

from outrider.checkpoints.fields import CONFIG
from outrider.checkpoints.gguf import blocks
from outrider.checkpoints.gguf.delta_rule import delta_settings
from outrider.checkpoints.gguf.file import GgufFile
from outrider.checkpoints.gguf.names import HYBRIDS, ROPE_FACTORS, family_of
from outrider.checkpoints.validate import check
from outrider.core.quantized import QuantizedWeight
from outrider.core.validate import whole
from outrider.errors import ModelError

# Layers of the models whose attention scores llama.cpp scales by hidden_size / heads, as their configs say.
# GGUF has no key for it.
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
WITH_EXPERTS = ("llama", "qwen3moe", "gpt-oss", "qwen35moe", "qwen3next")
TEXT_CONFIGS = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")  # families whose other config has images
GEMMA2_WINDOW = 4096  # llama.cpp's default
EMBEDDING = "model.embed_tokens.weight"


def read_config(file: GgufFile) -> Any:
    """A transformers config.  Raises ModelError for an unsupported architecture and for corrupt metadata."""
    import transformers

    family = family_of(file.architecture, file.path)
    if file.architecture == "llama" and file.integer("expert_count", 0):
        family = "Mixtral"  # the only Llama with experts
    settings = _settings(file, family)
    if file.architecture in WITH_EXPERTS:
        settings |= _expert_settings(file)
    if file.architecture in HYBRIDS:
        settings |= delta_settings(file, settings["num_hidden_layers"])
    if file.architecture in SCALED_BY_WIDTH:
        settings |= _gemma_settings(file, settings)
    check(settings, CONFIG, file.path)
    try:
        kind = f"{family}Text" if family in TEXT_CONFIGS else family
        config = getattr(transformers, f"{kind}Config")(**settings)
    except Exception as error:  # transformers raises errors of several kinds
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(
            f"{file.path} is corrupt: its metadata do not describe a {family} model: {reason}"
        ) from error
    window = file.integer("attention.sliding_window", 0)
    if window and "sliding_window" not in settings:
        config.sliding_window = window
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return config


def _settings(file: GgufFile, family: str) -> dict[str, Any]:
    """Arguments of the config's class."""
    if EMBEDDING not in file.tensors:
        raise ModelError(
            f"{file.path} has no tensor 'token_embd.weight': it is not a complete language model."
        )
    heads, hidden = file.integer("attention.head_count"), file.integer("embedding_length")
    context = file.integer("context_length")
    layers = file.integer("block_count") - file.integer("nextn_predict_layers", 0)
    if f"model.layers.{layers}.input_layernorm.weight" in file.tensors:
        raise ModelError(f"{file.path} is corrupt: it has more layers than block_count {layers}.")
    head_dim = _head_dim(file, heads, hidden)
    dense = all(entry.ggml_type == "F32" for entry in file.tensors.values())
    return {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.integer("feed_forward_length", _inner_of_experts(file)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, context, _rotated(file, head_dim)) | _share(file, head_dim),
        "dtype": "float32" if dense else "bfloat16",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _inner_of_experts(file: GgufFile) -> int | None:
    """Width of a model whose layers all have experts, where no other is named."""
    return file.integer("expert_feed_forward_length", 0) or None


def _expert_settings(file: GgufFile) -> dict[str, Any]:
    """Settings of a mixture of experts; none for a model without."""
    is_hybrid = file.architecture in HYBRIDS
    if not (count := file.integer("expert_count", 0)):
        return {"num_experts": 0} if is_hybrid else {}
    settings = {"num_local_experts": count, "num_experts_per_tok": file.integer("expert_used_count")}
    if file.architecture == "llama":
        return settings
    inner = file.integer("expert_feed_forward_length")
    if file.architecture == "gpt-oss":
        window = file.integer("attention.sliding_window")
        return settings | {"intermediate_size": inner, "sliding_window": window}
    if is_hybrid:
        shared = file.integer("expert_shared_feed_forward_length")
        settings |= {"num_experts": count, "shared_expert_intermediate_size": shared}
    # llama.cpp normalizes the weights of every model with this architecture
    return settings | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _gemma_settings(file: GgufFile, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of Gemma 2 and 3; which layers slide follows from the number of the layer."""
    head_dim, layers = settings["head_dim"], settings["num_hidden_layers"]
    by_width = layers == SCALED_BY_WIDTH[file.architecture]
    scalar = settings["hidden_size"] // settings["num_attention_heads"] if by_width else head_dim
    default_window = GEMMA2_WINDOW if file.architecture == "gemma2" else None
    window = file.integer("attention.sliding_window", default_window)
    own = {"query_pre_attn_scalar": scalar, "sliding_window": window}
    if file.architecture == "gemma2":
        caps = (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
        return own | {key: file.number(key, default) for key, default in caps}
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    return own | {"rope_parameters": ropes}


def _head_dim(file: GgufFile, heads: int, hidden: int) -> int:
    """Dimensions of a head: equal for keys and values, and in most families for RoPE, or a ModelError."""
    if not heads:
        raise ModelError(f"{file.path} is corrupt: attention.head_count is 0.")
    head_dim = file.integer("attention.key_length", hidden // heads)
    rotated = () if file.architecture in HYBRIDS else ("rope.dimension_count",)
    for key in ("attention.value_length", *rotated):
        if (other := file.integer(key, head_dim)) != head_dim:
            raise ModelError(
                f"{file.path}: {key} {other} differs from the {head_dim} dimensions of a head, which is not "
                "supported."
            )
    return head_dim


def _rotated(file: GgufFile, head_dim: int) -> int:
    """Dimensions of a head that are rotated."""
    rotated = file.integer("rope.dimension_count", head_dim)
    whole(1, head_dim).check(rotated, f"{file.path}: rope.dimension_count", ModelError)
    return rotated


def _share(file: GgufFile, head_dim: int) -> dict[str, float]:
    """The part of a head that is rotated, in families that do not rotate all of it."""
    if file.architecture not in HYBRIDS:
        return {}
    rotated = _rotated(file, head_dim)
    share = rotated / head_dim
    # transformers rounds the product down
    return {"partial_rotary_factor": share if int(head_dim * share) == rotated else math.nextafter(share, 1)}


def _rope_parameters(file: GgufFile, context: int, rotated: int) -> dict[str, Any]:
    """RoPE settings in transformers' terms; longrope for a factor per frequency (Llama 3)."""
    scaling = str(file.metadata.get(f"{file.architecture}.rope.scaling.type", "linear"))
    per_frequency = ROPE_FACTORS in file.tensors
    if scaling not in ("none", "linear", "yarn") or (scaling == "yarn" and per_frequency):
        together = f" with {ROPE_FACTORS}" if scaling == "yarn" else ""
        raise ModelError(f"{file.path}: rope.scaling.type {scaling!r} is not supported{together}.")
    stored = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0))
    factor = 1.0 if scaling == "none" else stored or 1.0
    rope: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", 10000.0)}
    if per_frequency:
        return rope | _longrope(file, context, rotated, factor)
    if scaling == "yarn":
        return rope | _yarn(file, context, factor)
    return rope | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor})


def _longrope(file: GgufFile, context: int, rotated: int, factor: float) -> dict[str, Any]:
    entry = file.tensors[ROPE_FACTORS]
    factors = blocks.unpack(entry.ggml_type, entry.rows, entry.block_bytes)
    if entry.shape != (rotated // 2,) or isinstance(factors, QuantizedWeight):
        raise ModelError(
            f"{file.path} is corrupt: {ROPE_FACTORS} is {entry.ggml_type} {entry.shape}, not F32 "
            f"{(rotated // 2,)}."
        )
    scaled = (factors.flatten().float() * factor).tolist()
    given = {"short_factor": scaled, "long_factor": scaled, "factor": 1.0, "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": context, **given}


def _yarn(file: GgufFile, context: int, factor: float) -> dict[str, Any]:
    original = file.integer("rope.scaling.original_context_length", context)
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = original
    names = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    for key, name in names.items():
        if f"{file.architecture}.rope.scaling.yarn_{key}" in file.metadata:
            rope[name] = file.number(f"rope.scaling.yarn_{key}")
    if file.architecture == "gpt-oss":
        rope["truncate"] = False  # as its config.json says; GGUF has no key for it
    return rope
