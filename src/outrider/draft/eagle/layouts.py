"""Published files of EAGLE heads.

    layout                         names
    reference, .bin or safetensors fc.*, layers.0.*, embed_tokens.weight (a copy of the target's, not read)
    vLLM, converted                model.* or model.model.*, lm_head.weight (a copy), enorm, hnorm,
                                   token_map (a smaller vocabulary)
    vLLM, as it reads              embedding_layernorm, hidden_states_layernorm (HASS with add_para_norm)
    speculators v0.1               fusion_fc.*, transformer.*, embedding_layernorm, pre_lm_head_layernorm
    Hydra, eagle-attn              fc.*, attn.* (with an input norm), input_embed_fn and lm_head (copies)

The file, not the config, decides whether fc has a bias.  The reference's has one unless the config says
otherwise, SGLang's always. vLLM reads the reference's files without it.
"""

from __future__ import annotations

from outrider.checkpoints.heads import Head
from outrider.heads.layouts import BLOCK_NAMES, UNCHANGED, HeadFormat, Layout

ROWS = (
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("embedding_layernorm.{rest}", "norm_token.{rest}"),
    ("enorm.{rest}", "norm_token.{rest}"),
    ("hidden_states_layernorm.{rest}", "norm_state.{rest}"),
    ("hnorm.{rest}", "norm_state.{rest}"),
    ("pre_lm_head_layernorm.{rest}", "norm_out.{rest}"),
    ("norm.{rest}", "norm_out.{rest}"),
    *UNCHANGED,
)
SPECULATORS = Layout(
    "speculators",
    ("fusion_fc.weight",),
    (*ROWS[:2], ("fusion_fc.{kind}", "fc.{kind}"), ("transformer.{rest}", "layers.0.{rest}"), *ROWS[2:]),
    ("model.",),
)
VLLM = Layout(
    "vLLM", ("model.{rest}", "embedding_layernorm.weight", "enorm.weight", "token_map"), ROWS, ("model.",)
)
HYDRA = Layout(
    "Hydra, eagle-attn",
    ("attn.self_attn.q_proj.weight",),
    (*ROWS[:2], ("input_embed_fn.weight", None), ("attn.{rest}", "layers.0.{rest}"), *ROWS[2:]),
)


def _refused(head: Head) -> str:
    offset = head.config.get("hidden_state_offset") if "hydra_head_arch" in head.config else None
    return f"it reads states {offset} layers before the last (hidden_state_offset)" if offset else ""


FORMAT = HeadFormat(
    (SPECULATORS, VLLM, HYDRA, Layout("reference", ("fc.weight",), ROWS)),
    hidden=(("fc.weight", 0),),
    vocabulary=("lm_head.weight", "embed_tokens.weight"),
    known=rf"fc\.(weight|bias)|token_map|(norm_(token|state|out)|lm_head|embed_tokens)\.weight|"
    rf"layers\.\d+\.({BLOCK_NAMES})",
    variants=(("", "only dense layers as Llama's and Qwen's are supported"),),
    kinds="eagle",
    refused=_refused,
)
