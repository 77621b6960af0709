"""Kangaroo (arXiv 2404.18911): an adapter after the target's first layers, cross entropy with the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.core.validate import Count
from outrider.draft.kangaroo import Network, published_exit
from outrider.drafting.options import check_exit
from outrider.train.base import Method
from outrider.train.options import TrainOptions


class Kangaroo(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """early_exit: number of the target's layers that draft; None: 2, for 40 layers and more 3."""

        early_exit: Count | None = None

    base_rate = 5e-5
    joins = True
    drafts: ClassVar = {"tree": "chain", "exit_threshold": None}

    def build(self) -> Network:
        """The last norm begins as the target's."""
        spec, checkpoint = self.target.decoder.spec, self.target.checkpoint
        asked = self.options.early_exit
        layer = published_exit(spec.layers) if asked is None else asked
        network = Network(self.sizes, spec.vocabulary, check_exit(layer, spec.layers, checkpoint.name))
        self.wanted = (layer,)
        network.norm.weight.data.copy_(checkpoint.last_norm())
        return network
