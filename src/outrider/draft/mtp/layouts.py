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
from outrider.heads.layouts import BLOCK_NAMES, HeadFormat, Layout, Rows, numbers, unchanged


def _rows(at: str, names: Mapping[str, str], published: str = "{at}.{name}") -> Rows:
    """at: beginning of a layer's names.  names: published module -> ours.  published: a module's name."""
    named = {published.format(at=at, name=theirs): ours for theirs, ours in names.items()}
    copies = ("embed_tokens", "shared_head.head", "rotary_emb", "self_attn.rotary_emb")
    return (
        *((f"{at}.{copy}.{{rest}}", None) for copy in copies),
        *((f"{theirs}.{{kind}}", f"layers.{{i}}.{ours}.{{kind}}") for theirs, ours in named.items()),
        (f"{at}.{{rest}}", "layers.{i}.{rest}"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        *unchanged("lm_head.weight"),
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
    return {"target_layers": min(numbers(head, "model.layers.{i}.eh_proj.weight"))}


def swap_inputs(weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """[h, 2h] for [state; embedding] as one for [embedding; state], and back."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _unpair(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Outputs that rotate in pairs (2i, 2i + 1), reordered to rotate in pairs (i, i + half)."""
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


BEFORE, AFTER = (("prenorm", True),), (("prenorm", False),)
SWAPPED = ((r"eh_proj\.weight$", swap_inputs),)
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
        _rows("model.mtp_block.{i}", ERNIE, "model.mtp_{name}.{{i}}"),
        changes=((r"self_attn\.[qk]_proj\.", _unpair),),
        defaults=BEFORE,
    ),
    "speculators": Layout(
        "speculators", ("mtp_layers.{i}.input_proj.weight",), _rows("mtp_layers.{i}", MIMO), defaults=AFTER
    ),
}


def _refused(head: Head) -> str:
    if any(layout.found_in(head) for layout in LAYOUTS.values()):
        return ""
    qwen = "mtp.fc.weight" in head
    what = "layers of Qwen3-Next (gated attention)" if qwen else "no multi-token prediction layers"
    return (
        f"it has {what}; those of {', '.join(LAYOUTS)} with dense blocks are: give a folder with such as "
        "'model', or choose another method"
    )


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
    kinds="(.*_)?mtp",
    refused=_refused,
)
