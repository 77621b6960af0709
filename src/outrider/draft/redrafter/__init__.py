"""ReDrafter (Cheng et al. 2024, arXiv 2403.09919): a small recurrent network beside the target's last
state, and beam search.

    position            … e-2   e-1   │ e       e+1       e = step.end, x_e-1 is pending
    state of the target   f_e-2       │                   the same for all levels
    token                       x_e-1 │ c_1     c_2
    s_1 = step(0, e(x_e-1))     [f ; s_1] gives c_1
    s_2 = step(s_1, e(c_1))             [f ; s_2] gives c_2 …

A beam is a path of draft tokens.  A forward extends the beams of all rows by one token each, one of the 50
likeliest.  At a temperature the request's noise ranks them, as it will rank the target's own picks.
Verification rules that compare p with q get sampled children instead: a beam that won against others is no
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step import Batch, RowStep
from outrider.core.tree import EMPTY_TREE, Draft
from outrider.core.validate import check_fields, optional, whole
from outrider.draft.redrafter.beams import Beams
from outrider.draft.redrafter.layouts import blocks, claims_of, translate
from outrider.draft.redrafter.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import HeadOptions, StateDrafter
from outrider.heads.trees import grow_level
from outrider.models.fallback.row_invariant import by_rows

MAX_WIDTH, MAX_LENGTH = 64, 1025
TOP = 50  # continuations of a beam, and all that equal the last of them


class ReDrafter(StateDrafter):
    demo: ClassVar = {
        "ReDrafter": {"model": "builtin-redrafter", "num_speculative_tokens": 2, "beam_width": 3, "nodes": 4}
    }

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """beam_width: beams that a level goes on with (TensorRT-LLM: redrafter_num_beams).  beam_length:
        tokens of a beam with the pending token, so that there are beam_length - 1 levels
        (redrafter_draft_len_per_beam) unless num_speculative_tokens is given; both as in the reference.
        nodes: of a tree at most, the likeliest (None: all prefixes of beams, but 8 on a CPU, where every
        node costs time).
        """

        beam_width: int = 10
        beam_length: int = 4
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            kinds = {"beam_width": whole(1, MAX_WIDTH), "beam_length": whole(2, MAX_LENGTH)}
            check_fields(self, {**kinds, "nodes": optional(whole(1, MAX_WIDTH * MAX_LENGTH))})

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.depth = options.beam_length - 1
        self.nodes = target.nodes(options.nodes, MAX_WIDTH * MAX_LENGTH)
        self._pack(translate(self.head), target.vocabulary)

    def _pack(self, head: Head, vocabulary: int) -> None:
        """Pack the tensors.  Raises ModelError where one is missing or does not fit the target."""
        reader, hidden = replace(self.reader, head=head), self.hidden
        count = blocks(head)
        rnn = bool(head.config.get("rnn")) or "rnn_u.weight" in head or "rnn_w.weight" in head
        projected = "input_proj.weight" in head
        width = head.shape("input_proj.weight")[0] if projected else 2 * hidden

        def linear(name: str, outputs: int, inputs: int) -> Any:
            head.shape(f"{name}.bias")
            return reader.linear(name, outputs, inputs)

        self.rnn_u = linear("rnn_u", hidden, hidden) if rnn else None
        self.rnn_w = reader.linear("rnn_w", hidden, hidden) if rnn else None
        self.input_proj = linear("input_proj", width, 2 * hidden) if projected else None
        self.blocks = [linear(f"lm_head.{i}.linear", width, width) for i in range(count)]
        self.lm_head = reader.outer.linear(f"lm_head.{count}", vocabulary, width)
        if (wide := self.target.decoder.embed([0]).shape[1]) != hidden:
            raise ModelError(
                f"{self.head.name!r} reads embeddings as wide as the target's states, {hidden}, and the "
                f"target's are {wide}."
            )

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network, which is nearly always wrong."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network(target.decoder.spec.hidden, target.vocabulary)
        head = Head.of("example", network.config(), network.state_dict())
        return cls(cls.Options(beam_width=3, beam_length=5, nodes=12), target, head)

    def size(self, depth: int) -> int:
        width: int = self.options.beam_width
        return min(self.nodes, depth * width)

    def propose(self, batch: Batch) -> Draft:
        trees, rows = [EMPTY_TREE] * len(batch), self.ready(batch)
        if rows:
            grown = [self._beams(batch[r]) for r in rows]
            self._levels(self.states(batch, rows), grown)
            for r, beams in zip(rows, grown):
                trees[r] = beams.draft_tree
        return Draft(trees)

    def _beams(self, step: RowStep) -> Beams:
        row, stream_id = step.row, self.target.stream_id
        return Beams(row, step.budget, self.options.beam_width, self.samples(row), stream_id)

    def _levels(self, f: Tensor, grown: list[Beams]) -> None:
        """Grow the beams of all rows, one forward a level; f [len(grown), hidden]: the target's states."""
        s = torch.zeros_like(f)
        while grown:
            s = self._step(s, [token for beams in grown for token in beams.frontier_tokens])
            grown, sources = grow_level(grown, self.choose, self._logits(f, s))
            f, s = f[sources], s[sources]

    def _step(self, s: Tensor, tokens: Sequence[int]) -> Tensor:
        """The recurrent states [n, hidden] after these tokens."""
        embedded = self.target.decoder.embed(tokens).to(s)
        if self.rnn_u is None:
            return s + embedded
        return by_rows(F.silu, self.backend.linear(s, self.rnn_u, self.backend.linear(embedded, self.rnn_w)))

    def _logits(self, f: Tensor, s: Tensor) -> Tensor:
        """float32 [n, V]; -inf except the TOP highest, which the reference selects before its softmax."""
        x = torch.cat([f, s], dim=1)
        x = x if self.input_proj is None else self.backend.linear(x, self.input_proj)
        for block in self.blocks:
            x = x + by_rows(F.silu, self.backend.linear(x, block))
        logits = self.backend.linear(x, self.lm_head).float()
        lowest = logits.topk(min(TOP, logits.shape[1])).values[:, -1:]
        return logits.masked_fill(logits < lowest, float("-inf"))
