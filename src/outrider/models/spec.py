"""What the lean decoder must know of a model, read from its config; a model that it cannot run is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError

FAMILIES = {
    "LlamaForCausalLM": "Llama 1-3.x and its many children",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
}
STATEFUL = ("mamba", "rwkv", "jamba", "recurrentgemma", "xlstm", "zamba", "falcon_h1", "bamba", "nemotron_h")


@dataclass(frozen=True)
class Spec:
    """Sizes and flags.  windows[i] is the sliding window of layer i in tokens, 0 for full attention."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    windows: tuple[int, ...]
    qk_norm: bool
    tied: bool
    context: int

    @staticmethod
    def of(config: Any) -> Spec:
        """`config` is a transformers config.  Raises ModelError where the lean decoder would compute something else."""
        refuse(config)
        heads = config.num_attention_heads
        layers = config.num_hidden_layers
        window = getattr(config, "sliding_window", None) or 0
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
        architecture = config.architectures[0]
        return Spec(
            architecture=architecture,
            layers=layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied=bool(config.tie_word_embeddings),
            context=config.max_position_embeddings,
        )


def refuse(config: Any) -> None:
    """Raises ModelError with the reason for every model that cannot run here."""
    kind = getattr(config, "model_type", "?")
    names = getattr(config, "architectures", None) or []
    name = names[0] if names else f"model_type {kind!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; Outrider runs decoder-only language models.")
    if any(kind.startswith(prefix) for prefix in STATEFUL):
        raise ModelError(f"{name} keeps a recurrent state instead of K/V (a state-space model), which cannot be verified as a tree.")
    if name not in FAMILIES:
        raise ModelError(f"{name} is not supported.  Supported: {', '.join(FAMILIES)}.")
    if (act := getattr(config, "hidden_act", "silu")) != "silu":
        raise ModelError(f"{name} with hidden_act {act!r} is not supported: the lean decoder computes silu.")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width > 512:
        raise ModelError(f"{name} has heads of {width} dimensions; the kernels take at most 512.")
