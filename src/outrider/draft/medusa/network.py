"""Medusa's heads for training, with the names and config of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.heads.parts import ResidualBlock
from outrider.heads.sample import Sample, TargetWeights, mean_loss

DECAY = 0.8  # weight of a head's loss relative to the head before it


class Network(nn.ModuleList):
    """Each head repeats one residual block `blocks` times.

    A linear follows; with own=False the target's lm_head serves all heads.
    """

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

    def forward(self, states: Tensor, outer: TargetWeights | None = None) -> list[Tensor]:
        """Logits [T, V] of each head for states [T, hidden].

        outer: the target's weights, for heads without an lm_head.
        """
        return [self.logits(i, states, outer) for i in range(len(self))]

    def logits(self, i: int, states: Tensor, outer: TargetWeights | None = None) -> Tensor:
        """[T, V] of head i."""
        x: Tensor = self[i](states)
        if self.own:
            return x
        assert outer is not None
        return outer.logits(x)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy of each head with the text, weighted by DECAY.

        position              t        t+1      t+2      t+3
        state                 f_t
        the target's lm_head           x_t+1
        head 0                                  x_t+2
        head 1                                           x_t+3
        """
        tokens, states = sample.tokens, sample.states[FINAL]
        total = states.new_zeros(())
        for i in range(len(self)):
            rows = sample.places(i + 1, max(0, len(tokens) - i - 2))
            logits = self.logits(i, states[rows], outer).float()
            losses = F.cross_entropy(logits, tokens[i + 2 + rows], reduction="none")
            total = total + DECAY**i * mean_loss(losses)
        return total
