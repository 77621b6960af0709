"""Keys of configuration files that Outrider or transformers uses in computations, and their allowed values.

The limits are far above every published model.  A corrupt file is rejected with the key's name before memory
is allocated.
"""

from __future__ import annotations

import math

from outrider.checkpoints.validate import ANY, Section, Table, each, one_or_more, real, text
from outrider.core.validate import FLAG, Kind, whole

MOST_LAYERS = 10_000
MOST_STEPS = 256  # heads of a drafter, layers of a head, draft steps
INT32 = (1 << 31) - 1
NAME = text(4096)
LAYER_COUNT, WIDTH, HEAD_COUNT = whole(1, MOST_LAYERS), whole(1, 1 << 20), whole(1, 1 << 16)
LENGTH, EPSILON = whole(1, 1 << 24), real(0, 1, above=True)
WINDOW = whole(0, INT32)
POSITIVE, SHARE, SCALE = real(0, 1e6, above=True), real(0, 1), real(-1e9, 1e9)
TOKEN = whole(-1, INT32)  # -1: none
RANK, ALPHA = whole(1, 1 << 20), real(-1e9, 1e9)


def _alike(kind: Kind, names: str) -> dict[str, Kind | Section]:
    return dict.fromkeys(names.split(), kind)


ROPE: dict[str, Kind | Section] = {
    **_alike(NAME, "rope_type type"),
    **_alike(POSITIVE, "factor attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"),
    **_alike(SCALE, "mscale mscale_all_dim"),
    **_alike(each(POSITIVE, 1 << 16), "short_factor long_factor"),
    "rope_theta": real(1, 1e15),
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": real(1, 1 << 24),
}
ROPE |= dict.fromkeys(("full_attention", "sliding_attention"), Section(ROPE))  # one per kind of layer

_WEIGHTS: Table = {
    "num_bits": whole(1, 64),
    "group_size": whole(-1, 1 << 24),
    "symmetric": FLAG,
    **_alike(NAME, "type strategy"),
}
QUANTIZATION: Table = {
    "bits": whole(1, 64),
    "group_size": whole(-1, 1 << 24),
    **_alike(FLAG, "zero_point sym desc_act"),
    **_alike(NAME, "quant_method version checkpoint_format format"),
    "config_groups": Section({ANY: Section({"weights": Section(_WEIGHTS)})}),
    "dynamic": Section({}),
}

GENERATION: Table = _alike(one_or_more(TOKEN, 1 << 16), "bos_token_id eos_token_id pad_token_id")

# Sizes of a language model.  Families have different names for the same size.
CONFIG: dict[str, Kind | Section] = {
    **GENERATION,
    **_alike(LAYER_COUNT, "num_hidden_layers n_layer n_layers num_layers"),
    **_alike(WIDTH, "hidden_size n_embd d_model"),
    **_alike(
        one_or_more(whole(0, 1 << 24), MOST_LAYERS), "intermediate_size n_inner ffn_dim ffn_hidden_size"
    ),
    **_alike(one_or_more(HEAD_COUNT, MOST_LAYERS), "num_attention_heads n_head n_heads num_heads"),
    **_alike(one_or_more(HEAD_COUNT, MOST_LAYERS), "num_key_value_heads num_kv_heads"),
    **_alike(whole(1, 1 << 16), "head_dim qk_head_dim"),
    **_alike(
        whole(0, 1 << 16), "v_head_dim qk_rope_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank rotary_dim"
    ),
    "vocab_size": whole(1, 1 << 26),
    **_alike(LENGTH, "max_position_embeddings n_positions max_seq_len seq_length n_ctx"),
    **_alike(WINDOW, "sliding_window window_size max_window_layers"),
    **_alike(
        EPSILON, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon"
    ),
    **_alike(ROPE["rope_theta"], "rope_theta rope_local_base_freq rotary_emb_base"),  # type: ignore[arg-type]
    **_alike(SHARE, "partial_rotary_factor rotary_pct"),
    **_alike(SCALE, "logit_scale attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar"),
    **_alike(
        whole(0, 1 << 16),
        "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok num_labels",
    ),
    **_alike(FLAG, "tie_word_embeddings is_encoder_decoder use_sliding_window attention_bias mlp_bias"),
    **_alike(NAME, "model_type hidden_act hidden_activation dtype torch_dtype transformers_version"),
    "architectures": each(NAME, 16),
    "layer_types": each(NAME, MOST_LAYERS),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Section(ROPE)),
    "quantization_config": Section(QUANTIZATION),
    "auto_map": Section({"AutoModelForCausalLM": NAME, "AutoConfig": NAME}),
    **dict.fromkeys(("id2label", "label2id"), Section({})),
}
CONFIG["text_config"] = Section(CONFIG)

LAYER_LIST = each(whole(-MOST_LAYERS, MOST_LAYERS), MOST_STEPS)
HEAD: dict[str, Kind | Section] = {
    **CONFIG,
    "num_hidden_layers": whole(0, MOST_LAYERS),
    **_alike(
        whole(1, MOST_STEPS), "medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers n_predict"
    ),
    "num_nextn_predict_layers": whole(0, MOST_STEPS),
    "block_size": whole(1, 4096),
    "mask_token_id": whole(0, INT32),
    "hidden_state_offset": whole(0, MOST_LAYERS),
    "swa_window_size": WINDOW,
    "draft_vocab_size": whole(1, 1 << 26),
    "n_candidates": whole(0, 1 << 24),
    "top_k_tokens_per_head": each(whole(0, 1 << 24), MOST_STEPS),
    **_alike(LAYER_LIST, "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids"),
    **_alike(
        FLAG,
        "norm_before_residual norm_before_fc norm_output fc_norm use_aux_hidden_state is_causal causal "
        "sliding_window_non_causal sample_from_anchor use_swa is_neox_style prenorm tie_weights scale_input "
        "tie_lstm_embs original_lm_head rnn shift_label",
    ),
    **_alike(NAME, "speculators_model_type hydra_head_arch method markov_head_type projector_type"),
}
HEAD |= dict.fromkeys(("transformer_layer_config", "dflash_config", "eagle_config"), Section(HEAD))
HEAD |= {"model": Section(HEAD, strict=False), "text_config": Section(HEAD)}

PEFT: Table = {
    "use_rslora": FLAG,
    **_alike(NAME, "peft_type base_model_name_or_path"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), Section({})),
}

_PIECES = 1 << 22  # tokens and merges in a vocabulary
GGUF: Table = {
    "general.architecture": NAME,
    "general.alignment": whole(1, 1 << 20),
    "split.count": whole(0, 99_999),  # five digits in the names of the shards
    **_alike(text(1 << 20), "tokenizer.chat_template tokenizer.ggml.model tokenizer.ggml.pre"),
    "tokenizer.ggml.tokens": each(NAME, _PIECES),
    "tokenizer.ggml.merges": each(text(2 * 4096 + 1), _PIECES),
    "tokenizer.ggml.scores": each(real(-math.inf, math.inf), _PIECES),
    "tokenizer.ggml.token_type": each(whole(0, 255), _PIECES),
    **{
        f"tokenizer.ggml.{name}_token_id": whole(0, (1 << 32) - 1)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    },
    **_alike(
        FLAG, "tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_space_prefix"
    ),
}
