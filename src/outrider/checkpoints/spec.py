"""Sizes and flags of a model from its config: `Facts` of any model, `Spec` for the lean decoder.

An unsupported model raises a ModelError with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.checkpoints.context import Context
from outrider.checkpoints.delta_rule import RECURRENT, DeltaRule
from outrider.checkpoints.fields import (
    EPSILON,
    HEAD_COUNT,
    LAYER_COUNT,
    LENGTH,
    SHARE,
    VOCABULARY,
    WIDTH,
    WINDOW,
)
from outrider.checkpoints.plain_config import TYPES
from outrider.checkpoints.variant import HYBRIDS, LLAMA, DecoderVariant
from outrider.core.limits import MAX_EXPERTS, MAX_HEAD_DIM, check_attention
from outrider.core.validate import Kind, whole
from outrider.errors import ModelError

FAMILIES = {
    "LlamaForCausalLM": "Llama 1-3.x and its many children",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "MiMoForCausalLM": "MiMo-7B",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "MixtralForCausalLM": "Mixtral",
    "GptOssForCausalLM": "gpt-oss",
    "GemmaForCausalLM": "Gemma 1",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 with experts",
}
HYBRID_FAMILIES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# that take adapters, and whose layers can be skipped or be on several devices
ATTENTION_ONLY = tuple(name for name in FAMILIES if name not in HYBRID_FAMILIES)
# that are trained
DENSE = tuple(
    name
    for name in ATTENTION_ONLY
    if name not in ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM")
)
# Others differ in what a block computes: see Spec.like_llama.
LIKE_LLAMA = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MiMoForCausalLM",
)
# whose queries and keys of every head are normalized
QK_NORMED = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    *HYBRID_FAMILIES,
)
SAME_DECODER: dict[str, tuple[str, dict[str, str]]] = {
    "mimo": ("qwen2", {}),
    "stablelm_epoch": ("stablelm", {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}),
}  # model types unknown to transformers -> the known one with the same decoder, and its names of some keys
BY_TYPE = ("MedusaModel", "StableLMEpoch")  # class name prefixes for which the model_type decides
# Prefixes of the model types without attention, or with recurrences for which there are no kernels.
STATEFUL = ("mamba", "rwkv", "recurrent_gemma", "recurrentgemma", "xlstm", "falcon_mamba", "zaya")
LAYER_TYPES = {
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "mlp",
    "moe",
}  # fmt: skip
HYBRID_LAYER_TYPES = {"full_attention", RECURRENT}  # of the model types in HYBRIDS
WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")  # model types
GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # by tanh
INNER = whole(1, 1 << 24)
EXPERT_COUNT = whole(1, MAX_EXPERTS)


@dataclass(frozen=True)
class Facts:
    """Sizes of any model.

    context: maximum tokens of a request
    unscaled: the default maximum, smaller where RoPE scaling depends on the length of a text (context.py)
    kv_heads, head_dim: as in the config; the fallback takes them from the tensors
    """

    architecture: str
    layers: int
    hidden: int
    vocabulary: int
    context: int
    unscaled: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> Facts:
        """Facts from a transformers config; a `Spec` if the lean decoder supports the model.

        Raises ModelError for an unsupported model.
        """
        refuse(config)
        name, length = architecture(config), Context.of(config)
        LENGTH.check(
            length.tokens, f"the context of {name} (max_position_embeddings and rope_parameters)", ModelError
        )
        layers, hidden = _size(config, "num_hidden_layers", LAYER_COUNT), _size(config, "hidden_size", WIDTH)
        vocabulary, (kv_heads, head_dim) = _size(config, "vocab_size", VOCABULARY), _heads(config)
        facts = Facts(name, layers, hidden, vocabulary, length.tokens, length.unscaled, kv_heads, head_dim)
        return Spec.extending(facts, config) if lean(config) else facts


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: a router chooses `chosen` of `count` MLPs for every row.

    inner: width of each.  layers[i]: whether layer i has them, in place of one MLP.
    normalized: whether the weights of a row's experts sum to 1, rather than those of all
    shared: width of an MLP that every row has beside its experts, times the sigmoid of a gate; 0: none
    """

    count: int
    chosen: int
    inner: int
    normalized: bool
    layers: tuple[bool, ...]
    shared: int = 0

    @staticmethod
    def of(config: Any, layers: int, fixed: bool) -> Experts | None:
        """None for a model without experts; the keys mean nothing in other families.

        fixed: `DecoderVariant.fixed_routing`
        """
        is_hybrid = config.model_type in HYBRIDS
        key = "num_experts" if is_hybrid else "num_local_experts"
        if config.model_type not in WITH_EXPERTS or not getattr(config, key, None):
            return None
        count = _size(config, key, EXPERT_COUNT)
        chosen = _size(config, "num_experts_per_tok", whole(1, count))
        if config.model_type in ("mixtral", "gpt_oss"):
            return Experts(count, chosen, _size(config, "intermediate_size", INNER), True, (True,) * layers)
        inner = _size(config, "moe_intermediate_size", INNER)
        shared = _size(config, "shared_expert_intermediate_size", INNER) if is_hybrid else 0
        if fixed:
            return Experts(count, chosen, inner, True, (True,) * layers, shared)
        step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", ()) or ()
        sparse = (i not in dense and (i + 1) % step == 0 for i in range(layers))
        normalized = bool(getattr(config, "norm_topk_prob", True))
        return Experts(count, chosen, inner, normalized, tuple(sparse), shared)


