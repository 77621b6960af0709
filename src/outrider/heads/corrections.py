"""What the tokens of a block before a position add to its logits, and how likely its token is accepted.

    Markov, vanilla   w2 e                       e: row of w1 of the token before; x: the position's state
            gated     w2 (sigmoid(gate [x; e]) * e)
            rnn       w2 tanh(o), with a state s along the block: g, c, o = joint [s; e; x];
                      s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    Domino            up silu(down [x; s]), s of a GRU over the embeddings of the block's tokens
    confidence        sigmoid(proj [x; e]) or sigmoid(proj x): expected acceptance, sum of min(p, q)

DSpark has a Markov table and a confidence head.  The modules have the published names; below them is what
drafts, on the target's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.validate import whole
from outrider.drafting.base import Target
from outrider.errors import ModelError
from outrider.heads.choose import Chooser
from outrider.heads.outer import embed, lm_logits
from outrider.heads.reader import Reader
from outrider.heads.trees import RankTree, frontier_tokens, grow
from outrider.models.rowwise import by_rows

VANILLA, GATED, RNN = MARKOV = ("vanilla", "gated", "rnn")


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


class Corrected(nn.Module):
    """Base of networks of blocks, with the published names of what corrects their logits.

    markov, kind: rank and kind of DSpark's table.  domino: width of Domino's recurrent state.
    """

    def add_corrections(
        self,
        hidden: int,
        vocabulary: int,
        outputs: int,
        markov: int,
        kind: str,
        confidence: bool,
        domino: int,
    ) -> None:
        self.markov, self.kind, self.domino = markov, kind, domino
        self.markov_head = MarkovHead(hidden, vocabulary, outputs, markov, kind) if markov else None
        self.confidence_head = ConfidenceHead(hidden + markov) if confidence else None
        if domino:
            narrow = max(1, domino // 4)  # as published: 1024 and 256
            self.prefix_gru = nn.GRU(hidden, domino, batch_first=True, bias=False)
            down, up = nn.Linear(hidden + domino, narrow, bias=False), nn.Linear(narrow, outputs, bias=False)
            nn.init.zeros_(up.weight)
            self.embed_proj = nn.Sequential(down, nn.SiLU(), up)

    def corrections_config(self) -> dict[str, Any]:
        """The published keys of DSpark or Domino; {} of a plain block."""
        confident = self.confidence_head is not None
        if self.domino:
            gru = {"gru_hidden_dim": self.domino, "emb_dim": self.embed_proj[0].out_features}
            return {"projector_type": "domino", "pure_draft_prefix_len": 0, "shift_label": False, **gru}
        if not self.markov and not confident:
            return {}
        markov = {"markov_rank": self.markov, "markov_head_type": self.kind}
        with_markov = bool(self.markov)
        return {**markov, "enable_confidence_head": confident, "confidence_head_with_markov": with_markov}

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Corrected logits [A, block, Vd], and the logit of the acceptance [A, block].

        x [A, block, h]; before [A, block]: the token before each place, of the first the anchor itself.
        """
        known = [x]
        if self.markov_head is not None:
            logits = logits + self.markov_head(before, x)
            known.append(self.markov_head.markov_w1(before))
        if self.domino:
            state, _ = self.prefix_gru(embedding[before[:, 1:]])
            more = self.embed_proj(torch.cat([x[:, 1:], state], dim=-1))
            logits = torch.cat([logits[:, :1], logits[:, 1:] + more], dim=1)
        confidence = self.confidence_head
        return logits, None if confidence is None else confidence(torch.cat(known, dim=-1))


class Correction:
    """No correction; base of those of drafting.  embedded: e of each token, for a confidence head."""

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """State [n, width] before the first level of n trees.

        tokens: of the anchors.  before: states of the anchors' rows, if those predict nothing; else empty.
        """
        return torch.zeros(len(tokens), 0, device=before.device)

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """(bias float32 [n, Vd] or None, state, embedded) of the tokens before; x [n, h]: their places'."""
        return None, state, None


