"""Base of recurrent speculators (IBM's, arXiv 2404.19124, and Arctic's): their steps, and their trees.

A chain by default, as in vLLM; `top_k_tokens_per_head` makes it IBM's tree: all paths of so many children, of
which the likeliest are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.base import Backend
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step import RowStep
from outrider.core.tree import ROOT, DraftTree
from outrider.core.validate import is_whole, whole
from outrider.drafting.base import Target
from outrider.drafting.options import refuse_idle
from outrider.drafting.trees.builder import RANK_CONFIDENCE, SAMPLE_CONFIDENCE
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import HeadOptions, State, StateDrafter
from outrider.heads.layouts import numbers
from outrider.heads.ranks import Path
from outrider.heads.reader import Reader
from outrider.heads.trees import RankTree
from outrider.models.rowwise import by_rows

KINDS = ("emb", "proj", "ln", "head")  # weights of a step
PREFIX = "speculator."  # of names, in some files
EPS = 1e-6
MAX_NODES = 1024  # of a product
Nodes = Annotated[int, whole(1, MAX_NODES)]


def steps_of(head: Head, kinds: Sequence[str] = KINDS, shared: bool = False) -> dict[str, list[int]]:
    """Kind of weights -> for every step, the number of its weights.

    head: under our names.  shared: all steps have the same weights, also in a file that names several.
    Raises ModelError for an incomplete file.
    """
    stored = {kind: sorted(numbers(head, f"{kind}.{{i}}.{{rest}}")) for kind in kinds}
    count = max(1 + max(own, default=-1) for own in stored.values())
    missing = list[str]()
    for kind, own in stored.items():
        missing += [f"{kind}.{i}" for i in range(count) if i not in own]
    if not (shared or _shares_weights(head, stored)):
        if missing:
            raise ModelError(f"{head.name!r} has weights for {count} steps, but no {missing[0]}.")
        return stored
    if count < 2 or (count == 2 and missing):  # the names do not show the number of steps
        count = _announced_steps(head)
    return {kind: [_shared_number(own, kind, i) for i in range(count)] for kind, own in stored.items()}


def _shares_weights(head: Head, stored: Mapping[str, Sequence[int]]) -> bool:
    """Whether all steps have the same weights, by the config, or because the file holds them once."""
    once = stored["emb"] == stored["ln"] == [0] and stored["proj"] == [0, 1]
    return once or head.config.get("tie_weights") is True


def _announced_steps(head: Head) -> int:
    announced: Any = head.config.get("n_predict")
    if not is_whole(announced, 1):
        raise ModelError(
            f"{head.name!r} holds one set of weights for all steps, "
            f"and its n_predict does not say for how many: {announced!r}."
        )
    return int(announced)


def _shared_number(stored: Sequence[int], kind: str, step: int) -> int:
    """The number of the weights of a step, where steps share them."""
    lowest = 1 if kind == "proj" and step > 0 else 0  # the first is never shared: the target may be wider
    return min((number for number in stored if number >= lowest), default=lowest)


def refused(head: Head) -> str:
    """Why a speculator under its published names is not supported; "" if it is."""
    if head.config.get("speculators_model_type") == "mlp":
        return "it is of the type 'mlp' of speculators 0.1; take one with IBM's names"
    announced = head.config.get("method", "sum_rnn")
    known = announced in ("sum_rnn", "sum_lstm")
    return "" if known else f"it is of the method {announced!r}; only sum_rnn and sum_lstm are"


def token_share(n_predict: int, width: int) -> float:
    """Weight of a token's embedding beside the state."""
    sw: float = 0.5 ** (0.5 / n_predict)
    return math.sqrt((1 - sw**2) * width / 2) / sw


def gelu(x: Tensor) -> Tensor:
    """Exact GELU.  On a CPU from erf: torch's own takes a millisecond to start oneDNN's threads."""
    if x.device.type != "cpu":
        return F.gelu(x)
    wide = x.float()
    return (wide * (0.5 + 0.5 * torch.erf(wide * 0.5**0.5))).to(x.dtype)


