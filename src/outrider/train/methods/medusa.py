"""Medusa-1 (arXiv 2401.10774): heads on the last state, cross entropy with the text, decayed by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.core.validate import FLAG
from outrider.draft.medusa.layouts import exported
from outrider.draft.medusa.network import Network
from outrider.train.base import Method
from outrider.train.options import COUNT, TrainOptions


class Medusa(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  blocks: residual blocks of each.  own: each head has an lm_head,
        as in the reference; otherwise all use the target's.
        """

        KINDS: ClassVar = {"heads": COUNT, "blocks": COUNT, "own": FLAG}

        heads: int = 4
        blocks: int = 1
        own: bool = True

    export = staticmethod(exported)
    base_rate = 1e-3
    logits = False

    def build(self) -> Network:
        options = self.options
        return Network.beside(self.outer, options.heads, options.blocks, options.own)

    def speculation(self, folder: Any, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.heads))
