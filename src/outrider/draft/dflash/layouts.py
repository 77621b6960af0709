"""Published files of block-parallel heads, and export.

All of them have Qwen3 blocks `layers.{i}`, `fc`, `hidden_norm` and `norm`; their configs differ:

                          speculators (vLLM)               z-lab, SpecForge (SGLang, vLLM)
    sizes of a block      in transformer_layer_config      flat
    taps                  aux_hidden_state_layer_ids:      dflash_config.target_layer_ids:
                          inputs of layers                 outputs of layers: i is the input of i + 1
    mask                  mask_token_id                    dflash_config.mask_token_id
    block                 block_size                       block_size
    a window's rows see   the block, if                    the block up to themselves, unless
                          sliding_window_non_causal        dflash_config.causal is false
    the rest              d2t, t2d, lm_head, sample_from_anchor
    DSpark                markov_w1 [V, rank], markov_w2 [Vd, rank]; it samples from the anchor by default
                          markov_head_type                 dflash_config.markov_head_type,
                                                           projector_type "dspark"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.layouts import HeadFormat, Layout

ARCHITECTURE, TYPE, SPARK = "DFlashDraftModel", "dflash", "dspark"
SLIDING = "sliding_attention"
EXPORTED = ("speculators", "z-lab")
OURS = re.compile(
    r"(fc|hidden_norm|norm|lm_head|embed_tokens|markov_w[12]|"
    r"layers\.\d+\.(input_layernorm|post_attention_layernorm|"
    r"self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj))\.(weight|bias)|d2t|t2d"
)
UNSUPPORTED = {
    "markov": "DSpark with a gated or recurrent table",
    "gru|domino": "Domino",
    "selector": "DFlash 2",
    "fusion": "DFlare",
    "sink": "attention sinks",
}
DEFAULT_THETA = 1000000.0  # vLLM's
ROWS = (
    ("verifier_{rest}", None),
    ("rotary_emb.{rest}", None),
    ("confidence_head.{rest}", None),  # how likely each draft token is; blocks are proposed whole
    ("markov_head.markov_w{i}.{kind}", "markov_w{i}.{kind}"),
    ("draft_id_to_target_id", "d2t"),
    ("{rest}", "{rest}"),
)
PREFIXES = ("model.", "draft_model.")


def _of_speculators(head: Head) -> bool:
    return "speculators_model_type" in head.config


def _tap_count(head: Head) -> int:
    """The number of the target's states that `fc` reads: three unless the config lists them."""
    own = head.config.get("dflash_config") or {}
    lists = (
        head.config.get("aux_hidden_state_layer_ids"),
        own.get("target_layer_ids"),
        head.config.get("target_layer_ids"),
    )
    return next((len(ids) for ids in lists if isinstance(ids, list)), 3)


def _block_depth(head: Head) -> int | None:
    """The number of draft tokens of a block, None if the config does not contain it."""
    own = head.config.get("dflash_config") or {}
    block = head.config.get("block_size", own.get("block_size"))
    return block - (not from_anchor(head)) if isinstance(block, int) else None


FORMAT = HeadFormat(
    (
        Layout("speculators", ("hidden_norm.weight",), ROWS, PREFIXES, _of_speculators),
        Layout("z-lab, SpecForge", ("hidden_norm.weight",), ROWS, PREFIXES),
    ),
    hidden=(("fc.weight", 1),),
    vocabulary=("lm_head.weight",),
    taps=_tap_count,
    depth=_block_depth,
)


@dataclass(frozen=True)
class BlockLayout:
    """Settings of a block from the config.

    taps: as `Needs.states` numbers them.
    block: number of tokens, the anchor included.
    mask: token id of the others.
    from_anchor: every row, the anchor's included, predicts the next token; otherwise each mask predicts its
    own.
    windows: attention window of every layer in tokens, 0 for none.
    causal: for every layer, whether the rows of a block attend only up to themselves.
    """

    taps: tuple[int, ...]
    block: int
    mask: int
    from_anchor: bool
    windows: tuple[int, ...]
    causal: tuple[bool, ...]

    @property
    def levels(self) -> int:
        """The number of draft tokens of a block."""
        return self.block if self.from_anchor else self.block - 1

    @staticmethod
    def of(head: Head, target_layers: int, tap_offset: int | None = None) -> BlockLayout:
        """Layout from a config.

        head:       as `translate` returns it
        tap_offset: added to the file's layer numbers; None follows the file's convention

        Raises ModelError for a config that does not fit the tensors or the target.
        """
        config, own = head.config, head.config.get("dflash_config") or {}
        if not config.get("is_neox_style", True):
            raise ModelError(
                f"{head.name!r} rotates its heads in neighbouring pairs (is_neox_style false), "
                "which is not supported."
            )
        taps = _taps(head, target_layers, tap_offset)
        block = _number(head, "block_size", config.get("block_size", own.get("block_size")), least=1)
        mask = _number(head, "mask_token_id", config.get("mask_token_id", own.get("mask_token_id")), least=0)
        anchored = from_anchor(head)
        if block + anchored < 2:
            raise ModelError(f"{head.name!r} has a block of {block} token, which drafts nothing.")
        sliding = _sliding(head)
        window = own.get("swa_window_size", config.get("sliding_window")) or 0
        if any(sliding):
            _number(head, "sliding_window", window, least=1)
        causal = tuple(_causal(config, own, one) for one in sliding)
        return BlockLayout(taps, block, mask, anchored, tuple(window * one for one in sliding), causal)