class Markov(Correction):
    def __init__(self, reader: Reader, target: Target, hidden: int, outputs: int | None) -> None:
        """outputs: of a head with a smaller vocabulary; padding may follow that of the others."""
        head, vocabulary, self.model = reader.head, target.vocabulary, target.decoder
        (first, rank), (second, _) = (head.shape(f"markov_w{i}.weight") for i in (1, 2))
        self.backend, self.rank, linear = reader.backend, rank, reader.outer.linear
        self.embedding = linear("markov_w1", max(vocabulary, first), rank)
        self.out = linear("markov_w2", max(vocabulary, second) if outputs is None else outputs, rank)
        kind = head.config.get("markov_head_type", VANILLA)
        self.gate = reader.biased(["gate_proj"], rank, hidden + rank) if kind == GATED else None
        self.joint = reader.biased(["joint_proj"], 3 * rank, 2 * rank + hidden) if kind == RNN else None

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """As in training, the recurrent state begins with the anchor's row, if that predicts nothing."""
        state = torch.zeros(len(tokens), self.rank, dtype=before.dtype, device=before.device)
        if self.joint is None or not len(before):
            return state
        return self._recur(embed(self.model, tokens, self.embedding), before, state)[1]

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        e = y = embed(self.model, tokens, self.embedding)
        if self.gate is not None:
            gate = self.backend.linear(torch.cat([x, e], dim=-1), self.gate)
            y = by_rows(torch.sigmoid, gate) * e
        elif self.joint is not None:
            y, state = self._recur(e, x, state)
        return lm_logits(self.model, y, self.out), state, e

    def _recur(self, e: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output [n, rank] and the next state."""
        joint = self.backend.linear(torch.cat([state, e, x], dim=-1), self.joint)
        g, c, o = (part.contiguous() for part in joint.chunk(3, dim=-1))
        gate = by_rows(torch.sigmoid, g)
        return by_rows(torch.tanh, o), gate * state + (1 - gate) * by_rows(torch.tanh, c)


class Domino(Correction):
    """pure: so many first levels are not corrected."""

    def __init__(
        self, reader: Reader, target: Target, hidden: int, outputs: int | None, embedding: object
    ) -> None:
        head, self.model, self.embedding = reader.head, target.decoder, embedding
        self.backend, self.width = reader.backend, head.shape("domino.state.weight")[1]
        narrow, second = head.shape("domino.down.weight")[0], head.shape("domino.up.weight")[0]
        self.input = reader.linear("domino.input", 3 * self.width, hidden)
        self.state = reader.linear("domino.state", 3 * self.width, self.width)
        self.down = reader.linear("domino.down", narrow, hidden + self.width)
        outputs = max(target.vocabulary, second) if outputs is None else outputs
        self.up = reader.outer.linear("domino.up", outputs, narrow)
        self.pure = head.config.get("pure_draft_prefix_len", 0)
        whole(0).check(self.pure, f"pure_draft_prefix_len of {head.name!r}", ModelError)

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        return torch.zeros(len(tokens), self.width, dtype=before.dtype, device=before.device)

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        run = self.backend
        embedded = embed(self.model, tokens, self.embedding).to(x.dtype)
        mine = [part.contiguous() for part in run.linear(embedded, self.input).chunk(3, dim=-1)]
        old = [part.contiguous() for part in run.linear(state, self.state).chunk(3, dim=-1)]
        reset, update = (by_rows(torch.sigmoid, mine[i] + old[i]) for i in range(2))
        state = (1 - update) * by_rows(torch.tanh, mine[2] + reset * old[2]) + update * state
        if level < self.pure:
            return None, state, None
        narrow = by_rows(F.silu, run.linear(torch.cat([x, state], dim=-1), self.down))
        return lm_logits(self.model, narrow, self.up), state, None


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
        """x [n, h]; embedded [n, rank] by `Correction`."""
        if self.embeds and embedded is not None:
            x = torch.cat([x, embedded.to(x.dtype)], dim=-1)
        device = x.device
        return ((x.float() * self.weight.to(device)).sum(-1) + self.bias.to(device)).sigmoid()


def corrections_of(
    reader: Reader, target: Target, hidden: int, ids: Tensor | None, embedding: object
) -> tuple[Correction | None, Confidence | None]:
    """What a head's file has; None for a plain block.  hidden: width of the places' states.  ids: the head's
    tokens.  embedding: the head's own.
    """
    head, outputs, rank = reader.head, None if ids is None else len(ids), 0
    correction: Correction | None = None
    if "markov_w1.weight" in head:
        correction = markov = Markov(reader, target, hidden, outputs)
        rank = markov.rank
    elif "domino.state.weight" in head:
        correction = Domino(reader, target, hidden, outputs, embedding)
    if "confidence_head.proj.weight" not in head:
        return correction, None
    return correction or Correction(), Confidence(head, hidden, rank)


def grow_corrected(
    blocks: Mapping[RankTree, tuple[Tensor, Tensor]],
    correct: Correction,
    confidence: Confidence | None,
    skipped: int,
    choose: Chooser,
) -> None:
    """Grow trees together, level by level.

    blocks: logits [levels, Vd] and states [skipped + levels, h] of every tree.  skipped: rows of a block that
    predict nothing.
    """
    anchors = torch.cat([states[:skipped] for _, states in blocks.values()])
    state = correct.begin(frontier_tokens(list(blocks)), anchors)

    def deepen(level: int, trees: Sequence[RankTree], sources: list[int]) -> Tensor:
        nonlocal state
        counts, found = [len(tree.frontier) for tree in trees], [blocks[tree] for tree in trees]
        x = torch.cat([states[skipped + level].expand(n, -1) for (_, states), n in zip(found, counts)])
        logits = torch.cat([part[level].expand(n, -1) for (part, _), n in zip(found, counts)])
        bias, state, embedded = correct(level, frontier_tokens(trees), x, state[sources])
        if confidence is not None:
            for tree, part in zip(trees, torch.split(confidence(x, embedded), counts)):
                tree.acceptance = part.tolist()
        return logits if bias is None else logits + bias

    grow(list(blocks), choose, deepen(0, list(blocks), [*range(len(blocks))]), deepen)
