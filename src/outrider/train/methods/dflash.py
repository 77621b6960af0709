"""DFlash, DFlash 2, DFlare, DSpark and Domino: layers that draft a block in one pass, cross entropy with the
text weighted by depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Flag, Natural, one_of, whole
from outrider.draft import dflare, dflash, dflash2, domino, dspark
from outrider.draft.dspark import MARKOV, VANILLA
from outrider.draft.dspark import Network as DSparkNetwork
from outrider.errors import ConfigError
from outrider.heads.block_layouts import ARCHITECTURE, INPUT_TAPS, OUTPUT_TAPS, SLIDING
from outrider.heads.block_parts import ANCHORS, BlockNetwork
from outrider.heads.blocks import BlockDrafter
from outrider.heads.layouts import speculators
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain, refuse
from outrider.train.methods.eagle3 import frequent, within
from outrider.train.options import Taps, TrainOptions

OUTER = (  # keys of z-lab's configs beside those of a layer
    "target_layer_ids", "causal", "is_causal", "architectures", "projector_type", "markov_head_type",
    "auto_map", "num_target_layers", "torch_dtype", "dtype", "block_size", "mask_token_id", "markov_rank",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


class DFlash(Method):
    variants: ClassVar = {"dspark": "markov", "domino": "domino", "dflash2": "selector", "dflare": "fusion"}

    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers, inner: of the network.  block: tokens of a block, the pending one included.  mask_token:
        id of the unknown tokens; None: the last one.  taps: the layers whose inputs are read; None: three,
        spread as in the publication.  draft_vocab_size: most frequent tokens of the answers; None: all.
        markov: rank of DSpark's table of the token before; 0 without one.  markov_kind: "vanilla", "gated" or
        "rnn".  confidence: with DSpark's predictor of the acceptance.  domino: width of Domino's recurrent
        state; 0 without one.  selector: rank of DFlash 2's selector, beside its convolutions; 0 without.
        fusion: with DFlare's mix of the states for each layer.
        """

        layers: Count = 2
        inner: Count | None = None
        block: Annotated[int, whole(2)] = 8
        mask_token: Natural | None = None
        taps: Taps | None = None
        draft_vocab_size: Count | None = None
        markov: Natural = 0
        markov_kind: Annotated[str, one_of(*MARKOV)] = VANILLA
        confidence: Flag = False
        domino: Natural = 0
        selector: Natural = 0
        fusion: Flag = False

        def __post_init__(self) -> None:
            super().__post_init__()
            kind = self.markov_kind != VANILLA
            spark = self.markov or kind or self.confidence or self.draft_vocab_size
            others = [name for name in ("domino", "selector", "fusion") if getattr(self, name)]
            if others and (spark or len(others) > 1):
                raise ConfigError(
                    f"{others[-1]}: such heads have all tokens of the target, and nothing of DSpark or each "
                    "other: leave draft_vocab_size, markov, markov_kind and confidence out, and give one "
                    "of domino, selector and fusion."
                )
            if kind and not self.markov:
                raise ConfigError(
                    f"markov_kind {self.markov_kind!r}: there is no table; set markov to its rank."
                )

    base_rate = 6e-4
    logits, joins = False, True
    drafts: ClassVar = {}

    def logit_rows(self, tokens: int) -> int:
        return min(ANCHORS, tokens) * int(self.options.block)

    def build(self) -> BlockNetwork:
        options, target = self.options, self.target
        self.most = options.block - 1
        if options.mask_token is not None and options.mask_token >= target.vocabulary:
            raise ConfigError(f"mask_token {options.mask_token}: V of the target is {target.vocabulary}.")
        given = {name: getattr(options, name) for name in ("layers", "block", "inner")}
        given |= {"mask": options.mask_token, "taps": options.taps}
        if options.taps is not None:
            given["taps"] = within(options.taps, target.decoder.spec.layers)
        if options.draft_vocab_size is not None:
            given["ids"] = frequent(self.counts, options.draft_vocab_size) or ()
        network = self._network({name: value for name, value in given.items() if value is not None})
        self.wanted = network.taps
        if network.ids:
            network.lm_head.weight.data.copy_(self.outer.lm_head[list(network.ids)])
        return network

    def _network(self, given: Mapping[str, Any]) -> BlockNetwork:
        """The network of the method that the options are for."""
        options, target = self.options, self.target
        self.logits = options.confidence
        if options.markov or options.confidence:
            table = {"markov": options.markov, "kind": options.markov_kind, "confidence": options.confidence}
            return DSparkNetwork.like(target, **given, **table)
        network: BlockNetwork
        if options.domino:
            network = domino.Network.like(target, **given, width=options.domino)
        elif options.selector:
            network = dflash2.Network.like(target, **given, rank=options.selector)
        elif options.fusion:
            network = dflare.Network.like(target, **given)
        else:
            return dflash.Network.like(target, **given)
        if 0 in network.taps:
            raise ConfigError("taps: such a head reads outputs of layers, so taps must be 1 or more.")
        return network

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        z_lab_only: tuple[type[BlockDrafter], ...] = (domino.Domino, dflash2.DFlash2, dflare.DFlare)
        kinds: tuple[type[BlockDrafter], ...] = (dspark.DSpark, *z_lab_only, dflash.DFlash)
        drafter = next(kind for kind in kinds if kind.is_own(head))
        check_layout(layout, ("z-lab",) if drafter in z_lab_only else ("speculators", "z-lab"))
        ours, config = drafter.FORMAT.translate(head), head.config
        tensors, anchored = dense(ours), drafter.anchored(head)
        if drafter not in z_lab_only and "speculators_model_type" not in config:
            config = _of_z_lab(ours, tensors, anchored)
        if layout == "z-lab" and drafter not in z_lab_only:
            return _for_z_lab(config, tensors, anchored), tensors
        kept = {key: value for key, value in config.items() if key != "quantization_config"}
        published = drafter.FORMAT.layouts[0].published
        return kept, {published(name): tensor for name, tensor in tensors.items()}


