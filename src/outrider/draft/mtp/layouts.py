"""Where multi-token prediction layers lie, and under which names.

    layout        names                                              the layer reads          state
    deepseek      model.layers.{L+i}.{enorm,hnorm,eh_proj,…}         [embedding; state]       after the target's last norm
    mimo          model.mtp_layers.{i}.{token_layernorm,…}           [state; embedding]       before it
    ernie         model.mtp_{emb_norm,hidden_norm,…}.{i}, mtp_block  [embedding; state]       before it; the target's norm reads it out
    speculators   mtp_layers.{i}.{token_layernorm,…}                 [embedding; state]       after it

Ours: layers.{i}.{enorm,hnorm,eh_proj,norm} and those of an ordinary block; eh_proj takes [embedding; state].  Embedding and head are
the target's; copies of them in the file (embed_tokens, shared_head.head) are not read.  What a layer says is of the kind that the states
are which it read.  Which kind that is, engines disagree about: a config of ours says it ("prenorm").
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


@dataclass(frozen=True)
class Layout:
    """at: what the names of a layer begin with, n being its number.  mark: how the tensor is called that every layer has."""

    at: str
    mark: str
    state_first: bool = False
    prenorm: bool = False
    paired: bool = False  # queries and keys turn in pairs (2i, 2i + 1)


MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
}
DEEPSEEK = {"shared_head.norm": "norm"}
ERNIE = {"mtp_emb_norm": "enorm", "mtp_hidden_norm": "hnorm", "mtp_linear_proj": "eh_proj"}
OURS = {**MIMO, **DEEPSEEK, **ERNIE}
COPIES = ("embed_tokens.", "shared_head.head.", "rotary_emb.", "self_attn.rotary_emb.")
LAYOUTS = {
    "deepseek": Layout(r"model\.layers\.(?P<n>\d+)\.", "eh_proj"),
    "mimo": Layout(r"model\.mtp_layers\.(?P<n>\d+)\.", "input_proj", state_first=True, prenorm=True),
    "ernie": Layout(r"model\.ernie\.(?P<n>\d+)\.", "mtp_linear_proj", prenorm=True, paired=True),
    "speculators": Layout(r"mtp_layers\.(?P<n>\d+)\.", "input_proj"),
}
KNOWN = re.compile(
    r"layers\.\d+\.(enorm|hnorm|eh_proj|norm|input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|"
    r"mlp\.(gate|up|down)_proj)\.(weight|bias)"
)
STRANGE = (
    (r"mlp\.(experts|gate|shared_expert)", "a mixture of experts"),
    (r"self_attn\.(q_a|q_b|kv_a|kv_b)_", "compressed attention (MLA)"),
    (r"scale|qweight|packed|zeros", "quantised weights"),
    (r"", "a block that is not Llama's or Qwen's"),
)


class Changed:
    """Tensors, some of which are changed on the way; none changes its shape."""

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
        """A change that moves rows, or halves of the inputs, moves scales alike where groups do not cross the middle."""
        weight = self.tensors.weight(name)
        if name not in self.changes:
            return weight
        if isinstance(weight, QuantizedWeight):
            whole = weight.values.shape[1] // 2 % weight.group == 0
            return weight.mapped(self.changes[name]) if whole else self.changes[name](weight.dense())
        return self.changes[name](weight)


def layout_of(head: Head) -> str | None:
    return next((name for name, layout in LAYOUTS.items() if _numbers(head, layout)), None)


def claims_of(head: Head) -> int:
    """2: it has such layers, and is not a whole language model, which would be a draft by itself."""
    if "model.norm.weight" in head:
        return 0
    if layout_of(head) or "mtp.fc.weight" in head:
        return 2
    kinds = head.config.get("speculators_model_type"), str(head.config.get("model_type")).rpartition("_")[2]
    return int("mtp" in kinds)


def translate(head: Head) -> tuple[Head, Layout]:
    """Under our names, with a flat config.  Raises ModelError where there is no such layer, or one that is not built."""
    kind = layout_of(head)
    if kind is None:
        what = (
            "layers of Qwen3-Next (gated attention)"
            if "mtp.fc.weight" in head
            else "no multi-token prediction layers"
        )
        raise ModelError(
            f"{head.name!r} has {what}; those of {', '.join(LAYOUTS)} with dense blocks are built: give a folder with such as 'model', "
            "or choose another method."
        )
    layout = LAYOUTS[kind]
    config = {**head.config, **(head.config.get("transformer_layer_config") or {})}
    layout = replace(layout, prenorm=bool(config.get("prenorm", layout.prenorm)))
    at = {n: i for i, n in enumerate(_numbers(head, layout))}
    ours = head.renamed(partial(_name, layout=layout, at=at))
    _check(ours)
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, stored in ours.stored.items():
        if layout.state_first and name.endswith(".eh_proj.weight"):
            changes[stored] = _swapped
        if layout.paired and re.search(r"self_attn\.[qk]_proj\.", name):
            changes[stored] = partial(_unpaired, width=width_of(config))
    return replace(ours, config=config, tensors=Changed(head.tensors, changes)), layout


def _check(head: Head) -> None:
    for name in head:
        if not KNOWN.fullmatch(name):
            why = next(reason for pattern, reason in STRANGE if re.search(pattern, name))
            raise ModelError(
                f"the prediction layers of {head.name!r} have {why} ({head.stored[name]}), and only dense ones are built."
            )


def width_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _numbers(head: Head, layout: Layout) -> list[int]:
    found = (re.fullmatch(rf"{layout.at}{layout.mark}\.weight", _ernie(name)) for name in head)
    return sorted(int(match["n"]) for match in found if match)


def _ernie(name: str) -> str:
    """Ernie's names, of which the number of the layer is the last part, like the others'."""
    match = re.match(r"model\.(mtp_(?:block|emb_norm|hidden_norm|linear_proj))\.(\d+)\.", name)
    return f"model.ernie.{match[2]}.{match[1]}.{name[match.end() :]}" if match else name


def _name(name: str, layout: Layout, at: Mapping[int, int]) -> str | None:
    match = re.match(layout.at, _ernie(name))
    if match is None or int(match["n"]) not in at:
        return None
    rest = _ernie(name)[match.end() :].removeprefix("mtp_block.")
    part, _, kind = rest.rpartition(".")
    return None if rest.startswith(COPIES) else f"layers.{at[int(match['n'])]}.{OURS.get(part, part)}.{kind}"


def _swapped(weight: Tensor) -> Tensor:
    """[h, 2h] for [state; embedding] as one for [embedding; state]."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _unpaired(tensor: Tensor, width: int) -> Tensor:
    """Outputs of heads that turn in pairs (2i, 2i + 1), in the order in which halves turn."""
    return tensor.reshape(-1, width // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a trained network as engines read them: "deepseek", "mimo" (vLLM and SGLang, a Qwen2 block) or "speculators".

    Raises ModelError where that layout's readers would give the layers other states than they were trained on.
    """
    wanted = LAYOUTS[layout]
    head, made = translate(Head.of("the trained network", config, tensors))
    if made.prenorm != wanted.prenorm:
        raise ModelError(
            f"layers trained on states {_side(made)} cannot be written as {layout!r}, whose readers give those {_side(wanted)}."
        )
    names = {new: old for old, new in (DEEPSEEK if layout == "deepseek" else MIMO).items()}
    out: dict[str, Tensor] = {}
    for name in head:
        _, number, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        start = (
            f"model.layers.{int(number) + int(config['num_hidden_layers'])}"
            if layout == "deepseek"
            else f"mtp_layers.{number}"
        )
        tensor = head.raw(name)
        out[f"{'model.' * (layout == 'mimo')}{start}.{names.get(part, part)}.{kind}"] = (
            _swapped(tensor) if wanted.state_first and part == "eh_proj" else tensor
        )
    for i in (
        range(int(config["num_nextn_predict_layers"])) if layout == "mimo" else ()
    ):  # a Qwen2 block has biases
        for one in "qkv":
            at = f"model.mtp_layers.{i}.self_attn.{one}_proj"
            out.setdefault(f"{at}.bias", out[f"{at}.weight"].new_zeros(len(out[f"{at}.weight"])))
    return _config(dict(config), layout), out


def _config(config: dict[str, Any], layout: str) -> dict[str, Any]:
    if layout == "mimo":
        return {**config, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    if layout == "speculators":
        return {
            "speculators_model_type": "mtp", "architectures": ["MTPDraftModel"],
            "transformer_layer_config": {**config, "model_type": "qwen3"}, "num_nextn_predict_layers": config["num_nextn_predict_layers"],
        }  # fmt: skip
    return config


def _side(layout: Layout) -> str:
    return "before the target's last norm" if layout.prenorm else "after the target's last norm"
