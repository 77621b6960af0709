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

Published names.  Ours are the reference's, without optional prefixes.

    input_proj           where the head is not as wide as its input
    lm_head.{i}.linear   residual block i of n
    lm_head.{n}          the matrix to the vocabulary
    rnn_u, rnn_w         the recurrence

The reference's trainer saves the head beside its target.  vLLM and SGLang do not read such heads;
TensorRT-LLM converts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import FINAL, RowStep
from outrider.core.tree import Budget, DraftTree
from outrider.core.validate import whole
from outrider.drafting.base import DEPTHS, Drafter, Target
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import NO_VIEW
from outrider.heads.base import HeadOptions, State, StateDrafter, random_head
from outrider.heads.choose import Chooser
from outrider.heads.layer import residual
from outrider.heads.layouts import HeadFormat, Layout, matching, unchanged
from outrider.heads.outer import Ids, embed
from outrider.heads.parts import ResidualBlock
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.trees import SampledTree, sources_of
from outrider.models.rowwise import by_rows

MODEL_TYPE = "recurrent_drafting_drafter"  # of the reference's config
SHARED = (
    ("input_projs.{kind}", "input_proj.{kind}"),
    *unchanged("input_proj.{kind}", "rnn_u.{kind}", "rnn_w.{kind}"),
)


def _block_count(head: Head) -> dict[str, int]:
    return {"blocks": sum(1 for _ in matching(head, "drafter.layers.{i}.linear.weight"))}


CONVERTED = Layout(
    "TensorRT-LLM",
    ("drafter.layers.{i}.linear.weight",),
    (
        ("layers.{i}.linear.{kind}", "lm_head.{i}.linear.{kind}"),
        ("lm_head.weight", "lm_head.{blocks}.weight"),
        *SHARED,
    ),
    ("drafter.",),
    numbers=_block_count,
    beside_target=True,
)
NUMBERED = Layout(  # Medusa's names are the same
    "reference, numbered",
    ("0.{i}.linear.weight", "0.{i}.weight"),
    (("0.{i}.linear.{kind}", "lm_head.{i}.linear.{kind}"), ("0.{i}.weight", "lm_head.{i}.weight"), *SHARED),
    applies=lambda head: head.config.get("model_type") == MODEL_TYPE,
)
REFERENCE = Layout(
    "reference",
    ("lm_head.{i}.linear.weight", "lm_heads.{i}.linear.weight", "rnn_u.weight", "rnn_w.weight"),
    (("lm_heads.{i}.{rest}", "lm_head.{i}.{rest}"), *unchanged("lm_head.{i}.{rest}"), *SHARED),
    ("module.", "drafter."),
    beside_target=True,
)
FORMAT = HeadFormat(
    (CONVERTED, NUMBERED, REFERENCE),
    hidden=(("rnn_u.weight", 1),),
    vocabulary=("lm_head.{i}.weight",),
    kinds=MODEL_TYPE,
)


def blocks(head: Head) -> int:
    """The number of residual blocks."""
    last = [int(name.split(".")[1]) for name in matching(head, "lm_head.{i}.weight")]
    return max(last, default=sum(name.endswith(".linear.weight") for name in head))


STEPS = 5  # in the loss


