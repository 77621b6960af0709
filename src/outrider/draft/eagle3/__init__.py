"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on the inputs of three layers of the target.

It predicts x_t+2 from the states at t and the token x_t+1, over a vocabulary of its own.  For the
next draft token its own output takes the place of the state.  Network: heads/tapped.py; K/V:
heads/recurrent.py; trees: heads/trees.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.checkpoints.heads import Head
from outrider.draft.eagle3.layouts import FORMAT
from outrider.draft.eagle3.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.recurrent import Recurrent, RecurrentOptions
from outrider.heads.tapped import TapNet, TapOptions, is_parallel


class Eagle3(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"EAGLE-3": {"model": "builtin-eagle3", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(TapOptions, RecurrentOptions):
        """As of all recurrent heads, and which states of the target the head reads."""

    def network(self) -> TapNet:
        return TapNet(self.reader, self.target, self.options)

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: the first layer has two norms and reads twice the width that it writes."""
        if is_parallel(head) or head.config.get("speculators_model_type", "eagle3") != "eagle3":
            return 0
        ours = FORMAT.renamed(head)
        norm, q, o = (
            f"midlayer.{name}.weight" for name in ("hidden_norm", "self_attn.q_proj", "self_attn.o_proj")
        )
        if norm in ours and q in ours and o in ours and ours.shape(q)[-1] == 2 * ours.shape(o)[0]:
            return 2
        return int(FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network over two thirds of the tokens."""
        return cls(cls.Options(), target, random_head(Network.like, target))
