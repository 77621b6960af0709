"""The published files of block-parallel heads, and how to write them.

All of them have Qwen3 blocks `layers.{i}`, `fc`, `hidden_norm` and `norm`; their configs differ:

                          speculators (vLLM)               z-lab, SpecForge (SGLang, vLLM)
    sizes of a block      in transformer_layer_config      flat
    taps                  aux_hidden_state_layer_ids:      dflash_config.target_layer_ids:
                          what enters layer i              what leaves layer i, which enters layer i + 1
    mask                  mask_token_id                    dflash_config.mask_token_id
    block                 block_size                       block_size
    a window's rows see   the block, if                    the block up to themselves, unless
                          sliding_window_non_causal        dflash_config.causal is false
    the rest              d2t, t2d, lm_head, sample_from_anchor
    DSpark                markov_w1 [V, rank], markov_w2 [Vd, rank]; it samples from the anchor unless it says otherwise
                          markov_head_type                 dflash_config.markov_head_type, projector_type "dspark"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError, unknown

ARCHITECTURE, TYPE, SPARK = "DFlashDraftModel", "dflash", "dspark"
SLIDING = "sliding_attention"
LAYOUTS = ("speculators", "z-lab")
LAYER = r"layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj)"
KNOWN = re.compile(rf"(fc|hidden_norm|norm|lm_head|embed_tokens|markov_w[12]|{LAYER})\.(weight|bias)|d2t|t2d")
OTHERS = {
    "markov": "DSpark with a gated or recurrent table", "gru|domino": "Domino", "selector": "DFlash 2", "fusion": "DFlare",
    "sink": "attention sinks",
}  # fmt: skip
UNREAD = (
    "verifier_",
    "rotary_emb.",
    "confidence_head.",
)  # the last says how likely guesses are: a block is guessed whole
THETA = 1000000.0  # where a file does not say: what vLLM reads it with


@dataclass(frozen=True)
class Layout:
    """taps: as `Needs.states` numbers them.  block: tokens, the anchor included.  mask: the id of the others.  from_anchor: every row, the
    anchor's included, says the next token; otherwise each mask says its own.  windows, causal: of every layer; 0 is no window."""

    taps: tuple[int, ...]
    block: int
    mask: int
    from_anchor: bool
    windows: tuple[int, ...]
    causal: tuple[bool, ...]

    @property
    def levels(self) -> int:
        """How many tokens a block guesses."""
        return self.block if self.from_anchor else self.block - 1


def translate(head: Head) -> Head:
    """Under our names, its config flat.  Raises ModelError where there are tensors whose meaning is not known here."""

    def change(name: str) -> str | None:
        name = re.sub(r"^((model|draft_model)\.)?(markov_head\.(?=markov_w))?", "", name).replace(
            "draft_id_to_target_id", "d2t"
        )
        return None if name.startswith(UNREAD) else name

    config = {"rope_theta": None, **(head.config.get("transformer_layer_config") or {}), **head.config}
    if not (config["rope_theta"] or config.get("rope_parameters")):
        config["rope_theta"] = THETA
    found = replace(head.renamed(change), config=config)
    if strange := sorted(name for name in found if not KNOWN.fullmatch(name)):
        kind = next((label for part, label in OTHERS.items() if re.search(part, " ".join(strange))), None)
        raise ModelError(
            f"{head.name!r} is another kind of block-parallel head{f' ({kind})' if kind else ''}, which is not supported: it has "
            f"{len(strange)} tensors beyond the plain ones: {', '.join(strange[:6])}."
        )
    markov = (
        config.get("markov_head_type", (config.get("dflash_config") or {}).get("markov_head_type"))
        or "vanilla"
    )
    if markov != "vanilla" and "markov_w1.weight" in found:
        raise ModelError(f"{head.name!r} has a {markov} Markov head; only a vanilla one is supported.")
    return found


def claims_of(head: Head) -> int:
    """As `Drafter.claims`: the norm over the taps stands beside the layers, and the heads of these are normed."""
    names = {re.sub(r"^(model|draft_model)\.", "", name) for name in head}
    if {
        "hidden_norm.weight",
        "fc.weight",
        "layers.0.self_attn.q_norm.weight",
    } <= names and "layers.0.hidden_norm.weight" not in names:
        return 2
    said = [head.config.get("speculators_model_type"), *(head.config.get("architectures") or [])]
    return int(bool({TYPE, SPARK, ARCHITECTURE}.intersection(said)) or "dflash_config" in head.config)


