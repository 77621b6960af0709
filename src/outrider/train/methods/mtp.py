"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437; FastMTP): cross entropy with the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.core.step import FINAL
from outrider.core.validate import FLAG, optional
from outrider.draft.mtp.layouts import exported
from outrider.draft.mtp.network import Network
from outrider.train.base import Method
from outrider.train.options import COUNT, TrainOptions


class Mtp(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers: prediction layers.  test_steps: depths in the loss; the last layer predicts those beyond.
        prenorm: they read states before the target's last norm.  inner: of the MLP; None: the target's.
        """

        KINDS: ClassVar = {"layers": COUNT, "test_steps": COUNT, "prenorm": FLAG, "inner": optional(COUNT)}

        layers: int = 1
        test_steps: int = 3
        prenorm: bool = False
        inner: int | None = None

    export = staticmethod(exported)
    base_rate = 1e-4

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        self.wanted = (spec.layers if options.prenorm else FINAL,)
        steps = max(options.test_steps, options.layers)
        return Network(self.sizes, spec.vocabulary, spec.layers, options.layers, steps, options.prenorm)
