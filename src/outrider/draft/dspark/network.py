"""DSpark's network for training, with the published names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.draft.dspark.layouts import GATED, RNN, TYPE, VANILLA
from outrider.heads.block_parts import BlockNetwork


class MarkovHead(nn.Module):
    """Of blocks [A, block].  rank: of the table."""

    def __init__(self, hidden: int, vocabulary: int, outputs: int, rank: int, kind: str = VANILLA) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == GATED:
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        """Bias [A, block, Vd] of the tokens before each place, [A, block], and the states [A, block, h]."""
        e = self.markov_w1(before)
        if self.kind == GATED:
            e = self.gate_proj(torch.cat([x, e], dim=-1)).sigmoid() * e
        if self.kind == RNN:
            state, outputs = e.new_zeros(e.shape[0], e.shape[2]), list[Tensor]()
            for i in range(e.shape[1]):
                g, c, o = self.joint_proj(torch.cat([state, e[:, i], x[:, i]], dim=-1)).chunk(3, dim=-1)
                state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
                outputs.append(o.tanh())
            e = torch.stack(outputs, dim=1)
        bias: Tensor = self.markov_w2(e)
        return bias


class ConfidenceHead(nn.Module):
    """Logit of the acceptance of every place, from its state and the Markov embedding, `inputs` wide."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        logit: Tensor = self.proj(x)[..., 0]
        return logit


class Network(BlockNetwork):
    def __init__(
        self, *block: Any, markov: int = 0, kind: str = VANILLA, confidence: bool = False, **options: Any
    ) -> None:
        """block, options: as of `BlockNetwork`.  markov, kind: rank and kind of the table; without one 0.
        confidence: with a predictor of the acceptance.
        """
        super().__init__(*block, **options)
        hidden, self.markov, self.kind = self.sizes.hidden, markov, kind
        made = MarkovHead(hidden, self.vocabulary, self.outputs, markov, kind) if markov else None
        self.markov_head, self.confidence_head = made, ConfidenceHead(hidden + markov) if confidence else None

    def config(self) -> dict[str, Any]:
        return self.speculators(
            TYPE,
            "DSparkDraftModel",
            markov_rank=self.markov,
            markov_head_type=self.kind,
            enable_confidence_head=self.confidence_head is not None,
            confidence_head_with_markov=bool(self.markov),
        )

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        known = [x]
        if self.markov_head is not None:
            logits = logits + self.markov_head(before, x)
            known.append(self.markov_head.markov_w1(before))
        confidence = self.confidence_head
        return logits, None if confidence is None else confidence(torch.cat(known, dim=-1))