class Norm(NamedTuple):
    """GELU(x / rms(x) · weight + bias)."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def read(reader: Reader, name: str, size: int) -> Norm:
        bias = reader.vector(f"{name}.bias", size).to(reader.backend.activations)
        return Norm(reader.vector(f"{name}.weight", size), bias)

    def __call__(self, x: Tensor, run: Backend) -> Tensor:
        return by_rows(gelu, run.rms_norm(x, self.weight, EPS) + self.bias)


@dataclass(frozen=True)
class SpeculatorOptions(HeadOptions):
    """top_k_tokens_per_head: children of a node, step by step, such as [4, 3, 2, 2]; "config" for the
    checkpoint's value (None: one, a chain).  n_candidates: paths of that tree to keep (None: the
    checkpoint's value, or all). nodes: of a tree at most (None: all, but 7 on a CPU, where every node
    costs time).
    """

    top_k_tokens_per_head: Sequence[int] | str | None = None
    n_candidates: Nodes | None = None
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k_tokens_per_head not in (None, "config"):
            check_branches(self.top_k_tokens_per_head)
        branching = self.top_k_tokens_per_head is not None
        refuse_idle(self, branching, "top_k_tokens_per_head", "n_candidates", "nodes")


def check_branches(top_k: Any, where: str = "") -> tuple[int, ...]:
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


class Branching(NamedTuple):
    """Shape of a tree.  top_k: children of a node, level by level.  candidates: paths to keep."""

    top_k: tuple[int, ...]
    candidates: int


class SpeculatorDrafter(StateDrafter):
    """Base of recurrent speculators.  top_k, candidates: see `Branching`."""

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.outer = lru_cache(None)(self.reader.outer.linear)  # what several steps share is packed once
        scaled = self.head.config.get("scale_input") is True
        self.scale = torch.full((self.hidden,), 0.5**0.5, device=self.backend.device) if scaled else None

    def plan(self, steps: int) -> None:
        """Set the shapes of trees, for a head of so many steps."""
        self.depth = steps
        self.top_k, self.candidates = self._branching(self.options)
        chain = self.options.top_k_tokens_per_head is None
        self.nodes = steps if chain else self.target.nodes(self.options.nodes, MAX_NODES)

    def begin(self, states: Tensor) -> State:
        return (states if self.scale is None else self.backend.rms_norm(states, self.scale, EPS),)

    def _branching(self, options: SpeculatorOptions) -> Branching:
        """Branching of the options; a chain by default."""
        given, config = options.top_k_tokens_per_head, self.head.config
        if given is None:
            return Branching((1,) * self.depth, 1)
        if given == "config":
            top_k = check_branches(config.get("top_k_tokens_per_head"), f" of {self.head.name!r}")
        else:
            top_k = check_branches(given)
        if len(top_k) != self.depth:
            raise ConfigError(
                f"top_k_tokens_per_head {list(top_k)} is for {len(top_k)} steps, and {self.head.name!r} has "
                f"{self.depth}."
            )
        kept: Any = options.n_candidates or config.get("n_candidates")
        return Branching(top_k, kept if is_whole(kept, 1, MAX_NODES) else math.prod(top_k))

    def size(self, depth: int) -> int:
        self.check_depth(depth, self.depth, "steps (n_predict)")
        paths = (math.prod(self.top_k[:level]) for level in range(1, depth + 1))
        return min(self.nodes, sum(min(count, self.candidates) for count in paths))

    def tree(self, step: RowStep) -> RankTree:
        row, top_k, nodes = step.row, self.top_k[: step.budget.depth], min(self.nodes, step.budget.nodes)
        if row.distribution.temperature == 0:
            return ProductTree(row, top_k, self.candidates, nodes)
        sampled = self.samples(row)
        shape = likeliest(top_k, self.candidates, nodes, sampled)
        return RankTree(row, shape, sampled=sampled, stream_id=self.target.stream_id)


class ProductTree(RankTree):
    """All paths of top_k children, of which the likeliest by the network's probabilities are kept."""

    def __init__(self, row: Row, top_k: tuple[int, ...], candidates: int, nodes: int) -> None:
        super().__init__(row, product(top_k))
        self.candidates, self.nodes = candidates, nodes

    @property
    def draft_tree(self) -> DraftTree:
        joint = [self.joint[node] for node in range(len(self.tokens))]
        return super().draft_tree.only(best_nodes(self.parents, joint, self.candidates, self.nodes))


def best_nodes(parents: Sequence[int], joint: Sequence[float], candidates: int, nodes: int) -> list[int]:
    """The nodes of the `candidates` likeliest paths, of these the `nodes` likeliest, ascending.

    joint: probability of the path to each node.  Parents are kept with their children.
    """
    inner = set(parents)
    leaves = sorted((i for i in range(len(parents)) if i not in inner), key=lambda i: -joint[i])
    kept: set[int] = set()
    for node in leaves[:candidates]:
        while node != ROOT and node not in kept:
            kept.add(node)
            node = parents[node]
    return sorted(sorted(kept, key=lambda i: (-joint[i], i))[:nodes])


@lru_cache(maxsize=64)
def product(top_k: tuple[int, ...]) -> list[Path]:
    """All paths of ranks where a node of level i has top_k[i] children, level by level."""
    levels = range(1, len(top_k) + 1)
    return [path for level in levels for path in itertools.product(*map(range, top_k[:level]))]


@lru_cache(maxsize=64)
def likeliest(top_k: tuple[int, ...], candidates: int, nodes: int, sampled: bool) -> list[Path]:
    """The best paths of `product` by their ranks alone: a shape known before any token may be sampled."""
    confidence, paths = SAMPLE_CONFIDENCE if sampled else RANK_CONFIDENCE, product(top_k)
    index: dict[Path, int] = {(): ROOT}
    joint: list[float] = []
    for node, path in enumerate(paths):
        index[path] = node
        parent = index[path[:-1]]
        joint.append((1.0 if parent == ROOT else joint[parent]) * confidence[path[-1]])
    parents = [index[path[:-1]] for path in paths]
    return [paths[node] for node in best_nodes(parents, joint, candidates, nodes)]