class Network(nn.Module):
    """Network for training, with the reference's names.

    layers: residual blocks.  exit_dim: their width, 2 * hidden unless given.  rnn: otherwise states are sums
    of embeddings.
    """

    def __init__(
        self, hidden: int, vocabulary: int, layers: int = 2, exit_dim: int | None = None, rnn: bool = True
    ) -> None:
        super().__init__()
        self.hidden, self.vocabulary, self.layers = hidden, vocabulary, layers
        width = self.exit_dim = exit_dim or 2 * hidden
        self.input_proj = nn.Linear(2 * hidden, width) if width != 2 * hidden else None
        blocks = [ResidualBlock(width, width) for _ in range(layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(width, vocabulary, bias=False))
        self.rnn_u = nn.Linear(hidden, hidden) if rnn else None
        self.rnn_w = nn.Linear(hidden, hidden, bias=False) if rnn else None

    def config(self) -> dict[str, Any]:
        return {
            "model_type": MODEL_TYPE,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "exit_dim": self.exit_dim,
            "num_draft_layers": self.layers,
            "rnn": self.rnn_u is not None,
        }

    def step(self, s: Tensor, embedded: Tensor) -> Tensor:
        """The next state [n, hidden], after a token of these embeddings."""
        if self.rnn_u is None or self.rnn_w is None:
            return s + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(s))

    def forward(self, f: Tensor, s: Tensor) -> Tensor:
        """Logits [n, V] of the target's states f and the head's own s, [n, hidden] both."""
        x = torch.cat([f, s], dim=-1)
        logits: Tensor = self.lm_head(x if self.input_proj is None else self.input_proj(x))
        return logits

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Sum over the steps of the mean cross entropy with the text, whose own tokens every step reads.

        s_1 = step(0,   e(x_t+1))    [f_t ; s_1] predicts x_t+2
        s_2 = step(s_1, e(x_t+2))    [f_t ; s_2] predicts x_t+3 …
        """
        f, tokens = sample.states[FINAL], sample.tokens
        embedded, s = F.embedding(tokens, outer.embedding), torch.zeros_like(f)
        total = f.new_zeros(())
        for step in range(1, min(STEPS, len(tokens) - 2) + 1):
            count = len(tokens) - step - 1  # positions t with a token at t + step + 1
            s = self.step(s[:count], embedded[step : step + count])
            rows = sample.places(step, count)
            total = total + sample.text_loss(self(f[rows], s.index_select(0, rows)), step + 1 + rows)
        return total


MAX_WIDTH, MAX_LENGTH = 64, 1025
TOP = 50  # continuations of a beam, and all that equal the last of them


class Beams(Tree):
    """The beams of one row as a tree: a level keeps the `width` likeliest continuations of its beams,
    and every prefix is a node.

    The likeliest nodes of all levels are kept, as many as the budget has.  A beam that is not among them
    can have no child among them, and ends.
    """

    def __init__(self, row: Row, budget: Budget, width: int) -> None:
        super().__init__(row, 0, Budget(budget.depth, width * budget.depth), width)  # the nodes have no K/V
        self.max_nodes = budget.nodes
        self.sources: Sequence[int] = [0]

    def add_level(self, choose: Chooser, logits: Tensor) -> None:
        parents = self.frontier
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
        return super().draft_tree.only(sorted(self._likeliest()))


class ReDrafter(StateDrafter):
    FORMAT = FORMAT
    tunable: ClassVar = {**DEPTHS, "beam_width": (2, 3, 5), "nodes": (4, 16)}
    demo: ClassVar = {
        "ReDrafter": {"model": "builtin-redrafter", "num_speculative_tokens": 3, "beam_width": 1}
    }

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """beam_width: beams that a level keeps (TensorRT-LLM: redrafter_num_beams).  beam_length:
        tokens of a beam with the pending token, one more than levels (redrafter_draft_len_per_beam), unless
        num_speculative_tokens is given.  nodes: of a tree at most, the likeliest (None: all prefixes of
        beams, but 7 on a CPU, where every node costs time).
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
        self.rnn_u = reader.linear_with_bias(["rnn_u"], hidden, hidden) if rnn else None
        self.rnn_w = reader.linear("rnn_w", hidden, hidden) if rnn else None
        self.input_proj = reader.linear_with_bias(["input_proj"], width, 2 * hidden) if projected else None
        self.blocks = [reader.linear_with_bias([f"lm_head.{i}.linear"], width, width) for i in range(count)]
        self.lm_head = reader.outer.linear(f"lm_head.{count}", target.vocabulary, width)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network, which is nearly always wrong."""
        head = random_head(Network, target.decoder.spec.hidden, target.vocabulary)
        return cls(cls.Options(beam_width=3, beam_length=5, nodes=12), target, head)

    def size(self, depth: int) -> int:
        width: int = self.options.beam_width
        return min(self.nodes, depth * width)

    def tree(self, step: RowStep) -> Beams | SampledTree:
        row, budget, width = step.row, step.budget, self.options.beam_width
        if not self.samples(row):
            return Beams(row, budget, width)
        return self.sampled_tree(row, NO_VIEW.slots, 0, budget, width)

    def begin(self, states: Tensor) -> State:
        return states, torch.zeros_like(states)

    def advance(self, level: int, state: State, tokens: Ids) -> tuple[State, Tensor]:
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