@dataclass(frozen=True)
class Spec(Facts):
    """Sizes and flags for the lean decoder.

    windows[i]: sliding window of layer i in tokens, 0 for full attention.
    experts: of the layers that have them; `inner` is the width of other MLPs
    rotated: dimensions of a head that are rotated, 0: all
    recurrent: of the layers without attention
    """

    inner: int
    heads: int
    eps: float
    windows: tuple[int, ...]
    qk_norm: bool
    tied: bool
    experts: Experts | None = None
    variant: DecoderVariant = LLAMA
    rotated: int = 0
    recurrent: DeltaRule | None = None

    @property
    def like_llama(self) -> bool:
        """Whether its blocks and ends are Llama's: without experts, and without a `DecoderVariant`."""
        plain = not self.rotated and self.recurrent is None
        return plain and self.experts is None and self.variant == LLAMA

    @staticmethod
    def extending(facts: Facts, config: Any) -> Spec:
        """The spec of a model with these facts."""
        name, heads = facts.architecture, _size(config, "num_attention_heads", HEAD_COUNT)
        rotated = _rotated(config, facts.head_dim)
        check_attention(name, heads, facts.kv_heads, facts.head_dim, rotated or facts.head_dim)
        window = 0 if config.model_type == "llama" else getattr(config, "sliding_window", None) or 0
        WINDOW.check(window, f"sliding_window of {name}", ModelError)
        default = "sliding_attention" if window else "full_attention"
        kinds = getattr(config, "layer_types", None) or [default] * facts.layers
        if len(kinds) != facts.layers:
            raise ModelError(
                f"{name} has {facts.layers} layers (num_hidden_layers), and layer_types lists {len(kinds)}."
            )
        variant = DecoderVariant.of(config, kinds)
        experts = Experts.of(config, facts.layers, variant.fixed_routing)
        return Spec(
            **vars(facts),
            inner=_inner(config, experts),
            heads=heads,
            eps=_size(config, "rms_norm_eps", EPSILON),
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
            qk_norm=name in QK_NORMED,
            tied=bool(config.tie_word_embeddings),
            experts=experts,
            variant=variant,
            rotated=rotated,
            recurrent=DeltaRule.of(name, config, kinds),
        )


def largest(config: Any, key: str) -> Any:
    """The value of a key, None without it; the largest one of a config whose layers differ in it."""
    if getattr(config, "is_heterogeneous", False):
        values = [getattr(layer, key, None) for layer in config.per_layer_config]
    else:
        found = getattr(config, key, None)
        values = found if isinstance(found, list) else [found]
    return max((value for value in values if value is not None), default=None)


def _size(config: Any, key: str, kind: Kind) -> Any:
    """A size that every config has.  Raises ModelError if it is missing or not of this kind."""
    value = largest(config, key)
    kind.check(value, f"{key} of {architecture(config)}", ModelError)
    return value


def _inner(config: Any, experts: Experts | None) -> int:
    """The width of MLPs without experts; some configs of models that have experts in all layers lack it."""
    if experts is not None and all(experts.layers) and not hasattr(config, "intermediate_size"):
        return experts.shared or experts.inner
    width: int = _size(config, "intermediate_size", INNER)
    return width


