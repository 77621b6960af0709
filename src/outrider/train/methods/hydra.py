"""Hydra and Hydra++ (arXiv 2402.05109): heads in sequence, cross entropy with the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outrider.core.validate import FLAG, optional
from outrider.draft.hydra.network import Network
from outrider.train.base import Method
from outrider.train.options import COUNT, FRACTION, TrainOptions


class Hydra(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  layers: of each head's MLP.  prefix: a layer over the text before
        the heads (Hydra++).  own: each head has an lm_head, as in the reference; otherwise all use the
        target's.  inner: of the prefix layer; None: the target's.
        """

        KINDS: ClassVar = {
            "heads": COUNT,
            "layers": COUNT,
            "prefix": FLAG,
            "own": FLAG,
            "dropout": FRACTION,
            "inner": optional(COUNT),
        }

        heads: int = 4
        layers: int = 4
        prefix: bool = True
        own: bool = True
        dropout: float = 0.2
        inner: int | None = None

    base_rate = 5e-4

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        network = Network(
            spec.hidden, spec.vocabulary, options.heads, options.layers,
            self.sizes if options.prefix else None, options.dropout, options.own,
        )  # fmt: skip
        network.start(self.outer)
        return network

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.heads))
