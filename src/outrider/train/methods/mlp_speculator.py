"""IBM's and Arctic's MLP speculator (arXiv 2404.19124): cross entropy with the text, step by step.

The publication's first stage reads texts as they are (`regenerate=False`), its second the target's own
answers: two runs, the second with `init`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outrider.core.validate import FLAG, optional
from outrider.draft.mlp_speculator.layouts import exported
from outrider.draft.mlp_speculator.network import Network
from outrider.train.base import Method
from outrider.train.options import COUNT, TrainOptions


class MlpSpeculator(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """n_predict: number of future tokens.  inner: width of the recurrent state; None: the target's.
        tie_weights: all steps share their weights.  scale_input: the state is normalized first.
        """

        KINDS: ClassVar = {
            "n_predict": COUNT,
            "inner": optional(COUNT),
            "tie_weights": FLAG,
            "scale_input": FLAG,
        }

        n_predict: int = 3
        inner: int | None = None
        tie_weights: bool = True
        scale_input: bool = True

    export = staticmethod(exported)
    base_rate = 1e-3
    logits = False
    drafts: ClassVar = {}

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        inner = options.inner or spec.hidden
        return Network(
            spec.hidden, inner, spec.vocabulary, options.n_predict, options.tie_weights, options.scale_input
        )

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.n_predict))
