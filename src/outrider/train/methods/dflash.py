"""DFlash and DSpark: layers that draft a block in one pass, cross entropy with the text weighted by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outrider.core.validate import optional, whole
from outrider.draft.dflash.network import Network
from outrider.errors import ConfigError
from outrider.train.base import Method
from outrider.train.methods.eagle3 import frequent, within
from outrider.train.options import COUNT, TAPS, TrainOptions


class DFlash(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers, inner: of the network.  block: tokens of a block, the pending one included.  mask_token:
        id of the unknown tokens; None: the last one.  taps: the layers whose inputs are read; None: three,
        spread as in the publication.  draft_vocab_size: most frequent tokens of the answers; None: all.
        markov: rank of DSpark's table of the token before; 0 without one.
        """

        KINDS: ClassVar = {
            "layers": COUNT,
            "inner": optional(COUNT),
            "block": whole(2),
            "mask_token": optional(whole(0)),
            "taps": optional(TAPS),
            "draft_vocab_size": optional(COUNT),
            "markov": whole(0),
        }

        layers: int = 2
        inner: int | None = None
        block: int = 8
        mask_token: int | None = None
        taps: Sequence[int] | None = None
        draft_vocab_size: int | None = None
        markov: int = 0

    base_rate = 6e-4
    logits = False
    drafts: ClassVar = {}

    def build(self) -> Network:
        options = self.options
        given: dict[str, Any] = {"layers": options.layers, "block": options.block, "markov": options.markov}
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
        if network.ids:
            network.lm_head.weight.data.copy_(self.outer.lm_head[list(network.ids)])
        return network

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.block - 1))
