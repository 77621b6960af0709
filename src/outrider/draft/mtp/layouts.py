"""Published files of multi-token prediction layers.

    layout        names                                              the layer reads       state
    deepseek      model.layers.{L+i}.{enorm,hnorm,eh_proj,…}         [embedding; state]    after the last norm
    mimo          model.mtp_layers.{i}.{token_layernorm,…}           [state; embedding]    before it
    ernie         model.mtp_{emb_norm,hidden_norm,…}.{i}, mtp_block  [embedding; state]    before it; (*)
    speculators   mtp_layers.{i}.{token_layernorm,…}                 [embedding; state]    after it

The last norm is the target's.  (*): the target's norm follows, and queries and keys rotate the pairs
(2i, 2i + 1).

Ours: layers.{i}.{enorm,hnorm,eh_proj,norm} and those of an ordinary block; eh_proj reads [embedding; state].
Embedding and lm_head are the target's; copies of them in the file are not read.  The output of a layer is
before or after its last norm, as the states that it reads are.  Engines disagree which: our config states it
("prenorm").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ModelError
from outrider.heads.layouts import BLOCK_NAMES, HeadFormat, Layout, Rows, matching, parse


def _rows(at: str, names: Mapping[str, str]) -> Rows:
    """at: what the published names of a layer begin with.  names: published module -> ours."""
    copies = ("embed_tokens", "shared_head.head", "rotary_emb", "self_attn.rotary_emb")
    return (
        *((f"{at}.{copy}.{{rest}}", None) for copy in copies),
        *((f"{at}.{theirs}.{{kind}}", f"layers.{{i}}.{ours}.{{kind}}") for theirs, ours in names.items()),
        (f"{at}.{{rest}}", "layers.{i}.{rest}"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    )


MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
}
ERNIE = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "eh_proj"}


def _first_layer(head: Head) -> dict[str, int]:
    """The number of the first prediction layer, which is the number of layers of the target."""
    found = (parse("model.layers.{i}.eh_proj.weight", name) for name in head)
    return {"target_layers": min(int(values["i"]) for values in found if values)}


def _swap_inputs(weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """[h, 2h] for [state; embedding] as one for [embedding; state], and back."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _unpair(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Outputs that rotate in pairs (2i, 2i + 1), reordered to rotate in pairs (i, i + half)."""
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


BEFORE, AFTER = (("prenorm", True),), (("prenorm", False),)
SWAPPED = ((r"eh_proj\.weight$", _swap_inputs),)
LAYOUTS = {
    "deepseek": Layout(
        "DeepSeek",
        ("model.layers.{i}.eh_proj.weight",),
        _rows("model.layers.{i+target_layers}", {"shared_head.norm": "norm"}),
        numbers=_first_layer,
        defaults=AFTER,
    ),
    "mimo": Layout(
        "MiMo",
        ("model.mtp_layers.{i}.input_proj.weight",),
        _rows("model.mtp_layers.{i}", MIMO),
        changes=SWAPPED,
        defaults=BEFORE,
    ),
    "ernie": Layout(
        "Ernie",
        ("model.mtp_linear_proj.{i}.weight",),
        tuple(
            (f"model.mtp_{one}.{{i}}.{{kind}}", f"layers.{{i}}.{own}.{{kind}}") for one, own in ERNIE.items()
        )
        + _rows("model.mtp_block.{i}", {}),
        changes=((r"self_attn\.[qk]_proj\.", _unpair),),
        defaults=BEFORE,
    ),
    "speculators": Layout(
        "speculators", ("mtp_layers.{i}.input_proj.weight",), _rows("mtp_layers.{i}", MIMO), defaults=AFTER
    ),
}
FORMAT = HeadFormat(
    tuple(LAYOUTS.values()),
    hidden=(("layers.{i}.eh_proj.weight", 0),),
    vocabulary=("embed_tokens.weight", "lm_head.weight"),
    known=r"(embed_tokens|lm_head)\.weight|"
    rf"layers\.\d+\.((enorm|hnorm|eh_proj|norm)\.(weight|bias)|{BLOCK_NAMES})",
    variants=(
        (r"mlp\.(experts|gate\.|shared_expert)", "a mixture of experts"),
        (r"self_attn\.(q_a|q_b|kv_a|kv_b)_", "compressed attention (MLA)"),
        (r"scale|qweight|packed|zeros", "quantized weights"),
        ("", "a block that is not Llama's or Qwen's"),
    ),
)


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a network as "deepseek", "mimo" (vLLM, SGLang; a Qwen2 block) or "speculators".

    Raises ModelError where readers of that layout would feed the layers other states than they were trained
    on.
    """
    wanted, head = LAYOUTS[layout], FORMAT.translate(Head.of("the trained network", config, tensors))
    prenorm = dict(wanted.defaults)["prenorm"]
    if head.config["prenorm"] != prenorm:
        trained, given = (
            f"{'before' if before else 'after'} the target's last norm" for before in (not prenorm, prenorm)
        )
        raise ModelError(
            f"layers trained on states {trained} cannot be written as {layout!r}, whose readers give those "
            f"{given}."
        )
    out = {
        wanted.published(name, target_layers=int(config["num_hidden_layers"])): (
            _swap_inputs(head.raw(name), config)
            if wanted.changes is SWAPPED and name.endswith("eh_proj.weight")
            else head.raw(name)
        )
        for name in head
    }
    if layout == "mimo":  # a Qwen2 block has biases
        for name in list(matching(head, *(f"layers.{{i}}.self_attn.{one}_proj.weight" for one in "qkv"))):
            published = wanted.published(name.removesuffix("weight") + "bias")
            out.setdefault(published, head.raw(name).new_zeros(head.shape(name)[0]))
    return _config(dict(config), layout), out


def _config(config: dict[str, Any], layout: str) -> dict[str, Any]:
    if layout == "mimo":
        return {**config, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    if layout == "speculators":
        return {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "transformer_layer_config": {**config, "model_type": "qwen3"},
            "num_nextn_predict_layers": config["num_nextn_predict_layers"],
        }
    return config
