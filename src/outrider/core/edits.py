"""What the logits processors of a row do after the nodes of its draft tree, as numbers.

Backends that apply these numbers on a device need no logits on the host.  A processor adds its part
(`Processor.describe`), and a backend applies all parts in this order:

    masks and bans | bias | tokens that are masked until a depth | penalties

A mask sets a logit to -inf, where all that follows leaves it.  So its place among the others does not matter,
and the result is that of the processors one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.tree import DraftTree

ALWAYS = (1 << 31) - 1  # a depth that no node reaches
UNSEEN = -1  # count of a token that is neither in the output nor, if it matters, in the prompt
COLUMNS = 4  # of `Edits.entries`

Bits = NDArray[np.uint8]  # of allowed tokens, eight in a byte, the lowest first; those past the end are 0
Numbers = NDArray[np.int32]


class Counted(NamedTuple):
    """Penalties, and the distinct tokens so far.

    tokens, counts: of each its id, and its number in the output
    places: token -> index into these
    """

    repetition: float
    frequency: float
    presence: float
    tokens: NDArray[np.int64]
    counts: Numbers
    places: Mapping[int, int]


NOTHING = Counted(1.0, 0.0, 0.0, np.empty(0, np.int64), np.empty(0, np.int32), {})


class Ban(NamedTuple):
    """A token that is masked after a node alone."""

    node: int
    token: int


class Edits:
    """Edits of the logits after the root of a tree and after each node that may be accepted.

    tokens: the certain tokens of the row.  paths: draft tokens from the root to the root, node 0, node 1, …
    masks:  allowed tokens after each of these; None: all
    bans:   tokens that are masked after one node
    bias:   token -> number that is added to its logit
    until:  token -> depth from which on it is not masked
    """

    def __init__(self, tokens: list[int], tree: DraftTree) -> None:
        self.tokens, self.tree = tokens, tree
        self.paths: list[list[int]] = [[]]
        for token, parent in zip(tree.tokens[: tree.size], tree.parents):
            self.paths.append([*self.paths[parent + 1], token])
        self.masks: list[Bits | None] = [None] * len(self.paths)
        self.bans: list[Ban] = []
        self.bias: dict[int, float] = {}
        self.until: dict[int, int] = {}
        self.counted = NOTHING

    def path(self, node: int) -> list[int]:
        """Draft tokens up to a node; ROOT is the root."""
        return self.paths[node + 1]

    def allow(self, bits: Bits, node: int | None = None) -> None:
        """Mask all other tokens after a node, or everywhere."""
        for place in range(len(self.masks)) if node is None else (node + 1,):
            self.masks[place] = _both(self.masks[place], bits)

    def ban(self, tokens: Iterable[int], node: int) -> None:
        """Mask tokens after a node."""
        self.bans += [Ban(node, token) for token in tokens]

    def ban_until(self, tokens: Iterable[int], depth: int = ALWAYS) -> None:
        """Mask tokens after nodes of less than this depth; the root has depth 0."""
        if depth > 0:
            for token in tokens:
                self.until[token] = max(depth, self.until.get(token, 0))

    def entries(self) -> Numbers:
        """Tokens with a bias, a depth or a penalty: int32 [n, COLUMNS], no token twice.

        Columns: token | count | bits of the float32 bias | depth from which on it is not masked.
        Draft tokens are among them where penalties count them.
        """
        counted = self.counted
        others = [*self.bias, *self.until]
        if counted is not NOTHING:
            others += self.tree.tokens[: self.tree.size]
        places = {token: counted.places.get(token, UNSEEN) for token in others}
        fresh = [token for token, place in places.items() if place == UNSEEN]
        first = len(counted.tokens)
        places.update({token: first + i for i, token in enumerate(fresh)})
        table = np.zeros((first + len(fresh), COLUMNS), np.int32)
        table[:first, 0], table[:first, 1] = counted.tokens, counted.counts
        table[first:, 0], table[first:, 1] = fresh, UNSEEN
        bias = table.view(np.float32)
        for token, value in self.bias.items():
            bias[places[token], 2] = value
        for token, depth in self.until.items():
            table[places[token], 3] = depth
        return table


def _both(one: Bits | None, other: Bits) -> Bits:
    """Tokens that two masks allow."""
    if one is None:
        return other
    size = min(len(one), len(other))
    return one[:size] & other[:size]


def bits_of(allowed: Any) -> Bits:
    """Bits of a bool array of allowed tokens."""
    return np.packbits(allowed, bitorder="little")
