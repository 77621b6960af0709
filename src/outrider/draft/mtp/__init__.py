"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608): layers trained and
shipped with a target, one for each level (heads/layered.py).

The only layer of a file with one recurs (FastMTP, arXiv 2509.18362), as the last of several does after its
level.

Other engines zero the embedding at position 0, because they place pairs at their tokens and no state
precedes token 0. Here no pair has token 0, so nothing is zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outrider.checkpoints.heads import Head
from outrider.core.validate import Flag
from outrider.draft.mtp.layouts import FORMAT
from outrider.draft.mtp.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.layered import LayeredNet, LayerForwards
from outrider.heads.recurrent import Forwards, Reading, Recurrent, RecurrentOptions

RECURRENT_DEPTH = 3  # levels that a single layer drafts


class Mtp(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"MTP layer": {"model": "builtin-mtp", "tree": "chain", "num_speculative_tokens": 2}}
    net: LayeredNet

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """model: the target's own layers unless given.  prenorm: whether the layers read states before the
        last norm (None: as the file's producer does)."""

        prenorm: Flag | None = None

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, _own(target) if head is None and not options.model else head)
        count = self.net.count
        self.depth, self.overlap = RECURRENT_DEPTH if count == 1 else count, count - 1
        self.needs = self.needs._replace(lookbehind=count)

    def forwards(self, readings: Sequence[Reading]) -> Forwards:
        return LayerForwards(self, readings)

    @classmethod
    def claims(cls, head: Head) -> int:
        """0 for a whole language model, 2 for layers of Qwen3-Next, which are refused by name."""
        if "model.norm.weight" in head:
            return 0
        return 2 if "mtp.fc.weight" in head else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a wide tree that is deeper than their number."""
        drafter = cls(cls.Options(nodes=24, top_k=3), target, random_head(Network.like, target, layers=2))
        drafter.depth = 4
        return drafter

    def network(self) -> LayeredNet:
        given, in_file = self.options.prenorm, self.head.config["prenorm"]
        return LayeredNet(self.reader, self.target, in_file if given is None else given)


def _own(target: Target) -> Head:
    """The target's own checkpoint."""
    checkpoint = target.checkpoint
    if checkpoint.gguf is not None:
        raise ModelError(
            f"{checkpoint.name!r} is a GGUF file, whose prediction layers are not read: give a folder with "
            "them as 'model'."
        )
    return replace(Head.open(str(checkpoint.folder)), name=checkpoint.name)
