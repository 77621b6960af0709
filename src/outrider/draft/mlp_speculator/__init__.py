"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), and Arctic's variants of it.

A small recurrent network with its own embeddings and heads, started from the state that gave the pending
token:

    position   … e-2     e-1 │  e      e+1        e: the first draft token
    target     f_e-2         │                    its last state
    token            x_e-1   │  d_e    d_e+1      x: emitted, d: draft
    step 0 reads f_e-2 and x_e-1, its logits give d_e;  step 1 reads the state of step 0 and d_e, and gives
    d_e+1;  …

sw = 0.5^(0.5 / n_predict), ew = sqrt((1 - sw²) d / 2)            n_predict of the file, not of the drafts
mlp     s' = GELU(norm(proj(s) + ew/sw · emb(token)))             the norm is an RMS norm with a shift
lstm    f, i, o, g = proj(s) + ew/sw · emb(token)
        c' = c σ(f) + GELU(norm(g)) σ(i);   s' = GELU(norm(c')) σ(o)
logits = head(s')

A chain by default, as in vLLM; `top_k_tokens_per_head` makes it IBM's tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import RowStep
from outrider.core.tree import DraftTree
from outrider.core.validate import check_fields, is_whole, optional, whole
from outrider.draft.mlp_speculator.layouts import FORMAT, GATES, KINDS, Steps, is_lstm
from outrider.draft.mlp_speculator.network import EPS, Network, token_share
from outrider.drafting.base import Drafter, Target
from outrider.drafting.options import refuse_idle
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import HeadOptions, State, StateDrafter, random_head
from outrider.heads.layouts import numbers
from outrider.heads.outer import embed
from outrider.heads.ranks import best_nodes, likeliest, product
from outrider.heads.reader import Reader
from outrider.heads.trees import RankTree
from outrider.models.rowwise import by_rows

MAX_NODES = 1024  # of a product


class Norm(NamedTuple):
    """GELU(x / rms(x) · weight + bias)."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def read(reader: Reader, name: str, size: int) -> Norm:
        bias = reader.vector(f"{name}.bias", size).to(reader.backend.activations)
        return Norm(reader.vector(f"{name}.weight", size), bias)

    def __call__(self, x: Tensor, run: Backend) -> Tensor:
        return by_rows(F.gelu, run.rms_norm(x, self.weight, EPS) + self.bias)


class Step(NamedTuple):
    """table: the embedding.  emb, proj, norm: modules in a row.  share: of the token beside the state."""

    table: Any
    emb: Sequence[Any]
    proj: Sequence[Any]
    norm: Sequence[Any]
    head: Any
    share: float


class Speculator:
    """The network on the target's kernels, step by step."""

    def __init__(self, reader: Reader, steps: Steps, target: Target) -> None:
        self.reader, self.head, self.backend, self.model = reader, reader.head, reader.backend, target.decoder
        self.steps, self.hidden, self.vocabulary = steps, self.model.spec.hidden, target.vocabulary
        self.outer = lru_cache(None)(reader.outer.linear)  # what several steps share is packed once
        scaled = self.head.config.get("scale_input") is True
        self.scale = torch.full((self.hidden,), 0.5**0.5, device=self.backend.device) if scaled else None

    def begin(self, states: Tensor) -> State:
        """The initial state, of the target's states [n, hidden]."""
        return (states if self.scale is None else self.backend.rms_norm(states, self.scale, EPS),)

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        """The state after tokens `ids`, and the logits float32 [n, V] of the next token."""
        raise NotImplementedError


class Mlp(Speculator):
    def __init__(self, reader: Reader, steps: Steps, target: Target) -> None:
        super().__init__(reader, steps, target)
        modules, width = lru_cache(None)(partial(_modules, reader)), self.hidden
        self.each: list[Step] = []
        for i in range(steps.count):
            emb, proj, ln, head = (f"{kind}.{steps.place(kind, i)}" for kind in KINDS)
            wide = self.head.shape(f"{emb}.0.weight")[-1]
            table = self.outer(f"{emb}.0", self.vocabulary, wide)
            after, wide = modules(emb, wide, 1)
            projected, proj_width = modules(proj, width, 0)
            if proj_width != wide:
                raise ModelError(
                    f"{self.head.name!r} adds {proj} of {proj_width} numbers to {emb} of {wide}: the two "
                    "must be alike."
                )
            normed, width = modules(ln, wide, 0)
            out, share = self.outer(head, self.vocabulary, width), token_share(steps.count, wide)
            self.each.append(Step(table, after, projected, normed, out, share))

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        now = self.each[step]
        z = self._through(embed(self.model, ids, now.table), now.emb)
        s = self._through(self._through(state[0], now.proj) + now.share * z, now.norm)
        return (s,), self.backend.linear(s, now.head).float()

    def _through(self, x: Tensor, modules: Sequence[Any]) -> Tensor:
        for module in modules:
            x = module(x, self.backend) if isinstance(module, Norm) else self.backend.linear(x, module)
        return x


def _modules(reader: Reader, at: str, width: int, first: int) -> tuple[list[Any], int]:
    """The modules at.first … for an input of this width, and the width of their output."""
    modules: list[Any] = []
    for j in sorted(numbers(reader.head, f"{at}.{{j}}.weight", field="j")):
        if j < first:
            continue
        size, *inputs = reader.head.shape(f"{at}.{j}.weight")
        read = partial(reader.linear, inputs=width) if inputs else partial(Norm.read, reader)
        modules.append(read(f"{at}.{j}", size if inputs else width))
        width = size
    return modules, width


class Lstm(Speculator):
    def __init__(self, reader: Reader, steps: Steps, target: Target) -> None:
        super().__init__(reader, steps, target)
        head = self.head
        self.width = width = head.shape("forget_emb.0.weight")[-1]
        tied = head.config.get("tie_lstm_embs", "input_emb.0.weight" not in head)
        gates = GATES[:1] if tied else GATES
        self.tables = [self.outer(f"{gate}_emb.0", self.vocabulary, width) for gate in gates]
        inputs = (self.hidden, width)[: steps.count]
        self.projs = [self._gates(i, size) for i, size in enumerate(inputs)]
        self.norms = [Norm.read(reader, f"{name}_ln.0", width) for name in ("cell", "state")]
        places = [steps.place("head", i) for i in range(steps.count)]
        self.heads = [self.outer(f"head.{i}", self.vocabulary, width) for i in places]
        self.share = token_share(steps.count, width)

    def _gates(self, i: int, inputs: int) -> Any:
        if f"projs.{i}.weight" in self.head:
            return self.reader.linear(f"projs.{i}", 4 * self.width, inputs)
        return self.reader.fused([(f"{gate}_proj.{i}", self.width) for gate in GATES], inputs)

    def begin(self, states: Tensor) -> State:
        return *super().begin(states), states.new_zeros(len(states), self.width)

    def __call__(self, step: int, state: State, ids: Sequence[int]) -> tuple[State, Tensor]:
        run, (s, cell), (cell_norm, state_norm) = self.backend, state, self.norms
        z = torch.cat([embed(self.model, ids, table) for table in self.tables], dim=-1)
        z = z if len(self.tables) == len(GATES) else z.repeat(1, len(GATES))
        gates = run.linear(s, self.projs[min(step, 1)]) + self.share * z
        opened, new = gates[:, : 3 * self.width].contiguous(), gates[:, 3 * self.width :].contiguous()
        forget, enter, leave = by_rows(torch.sigmoid, opened).chunk(3, dim=-1)
        cell = cell * forget + cell_norm(new, run) * enter
        s = state_norm(cell, run) * leave
        return (s, cell), run.linear(s, self.heads[step]).float()


class WholeProduct(RankTree):
    """All paths of top_k children, of which the likeliest by the network's probabilities are kept."""

    def __init__(self, row: Row, top_k: tuple[int, ...], candidates: int, nodes: int) -> None:
        super().__init__(row, product(top_k))
        self.candidates, self.nodes = candidates, nodes

    @property
    def draft_tree(self) -> DraftTree:
        joint = [self.joint[node] for node in range(len(self.tokens))]
        return super().draft_tree.only(best_nodes(self.parents, joint, self.candidates, self.nodes))


def _check(top_k: Any, where: str = "") -> tuple[int, ...]:
    """Raise ConfigError unless it lists a number of children for each step."""
    if not isinstance(top_k, (list, tuple)) or not top_k or not all(is_whole(k, 1, 64) for k in top_k):
        raise ConfigError(
            f'top_k_tokens_per_head{where} must be a list of whole numbers in 1 … 64, or "config", '
            f"got {top_k!r}."
        )
    if (nodes := sum(math.prod(top_k[:level]) for level in range(1, len(top_k) + 1))) > MAX_NODES:
        raise ConfigError(
            f"top_k_tokens_per_head{where} {list(top_k)} makes {nodes} nodes, at most {MAX_NODES} are grown: "
            "choose less."
        )
    return tuple(top_k)


class MlpSpeculator(StateDrafter):
    FORMAT = FORMAT
    demo: ClassVar = {"MLP speculator": {"model": "builtin-mlp_speculator", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(HeadOptions):
        """top_k_tokens_per_head: children of a node, step by step, such as [4, 3, 2, 2]; "config" for the
        checkpoint's value (None: one, a chain).  n_candidates: paths of that tree to keep (None: the
        checkpoint's value, or all). nodes: of a tree at most (None: all, but 8 on a CPU, where every node
        costs time).
        """

        top_k_tokens_per_head: Sequence[int] | str | None = None
        n_candidates: int | None = None
        nodes: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.top_k_tokens_per_head not in (None, "config"):
                _check(self.top_k_tokens_per_head)
            count, branching = optional(whole(1, MAX_NODES)), self.top_k_tokens_per_head is not None
            check_fields(self, {"n_candidates": count, "nodes": count})
            refuse_idle(self, branching, "top_k_tokens_per_head", "n_candidates", "nodes")

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        steps = Steps.of(self.head)
        self.speculator = (Lstm if is_lstm(self.head) else Mlp)(self.reader, steps, target)
        self.depth = steps.count
        self.top_k, self.candidates = self._branches(options)
        chain = options.top_k_tokens_per_head is None
        self.nodes = self.depth if chain else target.nodes(options.nodes, MAX_NODES)

    def _branches(self, options: Options) -> tuple[tuple[int, ...], int]:
        """(children of a node, level by level; number of paths to keep)."""
        asked, config = options.top_k_tokens_per_head, self.head.config
        if asked is None:
            return (1,) * self.depth, 1
        in_file = config.get("top_k_tokens_per_head")
        top_k = _check(in_file, f" of {self.head.name!r}") if asked == "config" else _check(asked)
        if len(top_k) != self.depth:
            raise ConfigError(
                f"top_k_tokens_per_head {list(top_k)} is for {len(top_k)} steps, and {self.head.name!r} has "
                f"{self.depth}."
            )
        kept: Any = options.n_candidates or config.get("n_candidates")
        return top_k, kept if is_whole(kept, 1, MAX_NODES) else math.prod(top_k)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        options = cls.Options(top_k_tokens_per_head=[3, 2, 2], n_candidates=5)
        return cls(options, target, random_head(Network, target.decoder.spec.hidden, 32, target.vocabulary))

    def size(self, depth: int) -> int:
        self.check_depth(depth, self.depth, "steps (n_predict)")
        paths = (math.prod(self.top_k[:level]) for level in range(1, depth + 1))
        return min(self.nodes, sum(min(count, self.candidates) for count in paths))

    def tree(self, step: RowStep) -> RankTree:
        row, top_k, nodes = step.row, self.top_k[: step.budget.depth], min(self.nodes, step.budget.nodes)
        if row.distribution.temperature == 0:
            return WholeProduct(row, top_k, self.candidates, nodes)
        sampled = self.samples(row)
        shape = likeliest(top_k, self.candidates, nodes, sampled)
        return RankTree(row, shape, sampled=sampled, stream_id=self.target.stream_id)

    def begin(self, states: Tensor) -> State:
        return self.speculator.begin(states)

    def advance(self, level: int, state: State, tokens: Sequence[int]) -> tuple[State, Tensor]:
        return self.speculator(level, state, tokens)
