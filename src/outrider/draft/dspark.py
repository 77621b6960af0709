"""DSpark: a block (heads/blocks.py) whose logits a table of the token before corrects, with a predictor of
the acceptance.  e: row of w1 of the token before; x: the state of a position.

    vanilla      logits + w2 e
    gated        logits + w2 (sigmoid(gate [x; e]) * e)
    rnn          logits + w2 tanh(o), with a state s along the block: g, c, o = joint [s; e; x];
                 s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    confidence   sigmoid(proj [x; e]) or sigmoid(proj x): expected acceptance, sum of min(p, q)

Published files: a block's, and

                          speculators (vLLM)               SpecForge (SGLang)
    the table             markov_w1 [V, rank], markov_w2 [Vd, rank]; gate_proj or joint_proj of other kinds
    the acceptance        confidence_head.proj
    kind of the table     markov_head_type                 dflash_config.markov_head_type,
                                                           projector_type "dspark"
The anchor's row predicts by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.block_layouts import block_format, from_anchor, kind_of
from outrider.heads.block_parts import BlockNetwork
from outrider.heads.blocks import BlockDrafter, BlockOptions
from outrider.heads.corrections import Correction, CorrectionOutput
from outrider.heads.outer import embed, lm_logits
from outrider.heads.reader import Reader
from outrider.models.rowwise import by_rows

VANILLA, GATED, RNN = MARKOV = ("vanilla", "gated", "rnn")
TYPE = "dspark"


def anchored(head: Head) -> bool:
    """`from_anchor` of a file of this kind."""
    usual = kind_of(head) == TYPE or any(name.endswith("markov_w1.weight") for name in head)
    return from_anchor(head, usual)


def _refused(head: Head) -> str:
    kind = head.config.get("markov_head_type", VANILLA)
    return "" if kind in MARKOV else f"its markov_head_type is {kind!r}, and none of {', '.join(MARKOV)}"


FORMAT = block_format(
    f"{TYPE}|DSpark.*",
    rows=(
        ("markov_head.markov_w{i}.{kind}", "markov_w{i}.{kind}"),
        ("markov_head.gate_proj.{kind}", "gate_proj.{kind}"),
        ("markov_head.joint_proj.{kind}", "joint_proj.{kind}"),
    ),
    known=r"(markov_w[12]|(gate|joint|confidence_head\.)_?proj)\.(weight|bias)",
    variants=(("markov", "DSpark with another table"),),
    anchored=anchored,
    refused=_refused,
)


class MarkovHead(nn.Module):
    """Markov table of blocks [A, block].  rank: of the table."""

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
    """Network for training, with the published names."""

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
        table = {"markov_rank": self.markov, "markov_head_type": self.kind}
        predicts, embeds = self.confidence_head is not None, bool(self.markov)
        own = {**table, "enable_confidence_head": predicts, "confidence_head_with_markov": embeds}
        return self.speculators(TYPE, "DSparkDraftModel", **own)

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        known = [x]
        if self.markov_head is not None:
            logits = logits + self.markov_head(before, x)
            known.append(self.markov_head.markov_w1(before))
        confidence = self.confidence_head
        return logits, None if confidence is None else confidence(torch.cat(known, dim=-1))


class Confidence:
    """float32 [n]: the expected acceptance of the tokens at n places."""

    def __init__(self, reader: Reader, hidden: int, rank: int) -> None:
        """rank: of the Markov table, 0 without one."""
        head, (_, inputs) = reader.head, reader.matrix_shape("confidence_head.proj.weight")
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

    gate: Any
    joint: Any

    def __init__(self, reader: Reader, target: Target, hidden: int, outputs: int | None) -> None:
        """outputs: of a head with a smaller vocabulary; padding may follow that of the others."""
        head, self.model, self.backend = reader.head, target.decoder, reader.backend
        self.rank, self.gate, self.joint = 0, None, None
        self.table = "markov_w1.weight" in head
        if self.table:
            self._read_table(reader, target.vocabulary, hidden, outputs)
        predicts = "confidence_head.proj.weight" in head
        self.confidence = Confidence(reader, hidden, self.rank) if predicts else None

    def _read_table(self, reader: Reader, vocabulary: int, hidden: int, outputs: int | None) -> None:
        """Pack the table, and what its kind has beside it."""
        head = reader.head
        rows, self.rank = reader.matrix_shape("markov_w1.weight")
        padded = max(vocabulary, reader.matrix_shape("markov_w2.weight")[0])
        rank, kind = self.rank, head.config.get("markov_head_type", VANILLA)
        self.embedding = reader.outer.linear("markov_w1", max(vocabulary, rows), rank)
        self.out = reader.outer.linear("markov_w2", padded if outputs is None else outputs, rank)
        if kind == GATED:
            self.gate = reader.linear_with_bias(["gate_proj"], rank, hidden + rank)
        if kind == RNN:
            self.joint = reader.linear_with_bias(["joint_proj"], 3 * rank, 2 * rank + hidden)

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """The state [n, rank], as in training: after the anchor's row, if that predicts nothing."""
        state = torch.zeros(len(tokens), self.rank, dtype=before.dtype, device=before.device)
        if self.joint is None or not len(before):
            return state
        return self._recur(embed(self.model, tokens, self.embedding), before, state)[1]

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor, logits: Tensor
    ) -> CorrectionOutput:
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
        return CorrectionOutput(bias, state, None if self.confidence is None else self.confidence(x, e))

    def _recur(self, e: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output [n, rank] and the next state."""
        joint = self.backend.linear(torch.cat([state, e, x], dim=-1), self.joint)
        g, c, o = (part.contiguous() for part in joint.chunk(3, dim=-1))
        gate = by_rows(torch.sigmoid, g)
        return by_rows(torch.tanh, o), gate * state + (1 - gate) * by_rows(torch.tanh, c)


class DSpark(BlockDrafter):
    FORMAT = FORMAT
    kind, tensors = TYPE, "markov|confidence_head"
    Options = BlockOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.correction = Spark(self.reader, target, self.width, self.outputs)

    @staticmethod
    def anchored(head: Head) -> bool:
        return anchored(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers with a gated table, and a tree of 8."""
        own = {"block": 5, "markov": 6, "kind": GATED, "confidence": True}
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, **own))
