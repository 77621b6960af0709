"""P-EAGLE (arXiv 2602.01469): cross entropy with the target, all levels in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from outrider.core.validate import Count, Natural, whole
from outrider.draft.peagle import Network
from outrider.errors import ConfigError
from outrider.train.base import Method
from outrider.train.methods.eagle3 import tap_network
from outrider.train.options import MOST_DEPTH, Taps, TrainOptions


class PEagle(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers, inner: of the network; None: the target's inner.  depths: levels of a pass.
        draft_vocab_size: the most frequent tokens of the answers.  mask_token: id of the unknown tokens;
        None: the last one.  taps: the layers whose inputs are read; None: EAGLE-3's.
        """

        layers: Count = 4
        inner: Count | None = None
        depths: Annotated[int, whole(2, MOST_DEPTH)] = 8
        draft_vocab_size: Count = 32000
        mask_token: Natural | None = None
        taps: Taps | None = None

    base_rate = 1e-4
    drafts: ClassVar = {}

    def build(self) -> Network:
        options, vocabulary = self.options, self.target.vocabulary
        mask = vocabulary - 1 if options.mask_token is None else options.mask_token
        if mask >= vocabulary:
            raise ConfigError(f"mask_token {mask}: V of the target is {vocabulary}.")
        return tap_network(self, Network, mask=mask, layers=options.layers, depths=options.depths)
