"""What a verification rule is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from outrider.core.step import Batch
from outrider.core.tree import ROOT, DraftTree
from outrider.errors import OutriderError
from outrider.sampling.random_streams import normal


class Picker(Protocol):
    """The target's answers and the dice, asked lazily.  `path`: the tokens from the root to `node` (-1 = the root) of a batch row.

    What raises an OutriderError ends its row.  The three streams of random numbers (drawing guesses, accepting, drawing tokens) are
    functions of (seed, sample, length of the row, node), and independent of each other and of the noise that `pick` adds.
    """

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        """The target's own token after `path`: what plain decoding says there."""

    def follow(self, row: int) -> tuple[list[int], list[int]] | None:
        """What `match` says of the row's tree, accepted nodes and tokens; None where it has to ask pick by pick."""

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        """The target's law after `path`, float64 [V]: processors, temperature, top_k, top_p and min_p included."""

    def accept(self, row: int, node: int, probability: float) -> bool:
        """True with this probability; asked at most once a node."""

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        """A token from `distribution`, to be emitted after `node`."""


class RowPicker:
    """`Picker` of one row."""

    __slots__ = ("distributions", "row")

    def __init__(self, distributions: Picker, row: int) -> None:
        self.distributions, self.row = distributions, row

    def pick(self, node: int, path: Sequence[int]) -> int:
        return self.distributions.pick(self.row, node, path)

    def follow(self) -> tuple[list[int], list[int]] | None:
        return self.distributions.follow(self.row)

    def p(self, node: int, path: Sequence[int]) -> Tensor:
        return self.distributions.p(self.row, node, path)

    def accept(self, node: int, probability: float) -> bool:
        return self.distributions.accept(self.row, node, probability)

    def draw(self, node: int, distribution: Tensor) -> int:
        return self.distributions.draw(self.row, node, distribution)


class Rule:
    """Decides what is emitted.  A subclass is one file in this folder, named after the rule.

    Options: a frozen dataclass of the rule's keys in speculative_config.  lossless: what is emitted has the target's law.  same: it is
    token for token what plain decoding says.  drawn: guesses are judged by the laws that they were drawn from, so drafters that
    have one should draw, and say it; the others choose.  branches: it can judge siblings.
    """

    @dataclass(frozen=True)
    class Options:
        pass

    lossless: ClassVar[bool] = True
    same: ClassVar[bool] = False
    drawn: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options or self.Options()

    @property
    def promise(self) -> str:
        """What the emitted tokens are: plain decoding's "tokens", tokens of its "law", or "lossy"."""
        return "lossy" if not self.lossless else "tokens" if self.same else "law"

    def __call__(self, batch: Batch, picker: Picker) -> None:
        """Set `accepted` and `emitted` of every row.  A row that fails gets its error and ends (see Scheduler.clip)."""
        for r, step in enumerate(batch):
            if step.emits:
                try:
                    step.accepted, step.emitted = self.walk(step.tree, RowPicker(picker, r))
                except OutriderError as error:
                    step.row.error = error

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        """The accepted nodes from the root down, and the tokens to emit: theirs and one more."""
        raise NotImplementedError


def below(tree: DraftTree) -> dict[int, list[int]]:
    """Node -> its children that may be accepted, in the order in which they were drawn."""
    found: dict[int, list[int]] = {ROOT: []}
    for node in range(tree.size):
        found.setdefault(tree.parents[node], []).append(node)
    return found


def surplus(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    """(The law of [scale·p - q]₊, its mass); p itself where rounding leaves no mass, which has probability zero."""
    rest = (scale * p - q).clamp_min(0.0)
    mass = float(rest.sum())
    return (normal(rest), mass) if mass > 0 else (p, 0.0)
