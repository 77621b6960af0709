"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): one transformer layer continues the target's states.

    position of the target      t         t+1
    state, after the last norm  f_t                     the target emitted x_t+1 from it
    token                                 x_t+1
    g_t = fc [e(x_t+1); f_t],  o_t = layer(g_t)         o_t stands for f_t+1: the target's lm head gives x_t+2
    next level                            (o_t, draft of x_t+2)

The two differ in the tree only; "dynamic" is EAGLE-2's.  Positions and K/V: see heads/recurrent.py.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step_input import StepInput
from outrider.draft.eagle.layouts import FORMAT
from outrider.draft.eagle.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.layer import Pairs, Stack
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Net, Recurrent, RecurrentOptions
from outrider.heads.vocabulary import listed_ids


class Packed(Net):
    """The network on the target's kernels.  A norm that the file lacks is the identity."""

    def __init__(self, reader: Reader, target: Target) -> None:
        super().__init__(reader, target)
        head, hidden = self.head, self.model.spec.hidden
        self.fc = reader.linear("fc", hidden, 2 * hidden)
        count = sum(name.endswith(".self_attn.q_proj.weight") for name in head)
        self.stack = Stack(reader, target, [f"layers.{i}" for i in range(count)], hidden, bare=True)
        norm_token, norm_state, self.norm = (
            reader.optional(f"{name}.weight", hidden) for name in ("norm_token", "norm_state", "norm_out")
        )
        self.pairs = Pairs(self.model, norm_token, norm_state, self.stack.sizes.eps)
        if "token_map" in head:  # a reduced vocabulary with an lm head of its own
            self.ids = listed_ids(head, "token_map", target.vocabulary)
            self.lm_head = reader.some("lm_head", self.ids, hidden)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        return self.stack(self.backend.linear(self.pairs(step_input, g), self.fc), step_input, pool)


class Eagle(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"EAGLE": {"model": "builtin-eagle", "tree": "chain", "num_speculative_tokens": 2}}

    Options = RecurrentOptions

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: fc has two inputs, and the layer after it reads one state."""
        ours, q = FORMAT.renamed(head), "layers.0.self_attn.q_proj.weight"
        # A norm over the taps belongs to a block-parallel head.
        other = "hidden_norm.weight" in ours or any("mtp." in name for name in head)
        if "fc.weight" in ours and q in ours and not other:
            hidden, inputs = ours.shape("fc.weight")
            if inputs == 2 * hidden and ours.shape(q)[1] == hidden:
                return 2
        return int(FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random head, and a wide and deep tree."""
        return cls(cls.Options(nodes=24, top_k=4), target, random_head(Network.like, target))

    def network(self) -> Net:
        self.check_embedding()
        if "hydra_head_arch" in self.head.config:
            self.complete_config()
        return Packed(self.reader, self.target)
