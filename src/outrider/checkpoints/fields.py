"""Keys of configuration files that Outrider or transformers uses in computations, and their allowed values.

The limits are far above every published model.  A corrupt file is rejected with the key's name before memory
is allocated.
"""

from __future__ import annotations

import math
import re

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
VOCABULARY = whole(1, 1 << 26)
THETA = real(1, 1e15)
RANK = whole(1, 1 << 20)
_CAP = real(1e-3, 1e6)  # Gemma 2 has 30 and 50; dividing by a cap near 0 overflows
CAP = Kind(f"0, for none, or {_CAP.text}", lambda v: _CAP.accepts(v) or (type(v) in (int, float) and v == 0))


def _table(*rows: tuple[Kind | Section, str]) -> dict[str, Kind | Section]:
    """Keys and the values that they may have, from rows (value, keys)."""
    return {key: kind for kind, keys in rows for key in keys.split()}


ROPE = _table(
    (NAME, "rope_type type"),
    (POSITIVE, "factor attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"),
    (SCALE, "mscale mscale_all_dim"),
    (each(POSITIVE, 1 << 16), "short_factor long_factor"),
    (THETA, "rope_theta"),
    (SHARE, "partial_rotary_factor"),
    (real(1, 1 << 24), "original_max_position_embeddings"),
    (FLAG, "truncate"),
)
ROPE |= _table((Section(ROPE), "full_attention sliding_attention"))  # one per kind of layer

_BITS, _GROUP, _BLOCK = whole(1, 64), whole(-1, 1 << 24), whole(1, 1 << 16)
_SIZES = each(_BLOCK, 2)
_STRUCTURE = Kind(
    f"{_SIZES.text}, or such as 128x128",
    lambda v: bool(re.fullmatch("[0-9]{1,5}x[0-9]{1,5}", v)) if isinstance(v, str) else _SIZES.accepts(v),
)
_WEIGHTS = _table(
    (_BITS, "num_bits"),
    (_GROUP, "group_size"),
    (FLAG, "symmetric"),
    (NAME, "type strategy"),
    (_STRUCTURE, "block_structure"),
)
QUANTIZATION: Table = _table(
    (_BITS, "bits"),
    (_GROUP, "group_size"),
    (FLAG, "zero_point sym desc_act"),
    (NAME, "quant_method version checkpoint_format format fmt"),
    (_SIZES, "weight_block_size"),
    (Section({ANY: Section({"weights": Section(_WEIGHTS)})}), "config_groups"),
    (Section({}), "dynamic"),
)

_TOKENS = _table((one_or_more(TOKEN, 1 << 16), "bos_token_id eos_token_id pad_token_id"))
GENERATION = _TOKENS | _table(
    (real(0, 1e6), "temperature"),
    (whole(-1, INT32), "top_k"),
    (real(0, 1, above=True), "top_p"),
    (SHARE, "min_p"),
    (POSITIVE, "repetition_penalty"),
    (whole(1, INT32), "max_new_tokens"),
)

