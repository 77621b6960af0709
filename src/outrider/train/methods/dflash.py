"""DFlash, DSpark and Domino: layers that draft a block in one pass, cross entropy with the text weighted by
depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outrider.core.validate import FLAG, Kind, optional, whole
from outrider.draft.dflash.network import Network
from outrider.errors import ConfigError
from outrider.heads.corrections import MARKOV, VANILLA
from outrider.train.base import Method
from outrider.train.methods.eagle3 import frequent, within
from outrider.train.options import COUNT, TAPS, TrainOptions


class DFlash(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers, inner: of the network.  block: tokens of a block, the pending one included.  mask_token:
        id of the unknown tokens; None: the last one.  taps: the layers whose inputs are read; None: three,
        spread as in the publication.  draft_vocab_size: most frequent tokens of the answers; None: all.
        markov: rank of DSpark's table of the token before; 0 without one.  markov_kind: "vanilla", "gated" or
        "rnn".  confidence: with DSpark's predictor of the acceptance.  domino: width of Domino's recurrent
        state; 0 without one.
        """

        KINDS: ClassVar = {
            "layers": COUNT,
            "inner": optional(COUNT),
            "block": whole(2),
            "mask_token": optional(whole(0)),
            "taps": optional(TAPS),
            "draft_vocab_size": optional(COUNT),
            "markov": whole(0),
            "markov_kind": Kind(" or ".join(MARKOV), lambda value: value in MARKOV),
            "confidence": FLAG,
            "domino": whole(0),
        }

        layers: int = 2
        inner: int | None = None
        block: int = 8
        mask_token: int | None = None
        taps: Sequence[int] | None = None
        draft_vocab_size: int | None = None
        markov: int = 0
        markov_kind: str = VANILLA
        confidence: bool = False
        domino: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            kind = self.markov_kind != VANILLA
            if self.domino and (self.markov or kind or self.confidence or self.draft_vocab_size):
                raise ConfigError(
                    "domino: such heads have all tokens of the target, and nothing of DSpark: leave "
                    "draft_vocab_size, markov, markov_kind and confidence out."
                )
            if kind and not self.markov:
                raise ConfigError(
                    f"markov_kind {self.markov_kind!r}: there is no table; set markov to its rank."
                )

    base_rate = 6e-4
    logits = False
    drafts: ClassVar = {}

    def build(self) -> Network:
        options = self.options
        self.logits = options.confidence
        given: dict[str, Any] = {"layers": options.layers, "block": options.block, "markov": options.markov}
        given |= {"kind": options.markov_kind, "confidence": options.confidence, "domino": options.domino}
        if options.inner is not None:
            given["inner"] = options.inner
        if options.mask_token is not None:
            if options.mask_token >= self.target.vocabulary:
                raise ConfigError(
                    f"mask_token {options.mask_token}: V of the target is {self.target.vocabulary}."
                )
            given["mask"] = options.mask_token
        if options.taps is not None:
            given["taps"] = within(options.taps, self.target.decoder.spec.layers)
        if options.draft_vocab_size is not None:
            given["ids"] = frequent(self.counts, options.draft_vocab_size) or ()
        network = Network.like(self.target, **given)
        self.wanted = network.taps
        if options.domino and 0 in network.taps:
            raise ConfigError("taps: a Domino head reads outputs of layers, so taps must be 1 or more.")
        if network.ids:
            network.lm_head.weight.data.copy_(self.outer.lm_head[list(network.ids)])
        return network

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.block - 1))
