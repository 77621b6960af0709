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
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import RowStep
from outrider.core.tree import Budget, DraftTree
from outrider.core.validate import whole
from outrider.draft.redrafter.layouts import FORMAT, blocks
from outrider.draft.redrafter.network import Network
from outrider.drafting.base import DEPTHS, Drafter, Target
from outrider.drafting.trees.sampled import Tree
from outrider.heads.base import HeadOptions, State, StateDrafter, random_head
from outrider.heads.choose import Chooser
from outrider.heads.layer import residual
from outrider.heads.outer import embed
from outrider.heads.trees import sample_children, sources_of
from outrider.models.rowwise import by_rows

MAX_WIDTH, MAX_LENGTH = 64, 1025
TOP = 50  # continuations of a beam, and all that equal the last of them


class Beams(Tree):
    """The beams of one row as a tree: a level goes on with the `width` likeliest continuations of its beams,
    and every prefix is a node.

    The likeliest nodes of all levels are kept, as many as the budget has.  A beam that is not among them
    can have no child among them, and ends.

    sampled: a level has at most `width` sampled children, and no more than leaves the same number to the
    levels below.
    """

    def __init__(self, row: Row, budget: Budget, width: int, sampled: bool, stream_id: int) -> None:
        siblings = min(width, max(1, budget.nodes // budget.depth)) if sampled else width
        room = budget if sampled else Budget(budget.depth, width * budget.depth)
        super().__init__(row, 0, room, siblings, stream_id=stream_id)  # the nodes have no K/V
        self.sampled, self.max_nodes = sampled, budget.nodes
        self.sources: Sequence[int] = [0]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        parents = self.frontier
        if self.sampled:
            sample_children(self, choose, logits)
        else:
            paths = [self.path_tokens(node) for node in parents]
            ranked = zip(parents, choose.ranked(self.row, paths, logits, self.siblings))
            self.choose((node, token, share) for node, best in ranked for token, share in best if share > 0)
            likeliest = self._likeliest()
            self.frontier = [node for node in self.frontier if node in likeliest]
        self.sources = sources_of(self, parents)

    def _likeliest(self) -> set[int]:
        """The nodes to keep, with their parents: none is less likely than its child, nor added after it."""
        ranked = sorted(range(len(self.tokens)), key=lambda node: -self.joint[node])
        return set(ranked[: self.max_nodes])

    @property
    def draft_tree(self) -> DraftTree:
        tree = super().draft_tree
        return tree if self.sampled else tree.only(sorted(self._likeliest()))


class ReDrafter(StateDrafter):
    FORMAT = FORMAT
    tunable: ClassVar = {**DEPTHS, "beam_width": (2, 3, 5), "nodes": (4, 16)}
    demo: ClassVar = {
        "ReDrafter": {"model": "builtin-redrafter", "num_speculative_tokens": 2, "beam_width": 3, "nodes": 4}
    }

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """beam_width: beams that a level goes on with (TensorRT-LLM: redrafter_num_beams).  beam_length:
        tokens of a beam with the pending token, one more than levels (redrafter_draft_len_per_beam), unless
        num_speculative_tokens is given.  nodes: of a tree at most, the likeliest (None: all prefixes of
        beams, but 8 on a CPU, where every node costs time).
        """

        beam_width: Annotated[int, whole(1, MAX_WIDTH)] = 10
        beam_length: Annotated[int, whole(2, MAX_LENGTH)] = 4
        nodes: Annotated[int, whole(1, MAX_WIDTH * MAX_LENGTH)] | None = None

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.depth = options.beam_length - 1
        self.nodes = target.nodes(options.nodes, MAX_WIDTH * MAX_LENGTH)
        self.check_embedding()
        head, reader, hidden, count = self.head, self.reader, self.hidden, blocks(self.head)
        rnn = bool(head.config.get("rnn")) or "rnn_u.weight" in head or "rnn_w.weight" in head
        projected = "input_proj.weight" in head
        width = head.shape("input_proj.weight")[0] if projected else 2 * hidden
        self.rnn_u = reader.biased(["rnn_u"], hidden, hidden) if rnn else None
        self.rnn_w = reader.linear("rnn_w", hidden, hidden) if rnn else None
        self.input_proj = reader.biased(["input_proj"], width, 2 * hidden) if projected else None
        self.blocks = [reader.biased([f"lm_head.{i}.linear"], width, width) for i in range(count)]
        self.lm_head = reader.outer.linear(f"lm_head.{count}", target.vocabulary, width)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network, which is nearly always wrong."""
        head = random_head(Network, target.decoder.spec.hidden, target.vocabulary)
        return cls(cls.Options(beam_width=3, beam_length=5, nodes=12), target, head)

    def size(self, depth: int) -> int:
        width: int = self.options.beam_width
        return min(self.nodes, depth * width)

    def tree(self, step: RowStep) -> Beams:
        width, sampled = self.options.beam_width, self.samples(step.row)
        return Beams(step.row, step.budget, width, sampled, self.target.stream_id)

    def begin(self, states: Tensor) -> State:
        return states, torch.zeros_like(states)

    def advance(self, level: int, state: State, tokens: Sequence[int]) -> tuple[State, Tensor]:
        (f, s), linear, embedded = state, self.backend.linear, embed(self.target.decoder, tokens)
        if self.rnn_u is None:
            s = s + embedded
        else:
            s = by_rows(F.silu, linear(s, self.rnn_u, linear(embedded, self.rnn_w)))
        return (f, s), self._logits(torch.cat([f, s], dim=1))

    def _logits(self, x: Tensor) -> Tensor:
        """float32 [n, V]; -inf except the TOP highest, which the reference selects before its softmax."""
        x = x if self.input_proj is None else self.backend.linear(x, self.input_proj)
        logits = self.backend.linear(residual(self.backend, x, self.blocks), self.lm_head).float()
        lowest = logits.topk(min(TOP, logits.shape[1])).values[:, -1:]
        return logits.masked_fill(logits < lowest, float("-inf"))
