"""Published files of block-parallel heads, and the meaning of their configs.

All of them have Qwen3 blocks `layers.{i}`, `fc`, `hidden_norm` and `norm`; their configs differ:

                          speculators (vLLM)               z-lab, SpecForge (SGLang, vLLM)
    sizes of a block      in transformer_layer_config      flat
    taps                  aux_hidden_state_layer_ids:      dflash_config.target_layer_ids:
                          inputs of layers                 outputs of layers: i is the input of i + 1
    mask                  mask_token_id                    dflash_config.mask_token_id
    block                 block_size                       block_size
    a window's rows see   the block, if                    the block up to themselves, unless
                          sliding_window_non_causal        dflash_config.causal is false
    all rows see                                           the block up to themselves, if
                                                           dflash_config.causal, or causal_head
                                                           (JetSpec), is true
    the rest              d2t, t2d, lm_head, sample_from_anchor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.checkpoints.heads import Head
from outrider.core.validate import whole
from outrider.errors import ModelError
from outrider.heads.layouts import BLOCK_NAMES, UNCHANGED, HeadFormat, Layout, Rows, flat, numbers
from outrider.heads.outer import checked_taps

SLIDING = "sliding_attention"
DEFAULT_THETA = 1000000.0  # vLLM's
INPUT_TAPS, OUTPUT_TAPS = "aux_hidden_state_layer_ids", "target_layer_ids"  # of layers with these numbers
PREFIXES = ("model.", "draft_model.")
ARCHITECTURE = "DFlashDraftModel"  # also of heads that correct their logits
ROWS = (("verifier_{rest}", None), ("rotary_emb.{rest}", None), ("draft_id_to_target_id", "d2t"), *UNCHANGED)
SIGNS = ("hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_norm.weight")


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
        return self.block - (not self.from_anchor)

    @staticmethod
    def of(head: Head, anchored: bool, target_layers: int, tap_offset: int | None = None) -> BlockLayout:
        """Layout from a config.

        head:       under our names, with a flat config
        anchored:   `from_anchor` of it
        tap_offset: added to the file's layer numbers; None follows the file's convention

        Raises ModelError for a config that does not fit the tensors or the target.
        """
        config, layers = head.config, len(numbers(head, "layers.{i}.{rest}"))
        sliding = _sliding(head, layers)
        window = config.get("swa_window_size", config.get("sliding_window")) or 0
        block: Any = config.get("block_size")
        mask: Any = config.get("mask_token_id")
        whole(1).check(block, f"block_size of {head.name!r}", ModelError)
        whole(0).check(mask, f"mask_token_id of {head.name!r}", ModelError)
        if any(sliding):
            whole(1).check(window, f"sliding_window of {head.name!r}", ModelError)
        taps = _taps(head, target_layers, layers, tap_offset)
        if block + anchored < 2:
            raise ModelError(f"{head.name!r} has a block of 1 token, which drafts nothing.")
        windows = tuple(window if slides else 0 for slides in sliding)
        causal = tuple(_causal(config, slides) for slides in sliding)
        return BlockLayout(taps, block, mask, anchored, windows, causal)


def from_anchor(head: Head, usual: bool = False) -> bool:
    """Whether the anchor's row predicts, too: each the token after it.  usual: without such a key."""
    config = flat(head.config)
    return bool(config.get("sample_from_anchor", config.get("shift_label", usual)))


def _sliding(head: Head, layers: int) -> list[bool]:
    """Whether each layer attends to a window.  Raises ModelError for a config of fewer layers."""
    kinds = head.config.get("layer_types") or []
    if SLIDING not in kinds:
        return [bool(head.config.get("use_swa"))] * layers
    if len(kinds) < layers:
        raise ModelError(f"{head.name!r} has {layers} layers, and its config has {len(kinds)} layer_types.")
    return [kind == SLIDING for kind in kinds[:layers]]


def _causal(config: Mapping[str, Any], sliding: bool) -> bool:
    """Whether the rows of a layer attend to their block up to themselves only."""
    given = config.get("is_causal", config.get("causal", config.get("causal_head")))
    if given is not None:
        return bool(given)
    silent = "speculators_model_type" in config  # older files lack the key and are non-causal
    return sliding and not config.get("sliding_window_non_causal", silent)


def _taps(head: Head, target_layers: int, layers: int, offset: int | None) -> tuple[int, ...]:
    """The states that the head reads, as inputs of the target's layers."""
    key, own = (INPUT_TAPS, 0) if INPUT_TAPS in head.config else (OUTPUT_TAPS, 1)
    listed = head.config.get(key, spread(target_layers, layers))
    return checked_taps(head, listed, own if offset is None else offset, target_layers, key)


def spread(target_layers: int, taps: int) -> list[int]:
    """The layers whose outputs a head reads by default: from the second to the last but two, evenly."""
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]


def kind_of(head: Head) -> str | None:
    """The name of this kind of block in the config; None without one."""
    config = flat(head.config)
    kind: str | None = config.get("projector_type") or config.get("speculators_model_type")
    return kind


def _with_theta(head: Head) -> Head:
    if head.config.get("rope_theta") or head.config.get("rope_parameters"):
        return head
    return replace(head, config={**head.config, "rope_theta": DEFAULT_THETA})


def block_format(
    kinds: str,
    rows: Rows = (),
    known: str = "",
    variants: tuple[tuple[str, str], ...] = (),
    prefixes: tuple[str, ...] = (),
    anchored: Callable[[Head], bool] = from_anchor,
    refused: Callable[[Head], str] = lambda _: "",
    states: tuple[tuple[str, int], ...] = (),
) -> HeadFormat:
    """The format of a block with more tensors than a plain one has.  anchored: its `from_anchor`.  states:
    tensors with the width of one state, if there is no fc over all."""

    def refusal(head: Head) -> str:
        if not head.config.get("is_neox_style", True):
            return "it rotates its heads in neighbouring pairs (is_neox_style false)"
        return refused(head)

    def depth(head: Head) -> int | None:
        block = flat(head.config).get("block_size")
        return block - (not anchored(head)) if isinstance(block, int) else None

    def published(head: Head) -> bool:
        return "speculators_model_type" in head.config

    table, starts = (*rows, *ROWS), (*PREFIXES, *prefixes)
    return HeadFormat(
        (
            Layout("speculators", ("hidden_norm.weight",), table, starts, published),
            Layout("z-lab, SpecForge", ("hidden_norm.weight",), table, starts),
        ),
        hidden=states or (("fc.weight", 1),),
        vocabulary=("lm_head.weight",),
        taps=() if states else (INPUT_TAPS, OUTPUT_TAPS),
        depth=depth,
        known=rf"(fc|hidden_norm|norm|lm_head|embed_tokens)\.(weight|bias)|d2t|t2d|"
        rf"layers\.\d+\.({BLOCK_NAMES}){known and f'|{known}'}",
        variants=(*variants, ("sink", "attention sinks")),
        kinds=f"{kinds}|{ARCHITECTURE}",
        keys=("dflash_config",),
        refused=refusal,
        finish=_with_theta,
    )
