"""An exit after some of the target's layers, with its own norm: cross entropy with the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.validate import Count
from outrider.draft.layerskip.exit_head import Network
from outrider.drafting.options import check_exit
from outrider.train.base import Method
from outrider.train.options import TrainOptions


class LayerSkip(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """early_exit: number of the target's layers that draft; None: a third of them."""

        early_exit: Count | None = None

    base_rate = 3e-4

    def build(self) -> Network:
        spec, checkpoint = self.target.decoder.spec, self.target.checkpoint
        layer = max(1, spec.layers // 3) if self.options.early_exit is None else self.options.early_exit
        self.wanted = (check_exit(layer, spec.layers, checkpoint.name),)
        return Network(spec.hidden, layer, checkpoint.last_norm(), self.sizes.eps)

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        given = {"method": "layerskip", "exit_head": str(folder), "exit_threshold": None}
        return {**given, "num_speculative_tokens": depth}
