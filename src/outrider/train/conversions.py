"""Heads of every readable layout in every layout that their method can be exported to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.draft.dflash import layouts as dflash
from outrider.draft.eagle import layouts as eagle
from outrider.draft.eagle3 import layouts as eagle3
from outrider.draft.medusa import layouts as medusa
from outrider.draft.mlp_speculator import layouts as mlp_speculator
from outrider.draft.mtp import layouts as mtp
from outrider.draft.redrafter import layouts as redrafter
from outrider.errors import ConfigError, unknown
from outrider.heads.layouts import NESTED, flat, speculators_config
from outrider.train.base import Files

OF_A_LAYOUT = (  # keys of configs
    *NESTED, "quantization_config", "speculators_config", "speculators_model_type", "speculators_version",
    "transformer_layer_architecture", "fusion_bias", "layernorms",
)  # fmt: skip
OUTER = (  # keys of z-lab's configs beside those of a layer
    "target_layer_ids", "causal", "is_causal", "architectures", "projector_type", "markov_head_type",
    "auto_map", "num_target_layers", "torch_dtype", "dtype", "block_size", "mask_token_id", "markov_rank",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")


def convert(method: str, head: Head, layout: str) -> Files:
    """Config and tensors of a head in another layout.

    Raises ConfigError for an unknown layout, and for what it cannot hold.
    """
    if method not in CONVERSIONS:
        raise ConfigError(f"format {layout!r}: heads of this method have one published layout.")
    return CONVERSIONS[method](head, layout)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config without what belongs to one layout, or to quantised weights."""
    return {key: value for key, value in flat(config).items() if key not in OF_A_LAYOUT}


def dense(head: Head) -> dict[str, Tensor]:
    """The tensors of a head, quantised ones in float32."""
    return {name: head.raw(name) for name in head}


def refuse(layout: str, what: list[str]) -> None:
    if what:
        raise ConfigError(f"the layout {layout!r} cannot hold {', '.join(what)}, which this head has.")


def _eagle(head: Head, layout: str) -> Files:
    tensors = dense(eagle.FORMAT.translate(head))
    refuse(layout, sorted(name for name in tensors if name.startswith(("norm_", "token_map", "layers.1."))))
    copies = ["embed_tokens.weight", "lm_head.weight"]
    if "fc.bias" in tensors and not tensors["fc.bias"].any():  # SGLang's files always have one
        copies.append("fc.bias")
    kept = {name: tensor for name, tensor in tensors.items() if name not in copies}
    return eagle.exported({**plain(head.config), "bias": "fc.bias" in kept}, kept, layout)


