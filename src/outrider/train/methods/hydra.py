"""Hydra and Hydra++ (arXiv 2402.05109): heads in sequence, cross entropy with the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.validate import Count, Flag
from outrider.draft.hydra import Network
from outrider.train.base import Method
from outrider.train.options import Fraction, TrainOptions


class Hydra(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  layers: of each head's MLP.  prefix: a layer over the text before
        the heads (Hydra++).  own: each head has an lm_head, as in the reference; otherwise all use the
        target's.  inner: of the prefix layer; None: the target's.
        """

        heads: Count = 4
        layers: Count = 4
        prefix: Flag = True
        own: Flag = True
        dropout: Fraction = 0.2
        inner: Count | None = None

    base_rate = 5e-4

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        self.most, self.joins = options.heads, not options.prefix and not options.dropout
        network = Network(
            spec.hidden, spec.vocabulary, options.heads, options.layers,
            self.sizes if options.prefix else None, options.dropout, options.own,
        )  # fmt: skip
        network.start(self.outer)
        return network