def read(head: Head, target_layers: int, tap_offset: int | None = None) -> Layout:
    """head: as `translate` gives it.  tap_offset: instead of what the file's own convention adds to its numbers of layers."""
    config, own = head.config, head.config.get("dflash_config") or {}
    layers = len({name.split(".")[1] for name in head if name.startswith("layers.")})
    if not config.get("is_neox_style", True):
        raise ModelError(
            f"{head.name!r} turns its heads in neighbouring pairs (is_neox_style false), which is not supported."
        )
    taps = _taps(head, target_layers, tap_offset)
    block, mask = (
        _number(head, key, config.get(key, own.get(key)), least)
        for key, least in (("block_size", 1), ("mask_token_id", 0))
    )
    anchored = from_anchor(head)
    if block + anchored < 2:
        raise ModelError(f"{head.name!r} has a block of {block} token, which guesses nothing.")
    kinds = list(config.get("layer_types") or [])
    if SLIDING not in kinds:
        kinds = [SLIDING if own.get("use_swa") else "full_attention"] * layers
    if len(kinds) < layers:
        raise ModelError(
            f"{head.name!r} has {layers} layers, and its config says of {len(kinds)} what they see."
        )
    sliding = [kind == SLIDING for kind in kinds[:layers]]
    window = own.get("swa_window_size", config.get("sliding_window")) or 0
    if any(sliding):
        _number(head, "sliding_window", window, 1)
    return Layout(
        taps,
        block,
        mask,
        anchored,
        tuple(window * one for one in sliding),
        tuple(_causal(config, own, one) for one in sliding),
    )


def from_anchor(head: Head) -> bool:
    """Whether the anchor's row guesses, too, so that each row says the token after it: what the file says, or else DSpark's rows do."""
    config, own = head.config, head.config.get("dflash_config") or {}
    named_so = SPARK in (config.get("speculators_model_type"), own.get("projector_type"))
    spark = named_so or any(name.endswith("markov_w1.weight") for name in head)
    return bool(config.get("sample_from_anchor", own.get("sample_from_anchor", spark)))


def _causal(config: Mapping[str, Any], own: Mapping[str, Any], sliding: bool) -> bool:
    """Whether the rows of a layer see their block up to themselves only."""
    for said in (config.get("is_causal"), own.get("causal")):
        if said is not None:
            return bool(said)
    if "speculators_model_type" in config:  # older files do not say it, and were read as if it were so
        return sliding and not config.get("sliding_window_non_causal", True)
    return sliding


def _taps(head: Head, target_layers: int, offset: int | None) -> tuple[int, ...]:
    ids, ours = head.config.get("aux_hidden_state_layer_ids"), 0
    if ids is None:
        own, ours = head.config.get("dflash_config") or {}, 1
        ids = own.get("target_layer_ids", head.config.get("target_layer_ids"))
    if ids is None:
        ids = spread(target_layers, len({name.split(".")[1] for name in head if name.startswith("layers.")}))
    taps = tuple(one + (ours if offset is None else offset) for one in ids)
    if not taps or not all(isinstance(tap, int) and 0 <= tap <= target_layers for tap in taps):
        raise ModelError(
            f"{head.name!r} does not fit the target: it reads what enters the layers {list(taps)}, and the target has {target_layers} "
            f"({target_layers} is what leaves the last one); its own numbers are {list(ids)}."
        )
    return taps


def spread(target_layers: int, taps: int) -> list[int]:
    """Which layers' output a head reads that does not say it: from the second to the last but two, evenly."""
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]


def _number(head: Head, key: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"{key} of {head.name!r} must be a whole number of at least {least}, got {value!r}.")
    return value


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str, verifier: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) as vLLM ("speculators") or SGLang and SpecForge ("z-lab") read them.

    config: as `Network.config` gives it, which is that of speculators.  verifier: the target's name.  Raises ConfigError where a layout
    cannot say what a head is.
    """
    if layout not in LAYOUTS:
        raise ConfigError(unknown("layout", layout, LAYOUTS))
    if layout == "speculators":
        told = {
            **config["speculators_config"],
            "verifier": {**config["speculators_config"]["verifier"], "name_or_path": verifier},
        }
        return {**config, "speculators_config": told}, dict(tensors)
    if "d2t" in tensors or config["sample_from_anchor"] or config["speculators_model_type"] == SPARK:
        raise ConfigError(
            'a head with a vocabulary or a Markov head, or one that samples from the anchor, can be written as "speculators" only.'
        )
    taps = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    if min(taps) < 0:
        raise ConfigError('a head that reads the embeddings can be written as "speculators" only.')
    inner: dict[str, Any] = {"mask_token_id": config["mask_token_id"], "target_layer_ids": taps}
    if config["sliding_window_non_causal"]:
        inner["causal"] = False
    flat = {
        **config["transformer_layer_config"],
        "architectures": [ARCHITECTURE],
        "block_size": config["block_size"],
        "dflash_config": inner,
    }
    return flat, dict(tensors)
