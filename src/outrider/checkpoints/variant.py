"""What decoders of the families compute otherwise than Llama."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.checkpoints.fields import POSITIVE
from outrider.errors import ModelError

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # model types with gated delta rules


@dataclass(frozen=True)
class DecoderVariant:
    """What a decoder computes otherwise than Llama.

    gelu:            the gate of an MLP goes through GELU (by tanh) in place of SiLU
    unit_norms:      norms multiply with 1 + weight
    output_norms:    what attention and MLP add to the residual stream is normalized before
    embedding_scale: factor of the embeddings
    query_scalar:    attention scores are divided by its root; 0: by that of the head's dimensions
    score_cap, logit_cap: soft caps of attention scores and of logits, or 0
    ropes[i]:        key of layer i's set in rope_parameters; empty: there is one set for all
    sinks:           every head has an attention sink (`ScoreModifier`)
    query_gates:     the attention's output is multiplied with the sigmoid of a gate, which q_proj makes too
    gate_slope, gate_limit: as in `LayerExperts`
    fixed_routing:   all layers have experts whose weights sum to 1, also if config keys differ
    attention_biases, expert_biases: whether the files must have biases of q, k, v and o, and those of routers
        and experts
    """

    gelu: bool = False
    unit_norms: bool = False
    output_norms: bool = False
    embedding_scale: float = 1.0
    query_scalar: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    ropes: tuple[str, ...] = ()
    sinks: bool = False
    query_gates: bool = False
    gate_slope: float = 0.0
    gate_limit: float = 0.0
    fixed_routing: bool = False
    attention_biases: bool = False
    expert_biases: bool = False

    @staticmethod
    def of(config: Any, kinds: Sequence[str]) -> DecoderVariant:
        """kinds: of every layer, as in layer_types."""
        if config.model_type == "gpt_oss":
            # older versions of transformers have the two as constants
            slope, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
            return DecoderVariant(
                sinks=True,
                gate_slope=slope,
                gate_limit=limit,
                attention_biases=bool(getattr(config, "attention_bias", True)),
                expert_biases=True,
            )
        if config.model_type in HYBRIDS:
            # transformers' router of Qwen3.5 does not read the keys, which files may have from Qwen3-Next
            fixed = config.model_type != "qwen3_next"
            return DecoderVariant(unit_norms=True, query_gates=True, fixed_routing=fixed)
        if not config.model_type.startswith("gemma"):
            return DecoderVariant()
        scale = config.hidden_size**0.5
        if config.model_type == "gemma":
            return DecoderVariant(gelu=True, unit_norms=True, embedding_scale=scale)
        POSITIVE.check(config.query_pre_attn_scalar, "query_pre_attn_scalar", ModelError)
        nested = kinds[0] in config.rope_parameters
        return DecoderVariant(
            gelu=True,
            unit_norms=True,
            output_norms=True,
            embedding_scale=scale,
            query_scalar=config.query_pre_attn_scalar,
            # Gemma 3 has the key, and no such cap
            score_cap=(config.attn_logit_softcapping or 0.0) if config.model_type == "gemma2" else 0.0,
            logit_cap=config.final_logit_softcapping or 0.0,
            ropes=tuple(kinds) if nested else (),
        )


LLAMA = DecoderVariant()
