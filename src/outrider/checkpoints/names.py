"""Names of the tensors of a language model: those of `LlamaForCausalLM`, and others that files have.

the language model of a checkpoint that also reads images or sound
    language_model.model.layers.0…, model.language_model.layers.0…  ->  model.layers.0…
    language_model.lm_head.weight                                   ->  lm_head.weight
a body that was saved without its head
    layers.0…                                                       ->  model.layers.0…
EXAONE 3, a Llama with the names of GPT-2
    transformer.h.0.attn.attention.q_proj.weight                    ->  model.layers.0.self_attn.q_proj…
Mixtral
    model.layers.0.block_sparse_moe.experts.0.w1.weight             ->  model.layers.0.mlp.experts.0.gate…
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.errors import ModelError

BODY, HEAD = "model.", "lm_head."
EMBEDDING = re.compile(r"(|.*\.)embed_tokens\.weight(_packed)?")
ANY_HEAD = re.compile(r"(|.*\.)lm_head\.(weight|weight_packed|qweight)")
GPT = re.compile(r"transformer\.h\.0\.mlp\.c_fc_0\.")  # of a gated MLP, which GPT-2 has not
# Linears that decide much with few weights, and are never quantized here: routers of experts, and the gates
# of a delta rule.
GATES = re.compile(
    r"(\.(mlp|block_sparse_moe)\.(gate|router|shared_expert_gate)|\.linear_attn\.in_proj_(a|b|ba))\.weight$"
)
MIXTRAL = re.compile(r".*\.block_sparse_moe\.")
LIKE_GPT = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)

LIKE_MIXTRAL = (
    (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
)


@dataclass(frozen=True)
class Prefixes:
    """Prefixes in a file: of the body's tensors, usually "model.", and of "lm_head.", usually none."""

    body: str = BODY
    head: str = ""

    @staticmethod
    def of(names: Collection[str]) -> Prefixes:
        """Raises ModelError for the files of two language models; those of another kind are as usual."""
        found = {match[1] for name in names if (match := EMBEDDING.fullmatch(name))}
        bodies = sorted(body for body in found if f"{body}norm.weight" in names)
        if not bodies or BODY in bodies:
            return Prefixes()
        if len(bodies) > 1:
            raise ModelError(f"the files hold several language models: {', '.join(bodies)}.")
        heads = (match[1] for name in names if (match := ANY_HEAD.fullmatch(name)))
        head = max((head for head in heads if bodies[0].startswith(head)), key=len, default="")
        return Prefixes(bodies[0], head)

    def own(self, name: str) -> str | None:
        """The usual name of a stored tensor; None for one of another part of the model."""
        if name.startswith(self.head + HEAD):  # first: the body's prefix may be that of the head, or empty
            return name.removeprefix(self.head)
        return BODY + name.removeprefix(self.body) if name.startswith(self.body) else None

    def patterns(self) -> dict[str, str]:
        """The renaming as regular expressions, as transformers takes them."""
        return {f"^{re.escape(self.head + HEAD)}": HEAD, f"^{re.escape(self.body)}": BODY}


def own_names(names: Collection[str]) -> dict[str, str]:
    """Usual name -> stored name, of the tensors of the language model; empty where all are usual.

    Raises ModelError for the files of two language models.
    """
    if any(map(GPT.match, names)):
        return {_renamed(name, LIKE_GPT): name for name in names}
    if any(map(MIXTRAL.match, names)):
        return {_renamed(name, LIKE_MIXTRAL): name for name in names}
    prefixes = Prefixes.of(names)
    if prefixes == Prefixes():
        return {}
    return {own: name for name in names if (own := prefixes.own(name)) is not None}


def _renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    for pattern, ours in patterns:
        name = re.sub(pattern, ours, name)
    return name
