"""Published files of multi-token prediction layers.

    layout        names                                              the layer reads       state
    deepseek      model.layers.{L+i}.{enorm,hnorm,eh_proj,…}         [embedding; state]    after the last norm
    mimo          model.mtp_layers.{i}.{token_layernorm,…}           [state; embedding]    before it
    ernie         model.mtp_{emb_norm,hidden_norm,…}.{i}, mtp_block  [embedding; state]    before it; (*)
    speculators   mtp_layers.{i}.{token_layernorm,…}                 [embedding; state]    after it

The last norm is the target's.  (*): the target's norm follows.

Ours: layers.{i}.{enorm,hnorm,eh_proj,norm} and those of an ordinary block; eh_proj reads [embedding; state].
Embedding and lm_head are the target's; copies of them in the file are not read.  The output of a layer is
before or after its last norm, as the states that it reads are.  Engines disagree which: our config states it
("prenorm").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head, Tensors
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError
from outrider.heads.layouts import HeadFormat, Layout, Rows, matching, parse


@dataclass(frozen=True)
class LayerLayout(Layout):
    """state_first: eh_proj reads [state; embedding].  prenorm: states are those before the last norm.
    paired: queries and keys rotate the pairs (2i, 2i + 1)."""

    state_first: bool = False
    prenorm: bool = False
    paired: bool = False


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


DEEPSEEK = {"shared_head.norm": "norm"}
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


LAYOUTS = {
    "deepseek": LayerLayout(
        "DeepSeek",
        ("model.layers.{i}.eh_proj.weight",),
        _rows("model.layers.{i+target_layers}", DEEPSEEK),
        numbers=_first_layer,
    ),
    "mimo": LayerLayout(
        "MiMo",
        ("model.mtp_layers.{i}.input_proj.weight",),
        _rows("model.mtp_layers.{i}", MIMO),
        state_first=True,
        prenorm=True,
    ),
    "ernie": LayerLayout(
        "Ernie",
        ("model.mtp_linear_proj.{i}.weight",),
        (
            *(
                (f"model.mtp_{theirs}.{{i}}.{{kind}}", f"layers.{{i}}.{ours}.{{kind}}")
                for theirs, ours in ERNIE.items()
            ),
            *_rows("model.mtp_block.{i}", {}),
        ),
        prenorm=True,
        paired=True,
    ),
    "speculators": LayerLayout(
        "speculators", ("mtp_layers.{i}.input_proj.weight",), _rows("mtp_layers.{i}", MIMO)
    ),
}
FORMAT = HeadFormat(
    tuple(LAYOUTS.values()),
    hidden=(("layers.{i}.eh_proj.weight", 0),),
    vocabulary=("embed_tokens.weight", "lm_head.weight"),
)
OURS = re.compile(
    r"(embed_tokens|lm_head)\.weight|"
    r"layers\.\d+\.(enorm|hnorm|eh_proj|norm|input_layernorm|post_attention_layernorm|"
    r"self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj)\.(weight|bias)"
)
UNSUPPORTED = (
    (r"mlp\.(experts|gate|shared_expert)", "a mixture of experts"),
    (r"self_attn\.(q_a|q_b|kv_a|kv_b)_", "compressed attention (MLA)"),
    (r"scale|qweight|packed|zeros", "quantized weights"),
    (r"", "a block that is not Llama's or Qwen's"),
)


class Changed:
    """Tensors, some of which are changed while they are read.

    `changes`: stored name -> function that keeps the shape.
    """

    def __init__(self, tensors: Tensors, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self.tensors, self.changes = tensors, changes

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def raw(self, name: str) -> Tensor:
        tensor = self.tensors.raw(name)
        return self.changes[name](tensor) if name in self.changes else tensor

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        """The changes move rows or halves of the inputs.

        Scales move alike if no group crosses the middle.
        """
        weight = self.tensors.weight(name)
        if name not in self.changes:
            return weight
        if isinstance(weight, QuantizedWeight):
            whole = weight.values.shape[1] // 2 % weight.group == 0
            return weight.mapped(self.changes[name]) if whole else self.changes[name](weight.dense())
        return self.changes[name](weight)


def claims_of(head: Head) -> int:
    """2: it has such layers, and is not a whole language model; 1: by its config; 0: another kind of head."""
    if "model.norm.weight" in head:
        return 0
    if FORMAT.layout_of(head) or "mtp.fc.weight" in head:
        return 2
    kinds = head.config.get("speculators_model_type"), str(head.config.get("model_type")).rpartition("_")[2]
    return int("mtp" in kinds)


def translate(head: Head) -> tuple[Head, LayerLayout]:
    """The head under our names, with a flat config.

    Raises ModelError without prediction layers, or for an unsupported kind.
    """
    layout = FORMAT.layout_of(head)
    if layout is None:
        qwen = "mtp.fc.weight" in head
        what = "layers of Qwen3-Next (gated attention)" if qwen else "no multi-token prediction layers"
        raise ModelError(
            f"{head.name!r} has {what}; those of {', '.join(LAYOUTS)} with dense blocks are supported: "
            "give a folder with such as 'model', or choose another method."
        )
    assert isinstance(layout, LayerLayout)
    config = {**head.config, **(head.config.get("transformer_layer_config") or {})}
    layout = replace(layout, prenorm=bool(config.get("prenorm", layout.prenorm)))
    ours = layout.translate(head)
    _check_dense(ours)
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, stored in ours.stored.items():
        if layout.state_first and name.endswith(".eh_proj.weight"):
            changes[stored] = _swap_inputs
        if layout.paired and re.search(r"self_attn\.[qk]_proj\.", name):
            changes[stored] = partial(_unpair, head_dim=head_dim_of(config))
    return replace(ours, config=config, tensors=Changed(head.tensors, changes)), layout


def _check_dense(head: Head) -> None:
    for name in head:
        if not OURS.fullmatch(name):
            why = next(reason for pattern, reason in UNSUPPORTED if re.search(pattern, name))
            raise ModelError(
                f"the prediction layers of {head.name!r} have {why} ({head.stored[name]}), "
                "and only dense ones "
                "are supported."
            )


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _swap_inputs(weight: Tensor) -> Tensor:
    """[h, 2h] for [state; embedding] as one for [embedding; state], and back."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _unpair(tensor: Tensor, head_dim: int) -> Tensor:
    """Outputs that rotate in pairs (2i, 2i + 1), reordered to rotate in pairs (i, i + half)."""
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a network as "deepseek", "mimo" (vLLM, SGLang; a Qwen2 block) or "speculators".

    Raises ModelError where readers of that layout would feed the layers other states than they were trained
    on.
    """
    wanted = LAYOUTS[layout]
    head, trained = translate(Head.of("the trained network", config, tensors))
    if trained.prenorm != wanted.prenorm:
        raise ModelError(
            f"layers trained on states {_side(trained)} cannot be written as {layout!r}, "
            "whose readers give those "
            f"{_side(wanted)}."
        )
    out: dict[str, Tensor] = {}
    for name in head:
        swap = wanted.state_first and name.endswith(".eh_proj.weight")
        published = wanted.published(name, target_layers=int(config["num_hidden_layers"]))
        out[published] = _swap_inputs(head.raw(name)) if swap else head.raw(name)
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


def _side(layout: LayerLayout) -> str:
    return "before the target's last norm" if layout.prenorm else "after the target's last norm"