def _eagle3(head: Head, layout: str) -> Files:
    ours, config = eagle3.FORMAT.translate(head), plain(head.config)
    tensors, taps = dense(ours), config.get(eagle3.TAPS)
    if not taps or config.pop("use_aux_hidden_state", True) is False:
        raise ConfigError(f"{head.name!r} does not list its {eagle3.TAPS}: add them to its config.")
    flags = {flag: True for flag in FLAGS if config.pop(flag, False)}
    if layout == "sglang":
        refuse(layout, [*flags, *(name for name in tensors if name.startswith(("fc_norm", "input_norm")))])
    config |= {eagle3.TAPS: eagle3.taps_of(ours, 1 + max(taps)), "architectures": ["LlamaForCausalLM"]}
    config.setdefault("draft_vocab_size", len(tensors["lm_head.weight"]))
    config.setdefault("target_hidden_size", tensors["fc.weight"].shape[1] // len(taps))
    made, named = eagle3.exported({**config, eagle3.TAPS: [*config[eagle3.TAPS]]}, tensors, layout)
    return {**made, **flags}, named


def _medusa(head: Head, layout: str) -> Files:
    ours = medusa.FORMAT.translate(head)
    (heads, blocks), own = medusa.counts(ours), "0.lm_head.weight" in ours
    refuse(layout, [name for name in ("token_map", "lm_head.weight") if name in ours])
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": ""}
    named = {medusa.REFERENCE.published(name, blocks=blocks): ours.raw(name) for name in ours}
    return medusa.exported(config if own else {**config, "version": "2"}, named, layout)


def _mlp_speculator(head: Head, layout: str) -> Files:
    ours, config = mlp_speculator.FORMAT.translate(head), plain(head.config)
    if layout == "vllm" and "method" in config:
        raise ConfigError(f"the layout 'vllm' cannot hold the method {config['method']!r}: choose 'arctic'.")
    stored = {*ours.stored.values()}
    tensors = {name.removeprefix(mlp_speculator.PREFIX): head.raw(name) for name in stored}
    return mlp_speculator.exported(config, tensors, layout)


def _mtp(head: Head, layout: str) -> Files:
    ours = mtp.FORMAT.translate(head)
    tensors = {name: tensor for name, tensor in dense(ours).items() if name.startswith("layers.")}
    biases = [name for name in tensors if name.endswith("_proj.bias")]
    if layout != "mimo":  # whose blocks always have them
        refuse(layout, [name for name in biases if tensors[name].any()])
        tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
    config, count = plain(ours.config), len({name.split(".")[1] for name in tensors})
    config |= {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}
    config |= {"num_hidden_layers": config.get("num_hidden_layers", 1), "num_nextn_predict_layers": count}
    first, deepseek = int(config["num_hidden_layers"]), mtp.LAYOUTS["deepseek"]
    named = {deepseek.published(name, target_layers=first): tensor for name, tensor in tensors.items()}
    return mtp.exported(config, named, layout)


def _dflash(head: Head, layout: str) -> Files:
    ours = dflash.FORMAT.translate(head)
    given, tensors = head.config, dense(ours)
    if "speculators_model_type" not in given and "domino.state.weight" not in tensors:
        given = _of_z_lab(ours, tensors)
    published = {dflash.FORMAT.layouts[0].published(name): tensor for name, tensor in tensors.items()}
    kept = {key: value for key, value in given.items() if key != "quantization_config"}
    if "domino.state.weight" in tensors:
        if layout != "z-lab":
            raise ConfigError("a Domino head has one published layout, 'z-lab'.")
        return kept, published
    if layout == "speculators":
        return kept, published
    if layout != "z-lab":
        raise ConfigError(unknown("layout", layout, ("speculators", "z-lab")))
    anchored = ["sample_from_anchor"] if dflash.from_anchor(head) else []
    refuse(layout, [*anchored, *(name for name in tensors if name.startswith(("d2t", "markov", "conf")))])
    taps = [tap - 1 for tap in given[dflash.TAPS[0]]]
    refuse(layout, ["a tap of the embeddings"] if min(taps) < 0 else [])
    own = {"mask_token_id": given["mask_token_id"], dflash.TAPS[1]: taps}
    if given.get("sliding_window_non_causal", True):
        own["causal"] = False
    outer = {"architectures": [dflash.ARCHITECTURE], "block_size": given["block_size"], "dflash_config": own}
    return {**given["transformer_layer_config"], **outer}, tensors


def _of_z_lab(head: Head, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config of a z-lab head, under our names, in the format of speculators."""
    config, confidence = plain(head.config), tensors.get("confidence_head.proj.weight")
    rank = tensors["markov_w1.weight"].shape[1] if "markov_w1.weight" in tensors else 0
    spark: dict[str, Any] = {}
    if rank or confidence is not None:
        spark = {"markov_rank": rank, "markov_head_type": config.get("markov_head_type", "vanilla")}
        wide = confidence is not None and confidence.shape[1] > tensors["norm.weight"].shape[0]
        spark |= {"enable_confidence_head": confidence is not None, "confidence_head_with_markov": wide}
    if dflash.TAPS[1] not in config:
        raise ConfigError(f"{head.name!r} does not list its {dflash.TAPS[1]}: add them to its config.")
    causal, kinds = config.get("is_causal", config.get("causal")), config.get("layer_types") or ()
    if causal and {*kinds} != {dflash.SLIDING}:
        raise ConfigError("a head whose blocks are causal in all layers can be written as 'z-lab' only.")
    anchored, block = dflash.from_anchor(head), config["block_size"]
    kind = dflash.SPARK if spark else dflash.TYPE
    return {
        **spark,
        "architectures": [dflash.ARCHITECTURE],
        "speculators_model_type": kind,
        "block_size": block,
        "mask_token_id": config["mask_token_id"],
        dflash.TAPS[0]: [tap + 1 for tap in config[dflash.TAPS[1]]],
        "sliding_window_non_causal": causal is False,
        "sample_from_anchor": anchored,
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "d2t" in tensors else config.get("vocab_size"),
        "transformer_layer_config": {key: value for key, value in config.items() if key not in OUTER},
        "speculators_config": speculators_config(kind, block - (not anchored)),
    }


def _redrafter(head: Head, layout: str) -> Files:
    ours = redrafter.FORMAT.translate(head)
    tensors, blocks = dense(ours), redrafter.blocks(ours)
    if layout == "tensorrt-llm":
        published = redrafter.CONVERTED.published
        tensors = {f"drafter.{published(name, blocks=blocks)}": tensors[name] for name in tensors}
    elif layout != "reference":
        raise ConfigError(unknown("layout", layout, ("reference", "tensorrt-llm")))
    return plain(head.config), tensors


CONVERSIONS: Mapping[str, Callable[[Head, str], Files]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
    "dflash": _dflash,
    "redrafter": _redrafter,
}
