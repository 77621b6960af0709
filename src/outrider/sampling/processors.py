"""Edits of the logits that depend on what came before: pure functions of (ids, logits), so every node of a tree is right.

A processor sees the tokens of its request *and the path of the node*, never a state that another node moved on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Processor(Protocol):
    def active(self, length: int) -> bool:
        """Whether a row at which `length` tokens are known (prompt, output and path) needs an edit at all."""

    def __call__(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        """ids: prompt, output and path; logits [V], not to be written to.  Returns logits [V]."""


@dataclass(frozen=True)
class MinTokens:
    """Forbids the tokens that would end the text before position `until`."""

    until: int
    banned: Tensor  # int64 [m]

    def active(self, length: int) -> bool:
        return length < self.until

    def __call__(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        if not self.active(len(ids)):
            return logits
        return logits.index_fill(0, self.banned[self.banned < logits.numel()].to(logits.device), float("-inf"))


def min_tokens(prompt: int, minimum: int, ending: Sequence[int]) -> list[Processor]:
    banned = sorted(token for token in ending if token >= 0)  # as an index, -1 would mean another token
    return [MinTokens(prompt + minimum, torch.tensor(banned))] if minimum and banned else []
