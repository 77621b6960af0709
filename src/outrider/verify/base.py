"""Base class of verification rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from outrider.core.processor import Ids
from outrider.core.step import Batch
from outrider.core.tree import ROOT, DraftTree
from outrider.core.validate import NoOptions
from outrider.errors import OutriderError
from outrider.sampling.random_streams import normal


class Picker(Protocol):
    """Lazily evaluated picks and distributions of the target at the nodes of a batch, and random choices.

    path: tokens from the root to `node` (-1 = the root) of row `row` of the batch.  An OutriderError at the
    root ends the row.

    The random streams (sampling draft tokens, accepting, emitting) are functions of (seed, sample, row
    length, node).  They are independent of each other and of the noise that `pick` adds.
    """

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        """The target's own token after `path`, as in plain decoding."""

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        """The target's distribution after `path`, float64 [V], with all sampling parameters applied."""

    def accept(self, row: int, node: int, probability: float) -> bool:
        """True with this probability; called at most once a node."""

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        """A token from `distribution`, to be emitted after `node`."""


class RowPicker:
    """`Picker` of one row.

    Where a draft token leads to an OutriderError, say of a logits processor, that token seems to follow
    itself, and nothing behind it may be emitted (`known`).  The text may end before.  If it does not, the
    next step fails, as in plain decoding.

    unknown: paths to such draft tokens.
    """

    __slots__ = ("at_root", "picker", "row", "unknown")

    def __init__(self, picker: Picker, row: int) -> None:
        self.picker, self.row = picker, row
        self.at_root: Tensor | None = None  # the distribution there
        self.unknown: list[list[int]] = []

    def pick(self, node: int, path: Sequence[int]) -> int:
        try:
            return self.picker.pick(self.row, node, path)
        except OutriderError:
            if node == ROOT:
                raise
            self.unknown.append(list(path))
            return path[-1]

    def p(self, node: int, path: Sequence[int]) -> Tensor:
        try:
            p = self.picker.p(self.row, node, path)
        except OutriderError:
            if self.at_root is None:
                raise
            self.unknown.append(list(path))
            return point_mass(path[-1], self.at_root)
        if node == ROOT:
            self.at_root = p
        return p

    def accept(self, node: int, probability: float) -> bool:
        return self.picker.accept(self.row, node, probability)

    def draw(self, node: int, distribution: Tensor) -> int:
        return self.picker.draw(self.row, node, distribution)

    def known(self, emitted: Sequence[int]) -> int:
        """Number of the tokens to emit that are not behind an unknown path."""
        lengths = [len(path) for path in self.unknown if emitted[: len(path)] == path]
        return min(lengths, default=len(emitted))


class Rule:
    """Verification rule: decides which draft tokens are accepted and what is emitted.

    A subclass is one file in this folder, named after the rule.

    Options       frozen dataclass of the rule's keys in speculative_config
    lossless      the emitted tokens have the target's distribution
    keeps_tokens  they are those of plain decoding, token for token
    needs_probs   uses the distribution q of draft tokens: drafters should sample from q and report it
    branches      can judge siblings
    kernel        name of the rule in backends, which may then verify a tree within the forward; "" for none.
                  Not inherited: a subclass is another rule.
    """

    Options: ClassVar[type[Any]] = NoOptions

    lossless: ClassVar[bool] = True
    keeps_tokens: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    kernel: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kernel = vars(cls).get("kernel", "")

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options or self.Options()

    @property
    def promise(self) -> str:
        """What stays as in plain decoding: "tokens", their "distribution", or nothing ("lossy")."""
        return "lossy" if not self.lossless else "tokens" if self.keeps_tokens else "distribution"

    def __call__(self, batch: Batch, picker: Picker) -> None:
        """Set `accepted` and `emitted` of every row, or `error` of a row that fails (see Scheduler.clip)."""
        for r, step in enumerate(batch):
            if step.emits and not step.verified:
                target = RowPicker(picker, r)
                try:
                    step.accepted, step.emitted = self.walk(step.tree, target)
                    step.shorten(target.known(step.emitted))
                    if step.row.grammar is not None:
                        step.shorten(step.row.grammar.checked(Ids(step.row.tokens, step.emitted)))
                except OutriderError as error:
                    step.row.error = error.with_traceback(None)  # its frames hold the row, which holds it

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        """The accepted nodes from the root down, and the tokens to emit: theirs and one more."""
        raise NotImplementedError


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """Node -> its children that may be accepted, in sampling order."""
    found: dict[int, list[int]] = {ROOT: []}
    for node in range(tree.size):
        found.setdefault(tree.parents[node], []).append(node)
    return found


def q_of(tree: DraftTree, node: int) -> Tensor | None:
    """`DraftTree.distribution` on the CPU, where p is."""
    q = tree.distribution(node)
    return None if q is None else q.cpu()


def point_mass(token: int, like: Tensor) -> Tensor:
    """The distribution, float64 [V], of a chosen token."""
    mass = torch.zeros_like(like)
    mass[token] = 1.0
    return mass


def residual(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    """The residual distribution, [scale·p - q]₊ normalized, and its mass; (p, 0) if rounding leaves none."""
    rest = (scale * p - q).clamp_min(0.0)
    mass = float(rest.sum())
    return (normal(rest), mass) if mass > 0 else (p, 0.0)
