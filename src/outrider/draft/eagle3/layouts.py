"""Published files of EAGLE-3 heads.

ours, as the reference (SafeAILab, SpecForge)       speculators, vLLM       SGLang
fc, norm, lm_head, d2t, t2d, embed_tokens           the same                the same
midlayer.…                                          layers.0.…              the same
layers.1.…, layers.2.… (ordinary layers)            the same                additional_layers.0.…, 1.…
fc_norm.0, …, input_norm (variants)                 the same                not supported
"""

from __future__ import annotations

from outrider.heads.layouts import UNCHANGED, HeadFormat, Layout
from outrider.heads.tapped import TAPS

FIRST = ("midlayer.{rest}", "midlayer.{rest}")
REST = (
    ("layers.0.{rest}", "midlayer.{rest}"),
    ("d2t", "d2t"),
    ("draft_id_to_target_id", "d2t"),
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("verifier_{rest}", None),
    ("layers.{i}.hidden_norm.weight", None),  # vLLM gives every layer a norm that only the first uses
    *UNCHANGED,
)
VLLM = Layout("speculators, vLLM", ("layers.0.hidden_norm.weight",), REST, ("model.",))
SGLANG = Layout(
    "SGLang",
    ("additional_layers.{i}.{rest}",),
    (
        ("additional_layers.{i}.hidden_norm.{rest}", "layers.{i+1}.input_layernorm.{rest}"),
        ("additional_layers.{i}.{rest}", "layers.{i+1}.{rest}"),
        FIRST,
        *REST,
    ),
    ("model.",),
)
REFERENCE = Layout("reference", ("midlayer.hidden_norm.weight",), (FIRST, *REST), ("model.",))


FORMAT = HeadFormat(
    (SGLANG, VLLM, REFERENCE),
    hidden=(("fc.weight", 1),),
    vocabulary=("lm_head.weight",),
    taps=(TAPS,),
    kinds=".*Eagle3.*|eagle3",
)
