"""GRIFFIN (arXiv 2502.11018): EAGLE's loss over several steps, on paths that would be drafted."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.validate import Count, Flag
from outrider.draft.griffin import Network
from outrider.train.base import Method
from outrider.train.options import TrainOptions


class Griffin(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """inner: of the MLPs; None: the target's.  bias: of fc.  test_steps: steps in the loss."""

        inner: Count | None = None
        bias: Flag = True
        test_steps: Count = 3

    base_rate = 3e-5
    joins = True

    def logit_rows(self, tokens: int) -> int:
        steps: int = self.options.test_steps
        return tokens * steps

    def build(self) -> Network:
        vocabulary = self.target.decoder.spec.vocabulary
        return Network(self.sizes, vocabulary, self.options.bias, self.options.test_steps)
