"""DSpark: a block (heads/blocks.py) whose logits a table of the token before corrects, with a predictor of
the acceptance.  e: row of w1 of the token before; x: the state of a position.

    vanilla      logits + w2 e
    gated        logits + w2 (sigmoid(gate [x; e]) * e)
    rnn          logits + w2 tanh(o), with a state s along the block: g, c, o = joint [s; e; x];
                 s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    confidence   sigmoid(proj [x; e]) or sigmoid(proj x): expected acceptance, sum of min(p, q)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.draft.dspark.layouts import FORMAT, GATED, RNN, TENSORS, TYPE, VANILLA, anchored
from outrider.draft.dspark.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.block_layouts import kind_of
from outrider.heads.blocks import BlockDrafter, BlockOptions
from outrider.heads.corrections import Corrected, Correction
from outrider.heads.outer import embed, lm_logits
from outrider.heads.reader import Reader
from outrider.models.rowwise import by_rows


class Confidence:
    """float32 [n]: the expected acceptance of the tokens at n places."""

    def __init__(self, head: Head, hidden: int, rank: int) -> None:
        """rank: of the Markov table, 0 without one."""
        inputs = head.shape("confidence_head.proj.weight")[1]
        self.embeds = bool(rank) and inputs != hidden
        self.weight = head.get("confidence_head.proj.weight", 1, hidden + rank * self.embeds).float()
        self.bias = head.get("confidence_head.proj.bias", 1).float()
        if not all(part.isfinite().all() for part in (self.weight, self.bias)):
            raise ModelError(f"the confidence head of {head.name!r} has weights that are not finite.")

    def __call__(self, x: Tensor, embedded: Tensor | None) -> Tensor:
        """x [n, h]; embedded: e [n, rank] of the table."""
        if self.embeds and embedded is not None:
            x = torch.cat([x, embedded.to(x.dtype)], dim=-1)
        device = x.device
        return ((x.float() * self.weight.to(device)).sum(-1) + self.bias.to(device)).sigmoid()


class Spark(Correction):
    """The table of the token before (`MarkovHead` of the network), the predictor of acceptance, or both."""

    def __init__(self, reader: Reader, target: Target, hidden: int, outputs: int | None) -> None:
        """outputs: of a head with a smaller vocabulary; padding may follow that of the others."""
        head, vocabulary, self.model = reader.head, target.vocabulary, target.decoder
        self.backend, self.rank, self.table = reader.backend, 0, "markov_w1.weight" in head
        kind = head.config.get("markov_head_type", VANILLA)
        if self.table:
            (first, self.rank), (second, _) = (head.shape(f"markov_w{i}.weight") for i in (1, 2))
            linear, width = reader.outer.linear, max(vocabulary, second) if outputs is None else outputs
            self.embedding = linear("markov_w1", max(vocabulary, first), self.rank)
            self.out = linear("markov_w2", width, self.rank)
        rank, gated, recurs = self.rank, self.table and kind == GATED, self.table and kind == RNN
        self.gate = reader.biased(["gate_proj"], rank, hidden + rank) if gated else None
        self.joint = reader.biased(["joint_proj"], 3 * rank, 2 * rank + hidden) if recurs else None
        predicts = "confidence_head.proj.weight" in head
        self.confidence = Confidence(head, hidden, rank) if predicts else None

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """The state [n, rank], as in training: after the anchor's row, if that predicts nothing."""
        state = torch.zeros(len(tokens), self.rank, dtype=before.dtype, device=before.device)
        if self.joint is None or not len(before):
            return state
        return self._recur(embed(self.model, tokens, self.embedding), before, state)[1]

    def __call__(self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor) -> Corrected:
        bias: Tensor | None = None
        e: Tensor | None = None
        if self.table:
            e = y = embed(self.model, tokens, self.embedding)
            if self.gate is not None:
                gate = self.backend.linear(torch.cat([x, e], dim=-1), self.gate)
                y = by_rows(torch.sigmoid, gate) * e
            elif self.joint is not None:
                y, state = self._recur(e, x, state)
            bias = lm_logits(self.model, y, self.out)
        return Corrected(bias, state, None if self.confidence is None else self.confidence(x, e))

    def _recur(self, e: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output [n, rank] and the next state."""
        joint = self.backend.linear(torch.cat([state, e, x], dim=-1), self.joint)
        g, c, o = (part.contiguous() for part in joint.chunk(3, dim=-1))
        gate = by_rows(torch.sigmoid, g)
        return by_rows(torch.tanh, o), gate * state + (1 - gate) * by_rows(torch.tanh, c)


class DSpark(BlockDrafter):
    FORMAT = FORMAT

    Options = BlockOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        outputs = None if self.ids is None else len(self.ids)
        self.correction = Spark(self.reader, target, self.width, outputs)

    @staticmethod
    def anchored(head: Head) -> bool:
        return anchored(head)

    @classmethod
    def marked(cls, head: Head) -> bool:
        return kind_of(head) == TYPE or any(map(TENSORS.search, head))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers with a gated table, and a tree of 8."""
        own = {"block": 5, "markov": 6, "kind": GATED, "confidence": True}
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, **own))
