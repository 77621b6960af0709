"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): smooth L1 of states, cross entropy of tokens.

The two share their weights and differ in the draft tree only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.core.validate import FLAG, optional
from outrider.draft.eagle.layouts import exported
from outrider.draft.eagle.network import Network
from outrider.train.base import Method
from outrider.train.options import COUNT, TrainOptions


class Eagle(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """inner: of the MLP; None: the target's.  bias: of fc; vLLM reads none."""

        KINDS: ClassVar = {"inner": optional(COUNT), "bias": FLAG}

        inner: int | None = None
        bias: bool = False

    export = staticmethod(exported)
    base_rate = 3e-5

    def build(self) -> Network:
        return Network(self.sizes, self.target.decoder.spec.vocabulary, bias=self.options.bias)
