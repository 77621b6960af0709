"""Medusa's heads as they are trained: names and config are those of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.types import FINAL
from outrider.heads.sample import Sample, TargetWeights

DECAY = 0.8  # of a head's part in the loss, by its number


class ResBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Network(nn.ModuleList):
    """Of each head `blocks` times one and the same block, then a linear; with own=False the target's own head says the token."""

    def __init__(
        self, hidden: int, vocabulary: int, heads: int = 5, blocks: int = 1, own: bool = True
    ) -> None:
        made = [[ResBlock(hidden)] * blocks for _ in range(heads)]
        super().__init__(
            [
                nn.Sequential(*parts, *([nn.Linear(hidden, vocabulary, bias=False)] if own else []))
                for parts in made
            ]
        )
        self.blocks, self.own = blocks, own

    @classmethod
    def beside(cls, outer: TargetWeights, heads: int = 5, blocks: int = 1, own: bool = True) -> Network:
        """As training begins: every head says what the target's does."""
        vocabulary, hidden = outer.lm_head.shape
        network = cls(hidden, vocabulary, heads, blocks, own)
        for head in network:
            assert isinstance(head, nn.Sequential)
            for name, parameter in head.named_parameters():
                parameter.data.copy_(torch.zeros(()) if "linear" in name else outer.lm_head)
        return network

    def config(self) -> dict[str, Any]:
        said = {
            "medusa_num_heads": len(self),
            "medusa_num_layers": self.blocks,
            "base_model_name_or_path": "",
        }
        return said if self.own else {**said, "version": "2"}

    def forward(self, states: Tensor, lm_head: Tensor | None = None) -> list[Tensor]:
        """The logits [T, V] of each head, behind states [T, hidden]; lm_head: the target's, for heads without one."""
        said = [head(states) for head in self]
        if self.own:
            return said
        assert lm_head is not None
        return [x @ lm_head.T for x in said]

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy of each head, a later one counting less.

        position              t        t+1      t+2      t+3
        state                 f_t
        the target's head              x_t+1
        head 0                                  x_t+2
        head 1                                           x_t+3
        """
        tokens, states = sample.tokens, sample.states[FINAL]
        total = states.new_zeros(())
        for i, logits in enumerate(self(states, outer.lm_head)):
            if len(tokens) > i + 2:
                total = total + DECAY**i * F.cross_entropy(logits[: len(tokens) - i - 2], tokens[i + 2 :])
        return total