def translate(head: Head) -> Head:
    """The head under our names, with a flat config.

    Raises ModelError if it has tensors of unknown meaning.
    """
    config = {"rope_theta": None, **(head.config.get("transformer_layer_config") or {}), **head.config}
    if not (config["rope_theta"] or config.get("rope_parameters")):
        config["rope_theta"] = DEFAULT_THETA
    ours = replace(FORMAT.translate(head), config=config)
    if strange := sorted(name for name in ours if not OURS.fullmatch(name)):
        names = " ".join(strange)
        kind = next((f" ({label})" for part, label in UNSUPPORTED.items() if re.search(part, names)), "")
        raise ModelError(
            f"{head.name!r} is another kind of block-parallel head{kind}, which is not supported: it has "
            f"{len(strange)} tensors beyond the plain ones: {', '.join(strange[:6])}."
        )
    own = config.get("dflash_config") or {}
    markov = config.get("markov_head_type", own.get("markov_head_type")) or "vanilla"
    if markov != "vanilla" and "markov_w1.weight" in ours:
        raise ModelError(f"{head.name!r} has a {markov} Markov head; only a vanilla one is supported.")
    return ours


def claims_of(head: Head) -> int:
    """2: a norm over the taps beside the layers, and normed attention heads; 1: by its config; 0: another
    kind of head."""
    ours = FORMAT.translate(head)
    signs = ("hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_norm.weight")
    if all(name in ours for name in signs) and "layers.0.hidden_norm.weight" not in ours:
        return 2
    named = {head.config.get("speculators_model_type"), *(head.config.get("architectures") or [])}
    return int(bool(named & {TYPE, SPARK, ARCHITECTURE}) or "dflash_config" in head.config)


def from_anchor(head: Head) -> bool:
    """Whether the anchor's row predicts, too, so that each row predicts the token after it.

    DSpark's do unless the config disables it.
    """
    config, own = head.config, head.config.get("dflash_config") or {}
    named = SPARK in (config.get("speculators_model_type"), own.get("projector_type"))
    spark = named or any(name.endswith("markov_w1.weight") for name in head)
    return bool(config.get("sample_from_anchor", own.get("sample_from_anchor", spark)))


def _layer_count(head: Head) -> int:
    return len({name.split(".")[1] for name in head if name.startswith("layers.")})


def _sliding(head: Head) -> list[bool]:
    """Whether each layer has a sliding window."""
    layers, own = _layer_count(head), head.config.get("dflash_config") or {}
    kinds = list(head.config.get("layer_types") or [])
    if SLIDING not in kinds:
        kinds = [SLIDING if own.get("use_swa") else "full_attention"] * layers
    if len(kinds) < layers:
        raise ModelError(f"{head.name!r} has {layers} layers, and its config has {len(kinds)} layer_types.")
    return [kind == SLIDING for kind in kinds[:layers]]


def _causal(config: Mapping[str, Any], own: Mapping[str, Any], sliding: bool) -> bool:
    """Whether the rows of a layer attend to their block up to themselves only."""
    for flag in (config.get("is_causal"), own.get("causal")):
        if flag is not None:
            return bool(flag)
    if "speculators_model_type" in config:  # older files lack the key and are non-causal
        return sliding and not config.get("sliding_window_non_causal", True)
    return sliding


def _taps(head: Head, target_layers: int, offset: int | None) -> tuple[int, ...]:
    """The states that the head reads, as inputs of the target's layers."""
    ids, convention = head.config.get("aux_hidden_state_layer_ids"), 0
    if ids is None:
        own, convention = head.config.get("dflash_config") or {}, 1
        ids = own.get("target_layer_ids", head.config.get("target_layer_ids"))
    if ids is None:
        ids = spread(target_layers, _layer_count(head))
    taps = tuple(one + (convention if offset is None else offset) for one in ids)
    if not taps or not all(isinstance(tap, int) and 0 <= tap <= target_layers for tap in taps):
        raise ModelError(
            f"{head.name!r} does not fit the target: it reads the inputs of the layers {list(taps)}, "
            "and the target "
            f"has {target_layers} ({target_layers} is the output of the last one); the file says {list(ids)}."
        )
    return taps


def spread(target_layers: int, taps: int) -> list[int]:
    """The layers whose outputs a head reads by default: from the second to the last but two, evenly."""
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
    """Config and tensors for vLLM ("speculators") or SGLang and SpecForge ("z-lab").

    config: of `Network.config`, which is in the format of speculators.  verifier: the target's name.  Raises
    ConfigError for a head that a layout cannot express.
    """
    if layout not in EXPORTED:
        raise ConfigError(unknown("layout", layout, EXPORTED))
    if layout == "speculators":
        outer = config["speculators_config"]
        named = {**outer, "verifier": {**outer["verifier"], "name_or_path": verifier}}
        return {**config, "speculators_config": named}, dict(tensors)
    if "d2t" in tensors or config["sample_from_anchor"] or config["speculators_model_type"] == SPARK:
        raise ConfigError(
            "a head with a vocabulary or a Markov head, or one that samples from the anchor, "
            "can be written as "
            '"speculators" only.'
        )
    taps = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    if min(taps) < 0:
        raise ConfigError('a head that reads the embeddings can be written as "speculators" only.')
    own: dict[str, Any] = {"mask_token_id": config["mask_token_id"], "target_layer_ids": taps}
    if config["sliding_window_non_causal"]:
        own["causal"] = False
    return {
        **config["transformer_layer_config"],
        "architectures": [ARCHITECTURE],
        "block_size": config["block_size"],
        "dflash_config": own,
    }, dict(tensors)