def _for_z_lab(config: Mapping[str, Any], tensors: Mapping[str, Tensor], anchored: bool) -> dict[str, Any]:
    """The config, in z-lab's format, of a head in that of speculators.  Raises ConfigError if it has none."""
    unknown = ["sample_from_anchor"] if anchored else []
    unknown += [name for name in tensors if name.startswith(("d2t", "markov", "conf"))]
    taps = [tap - 1 for tap in config[INPUT_TAPS]]
    if min(taps) < 0:
        unknown.append("a tap of the embeddings")
    refuse("z-lab", unknown)
    own = {"mask_token_id": config["mask_token_id"], OUTPUT_TAPS: taps}
    if config.get("sliding_window_non_causal", True):
        own["causal"] = False
    outer = {"architectures": [ARCHITECTURE], "block_size": config["block_size"], "dflash_config": own}
    return {**config["transformer_layer_config"], **outer}


def _of_z_lab(head: Head, tensors: Mapping[str, Tensor], anchored: bool) -> dict[str, Any]:
    """The config of a z-lab head, under our names, in the format of speculators."""
    config = plain(head.config)
    spark = _dspark_config(config, tensors)
    if OUTPUT_TAPS not in config:
        raise ConfigError(f"{head.name!r} does not list its {OUTPUT_TAPS}: add them to its config.")
    causal, kinds = config.get("is_causal", config.get("causal")), config.get("layer_types") or ()
    if causal and {*kinds} != {SLIDING}:
        raise ConfigError("a head whose blocks are causal in all layers can be written as 'z-lab' only.")
    block = config["block_size"]
    own = {
        **spark,
        "block_size": block,
        "mask_token_id": config["mask_token_id"],
        INPUT_TAPS: [tap + 1 for tap in config[OUTPUT_TAPS]],
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "d2t" in tensors else config.get("vocab_size"),
        "sliding_window_non_causal": causal is False,
        "sample_from_anchor": anchored,
    }
    layer = {key: value for key, value in config.items() if key not in OUTER}
    return speculators("dspark" if spark else "dflash", ARCHITECTURE, block - (not anchored), layer, own)


def _dspark_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys about DSpark's table and predictor; empty for a head with neither."""
    confidence = tensors.get("confidence_head.proj.weight")
    rank = tensors["markov_w1.weight"].shape[1] if "markov_w1.weight" in tensors else 0
    if not rank and confidence is None:
        return {}
    hidden = tensors["norm.weight"].shape[0]
    return {
        "markov_rank": rank,
        "markov_head_type": config.get("markov_head_type", VANILLA),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[1] > hidden,
    }
