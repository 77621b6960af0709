"""DFlash and DSpark: layers that draft a block in one pass, cross entropy with the text weighted by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outrider.draft.dflash.network import Network
from outrider.train.base import Method
from outrider.train.methods.eagle3 import frequent
from outrider.train.options import TrainOptions


class DFlash(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers, inner: of the network.  block: tokens of a block, the pending one included.  mask_token:
        id of the unknown tokens; None: the last one.  taps: the layers whose inputs are read; None: three,
        spread as in the publication.  draft_vocab_size: most frequent tokens of the answers; None: all.
        markov: rank of DSpark's table of the token before; 0 without one.
        """

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
            given["mask"] = options.mask_token
        if options.taps is not None:
            given["taps"] = tuple(options.taps)
        if options.draft_vocab_size is not None:
            given["ids"] = frequent(self.counts, options.draft_vocab_size) or ()
        network = Network.like(self.target, **given)
        self.wanted = network.taps
        if network.shape.ids:
            network.lm_head.weight.data.copy_(self.outer.lm_head[list(network.shape.ids)])
        return network

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.block - 1))