def _rotated(config: Any, head_dim: int) -> int:
    """`Spec.rotated`.  The key means nothing in other families."""
    if config.model_type not in HYBRIDS:
        return 0
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    SHARE.check(share, f"partial_rotary_factor of {architecture(config)}", ModelError)
    rotated = int(head_dim * share)
    if rotated < 1:
        raise ModelError(f"partial_rotary_factor of {architecture(config)} leaves no dimension to rotate.")
    return rotated % head_dim


def _heads(config: Any) -> tuple[int, int]:
    """(K/V heads, dimensions of a head)."""
    heads = _size(config, "num_attention_heads", HEAD_COUNT)
    width = largest(config, "qk_head_dim") or largest(config, "head_dim") or config.hidden_size // heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1, width
    kv_heads = largest(config, "num_key_value_heads") or largest(config, "num_kv_heads") or heads
    HEAD_COUNT.check(kv_heads, f"num_key_value_heads of {architecture(config)}", ModelError)
    return kv_heads, width


def architecture(config: Any) -> str:
    """The model class of a config, by its `model_type` as in transformers.

    `architectures` may be missing or differ in case.  It may also name the body without its head, or the
    Medusa model around it.
    Names of other tasks and of heads without a target are returned unchanged.
    """
    names, known = getattr(config, "architectures", None) or [], causal(config)
    given = names[0] if names else None
    if not known or given in known or given in FAMILIES:
        return given or f"model_type {getattr(config, 'model_type', '?')!r}"
    others = [name.lower() for name in (*known, *_bodies(config))]
    if given is None or given.lower() in others or given.startswith(BY_TYPE):
        return known[0]
    return str(given)


def lean(config: Any) -> bool:
    """Whether the lean decoder supports this model; otherwise the fallback runs transformers' own code."""
    heads = _size(config, "num_attention_heads", HEAD_COUNT)
    width = largest(config, "head_dim") or _size(config, "hidden_size", WIDTH) // heads
    name = architecture(config)
    if name not in FAMILIES or width > MAX_HEAD_DIM:
        return False
    if not config.model_type.startswith("gemma"):
        return bool(getattr(config, "hidden_act", "silu") == "silu")
    act = config.hidden_act if config.model_type == "gemma" else config.hidden_activation
    return act in GELU and not getattr(config, "use_bidirectional_attention", False)


def refuse(config: Any) -> None:
    """Raise ModelError with the reason for a model that is not supported."""
    name, kind = architecture(config), getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; Outrider runs decoder-only language models.")
    if kind.startswith(STATEFUL):
        raise ModelError(
            f"{name} keeps a recurrent state of a kind that is not supported: Outrider runs hybrids of "
            "attention with gated delta rules, Mamba or short convolutions."
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if unsupported := kinds - LAYER_TYPES:
        raise ModelError(
            f"{name} has layers of the kind {', '.join(sorted(unsupported))}: Outrider verifies trees in "
            "full, sliding-window and chunked attention and in recurrent layers."
        )
    if kind in HYBRIDS and (unsupported := kinds - HYBRID_LAYER_TYPES):
        raise ModelError(
            f"{name} has layers of the kind {', '.join(sorted(unsupported))} (layer_types): this family has "
            f"{' and '.join(sorted(HYBRID_LAYER_TYPES))} only."
        )
    if name not in FAMILIES and name not in causal(config):
        raise ModelError(
            f"{name} is not supported: Outrider runs causal language models, and for model_type {kind!r} "
            f"transformers has {' or '.join(causal(config)) or 'none'}."
        )


def listed(families: Sequence[str], refused: str) -> str:
    """Families for an error, but for the refused one: of that one the reason is in the rest of the error."""
    return ", ".join(name for name in families if name != refused)


def causal(config: Any) -> list[str]:
    """Causal language model classes for this config: of transformers, and of the checkpoint's own code."""
    kind = getattr(config, "model_type", "?")
    if (own := TYPES.get(kind)) is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    custom = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    return [name for name in (own, custom and custom.split(".")[-1]) if name]


def _bodies(config: Any) -> tuple[str, ...]:
    """The classes of the model without its head."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = MODEL_MAPPING_NAMES.get(getattr(config, "model_type", "?"), ())
    return (found,) if isinstance(found, str) else tuple(found)