# Sizes of a language model.  Families have different names for the same size.
_HEADS, _INNER = one_or_more(HEAD_COUNT, MOST_LAYERS), one_or_more(whole(0, 1 << 24), MOST_LAYERS)
_DIMENSION = whole(0, 1 << 16)
CONFIG = _TOKENS | _table(
    (LAYER_COUNT, "num_hidden_layers n_layer n_layers num_layers"),
    (WIDTH, "hidden_size n_embd d_model"),
    (_INNER, "intermediate_size n_inner ffn_dim ffn_hidden_size"),
    (_HEADS, "num_attention_heads n_head n_heads num_heads num_key_value_heads num_kv_heads"),
    (whole(1, 1 << 16), "head_dim qk_head_dim"),
    (_DIMENSION, "v_head_dim qk_rope_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank rotary_dim"),
    (VOCABULARY, "vocab_size"),
    (LENGTH, "max_position_embeddings n_positions max_seq_len seq_length n_ctx"),
    (WINDOW, "sliding_window window_size max_window_layers"),
    (EPSILON, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon"),
    (THETA, "rope_theta rope_local_base_freq rotary_emb_base"),
    (SHARE, "partial_rotary_factor rotary_pct"),
    (SCALE, "logit_scale query_pre_attn_scalar"),
    (CAP, "attn_logit_softcapping final_logit_softcapping"),
    (_DIMENSION, "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok"),
    (whole(0, 1 << 24), "moe_intermediate_size shared_expert_intermediate_size"),
    (POSITIVE, "swiglu_alpha swiglu_limit"),
    (LAYER_COUNT, "decoder_sparse_step"),
    (_DIMENSION, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    (_DIMENSION, "linear_conv_kernel_dim"),
    (each(whole(0, MOST_LAYERS), MOST_LAYERS), "mlp_only_layers"),
    (FLAG, "norm_topk_prob"),
    (_DIMENSION, "num_labels"),
    (FLAG, "tie_word_embeddings is_encoder_decoder use_sliding_window attention_bias mlp_bias"),
    (NAME, "model_type hidden_act hidden_activation dtype torch_dtype transformers_version"),
    (each(NAME, 16), "architectures"),
    (each(NAME, MOST_LAYERS), "layer_types"),
    (Section(ROPE), "rope_parameters rope_scaling"),
    (Section(QUANTIZATION), "quantization_config"),
    (Section({"AutoModelForCausalLM": NAME, "AutoConfig": NAME}), "auto_map"),
    (Section({}), "id2label label2id"),
)
CONFIG["text_config"] = Section(CONFIG)

_COUNT = whole(1, MOST_STEPS)
_LAYER_LIST = each(whole(-MOST_LAYERS, MOST_LAYERS), MOST_STEPS)
HEAD = CONFIG | _table(
    (whole(0, MOST_LAYERS), "num_hidden_layers hidden_state_offset"),
    (_COUNT, "medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers n_predict"),
    (whole(0, MOST_STEPS), "num_nextn_predict_layers"),
    (whole(1, 4096), "block_size"),
    (whole(0, INT32), "mask_token_id"),
    (WINDOW, "swa_window_size"),
    (VOCABULARY, "draft_vocab_size"),
    (whole(0, 1 << 24), "n_candidates"),
    (each(whole(0, 1 << 24), MOST_STEPS), "top_k_tokens_per_head"),
    (_LAYER_LIST, "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids"),
    (FLAG, "norm_before_residual norm_before_fc norm_output fc_norm use_aux_hidden_state is_causal causal"),
    (FLAG, "sliding_window_non_causal sample_from_anchor use_swa is_neox_style prenorm tie_weights"),
    (FLAG, "scale_input tie_lstm_embs original_lm_head rnn shift_label"),
    (NAME, "speculators_model_type hydra_head_arch method markov_head_type projector_type"),
)
HEAD |= _table((Section(HEAD), "transformer_layer_config dflash_config eagle_config text_config"))
HEAD["model"] = Section(HEAD, strict=False)

PEFT = _table(
    (FLAG, "use_rslora"),
    (NAME, "peft_type base_model_name_or_path"),
    (Section({}), "rank_pattern alpha_pattern"),
)

_PIECES = 1 << 22  # tokens and merges in a vocabulary
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_TOKENIZER = _table(
    (text(1 << 20), "model pre"),
    (each(NAME, _PIECES), "tokens"),
    (each(text(2 * 4096 + 1), _PIECES), "merges"),
    (each(real(-math.inf, math.inf), _PIECES), "scores"),
    (each(whole(0, 255), _PIECES), "token_type"),
    (whole(0, (1 << 32) - 1), " ".join(f"{name}_token_id" for name in _IDS)),
    (FLAG, "add_bos_token add_eos_token add_space_prefix"),
)
GGUF = {f"tokenizer.ggml.{key}": kind for key, kind in _TOKENIZER.items()} | _table(
    (NAME, "general.architecture"),
    (whole(1, 1 << 20), "general.alignment"),
    (whole(0, 99_999), "split.count"),  # five digits in the names of the shards
    (text(1 << 20), "tokenizer.chat_template"),
)
