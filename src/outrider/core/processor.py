"""Interface of logits processors and their view of the token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.core.edits import Edits
from outrider.core.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Ids:
    """Tokens up to and including a node, without a copy.

    tokens: prompt and output; the list is append-only.  path: draft tokens from the root to the node.
    """

    tokens: list[int]
    path: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tokens) + len(self.path)

    def since(self, start: int) -> list[int]:
        """The tokens from index `start` on."""
        return [*self.tokens[start:], *self.path[max(0, start - len(self.tokens)) :]]

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens."""
        return tuple(self.since(len(self) - count))


class Processor(Protocol):
    """Edit of the logits of one request: a pure function of the tokens and the logits."""

    def active(self, length: int) -> bool:
        """Whether to edit the logits after `length` tokens (prompt, output and path)."""

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        """Return edited logits [V].  The input logits [V] are read-only."""

    def describe(self, edits: Edits) -> bool:
        """Add what it does after the nodes of a tree.  Returns False if only a call can tell."""


class Grammar(Protocol):
    """Constraint on the output of a row.

    drafts: whether it can judge draft tokens.  A row gets none once they are too complex for it.
    """

    drafts: bool

    def forced(self, ids: Ids) -> list[int]:
        """Tokens of the only text that can follow `ids`, as the tokenizer writes it; empty if several can."""

    def allowed(self, ids: Ids, tree: DraftTree) -> Sequence[int]:
        """Nodes of a tree that the grammar allows, ascending and closed under parents."""

    def checked(self, ids: Ids) -> int:
        """Number of the tokens of `ids.path`, emitted ones, that it could judge: those after are dropped."""

    def restart(self) -> None:
        """Forget the tokens so far, after a step that was interrupted."""


def edits_of(processors: Sequence[Processor], tokens: list[int], tree: DraftTree) -> Edits | None:
    """What the processors of a row with these tokens do in its tree; None if only calls can tell."""
    edits = Edits(tokens, tree)
    return edits if all(processor.describe(edits) for processor in processors) else None
