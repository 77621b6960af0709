"""Medusa's heads for training, with the names and config of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.heads.parts import ResidualBlock
from outrider.heads.sample import Sample, TargetWeights

DECAY = 0.8  # weight of a head's loss relative to the head before it


class Network(nn.ModuleList):
    """Heads of one repeated residual block and a linear; own=False: the target's lm_head serves all."""

    def __init__(
        self, hidden: int, vocabulary: int, heads: int = 5, blocks: int = 1, own: bool = True
    ) -> None:
        super().__init__()
        for _ in range(heads):
            repeated = [ResidualBlock(hidden, hidden)] * blocks
            lm_head = [nn.Linear(hidden, vocabulary, bias=False)] if own else []
            self.append(nn.Sequential(*repeated, *lm_head))
        self.blocks, self.own = blocks, own

    @classmethod
    def beside(cls, outer: TargetWeights, heads: int = 5, blocks: int = 1, own: bool = True) -> Network:
        """The reference's initial weights: every head predicts what the target's lm_head does."""
        vocabulary, hidden = outer.lm_head.shape
        network = cls(hidden, vocabulary, heads, blocks, own)
        for name, parameter in network.named_parameters():
            parameter.data.copy_(torch.zeros(()) if ".linear." in name else outer.lm_head)
        return network

    def config(self) -> dict[str, Any]:
        config = {
            "medusa_num_heads": len(self),
            "medusa_num_layers": self.blocks,
            "base_model_name_or_path": "",
        }
        return config if self.own else {**config, "version": "2"}

    def logits(self, i: int, states: Tensor, outer: TargetWeights) -> Tensor:
        """[n, V] of head i for the target's states [n, hidden]."""
        x: Tensor = self[i](states)
        return x if self.own else outer.logits(x)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy of each head with the text, weighted by DECAY; head i predicts x_t+i+2 from f_t."""
        states, total = sample.states[FINAL], outer.lm_head.new_zeros(())
        for i in range(len(self)):
            rows = sample.places(i + 1, max(0, len(states) - i - 2))
            loss = sample.text_loss(self.logits(i, states[rows], outer), i + 2 + rows)
            total = total + DECAY**i * loss
        return total
