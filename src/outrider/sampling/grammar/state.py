"""Position of one row in its grammar, and the mask that follows from it.

One matcher serves the whole draft tree.  It moves from node to node by rolling back to their common ancestor:

    root ─ a ─ b          a, b, roll back 1, c, roll back 2, d: five moves for four nodes, in the order in
        │    └ c          which rules visit them (depth first), and none is replayed from the root
        └─ d
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.processor import Ids
from outrider.core.tree import ROOT, DraftTree
from outrider.errors import RequestError


class GrammarState:
    """Matcher of one row, with the tokens that it has consumed.

    matcher: an LLMatcher at the beginning of the grammar.  prompt: number of prompt tokens.
    ending: tokens that are allowed exactly where the grammar may end.  The matcher never sees them: `tokens`
    may end with some that `consumed` does not count.  vocabulary: number of ids that the matcher knows.

    Raises RequestError if the library gives up (a grammar that is too ambiguous).
    """

    def __init__(self, matcher: Any, prompt: int, ending: Iterable[int], vocabulary: int) -> None:
        self.matcher, self.prompt, self.ending = matcher, prompt, frozenset(ending)
        self.vocabulary = vocabulary
        self.ending_ids = torch.tensor(sorted(self.ending))
        self.tokens: list[int] = []  # output tokens and draft path that lead to the matcher's position
        self.consumed = 0  # those that the matcher has consumed
        self.emitted = 0  # those that are output tokens
        self.masks: dict[tuple[int, ...], Tensor] = {}  # by path from the root; of this root only

    def forbidden(self, ids: Ids) -> Tensor | None:
        """Mask of the tokens that may not follow, bool [vocabulary]; None if the grammar forbids `ids`."""
        if not self.move(ids):
            self._check()
            return None
        path = tuple(self.tokens[self.emitted :])
        if path not in self.masks:
            self.masks[path] = self._mask()
        return self.masks[path]

    def forced(self, ids: Ids) -> list[int]:
        """Tokens of the only text that can follow `ids`, without a last one that later text could change."""
        if not self.move(ids) or self.consumed < len(self.tokens):
            return []
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def allowed(self, ids: Ids, tree: DraftTree) -> Sequence[int]:
        """Nodes of a tree that the grammar allows, ascending and closed under parents.

        Sampled nodes and probes stay where their parents do: a rule compares q with the target's
        distribution.
        """
        paths: dict[int, list[int]] = {ROOT: list(ids.path)}
        order, allowed = depth_first(tree.parents), set[int]()
        for node in order:
            above = paths.get(tree.parents[node])
            if above is None:
                continue
            path = [*above, tree.tokens[node]]
            if node >= tree.size or tree.distribution(node) is not None or self.move(Ids(ids.tokens, path)):
                paths[node] = path
                allowed.add(node)
        return range(len(tree.tokens)) if len(allowed) == len(tree.tokens) else sorted(allowed)

    def move(self, ids: Ids) -> bool:
        """Move to the position after `ids`.  Returns False if the grammar forbids them."""
        output = len(ids.tokens) - self.prompt
        if output != self.emitted:
            self.masks.clear()
            self.emitted = min(self.emitted, output)  # fewer only after a step that was taken back
        wanted, here = ids.since(self.prompt + self.emitted), self.tokens[self.emitted :]
        shared = sum(takewhile(bool, map(eq, wanted, here)))
        self._roll_back(self.emitted + shared)
        good = all(map(self._consume, wanted[shared:]))
        self.emitted = min(output, len(self.tokens))
        return good

    def _roll_back(self, length: int) -> None:
        if length < self.consumed:
            self.matcher.rollback(self.consumed - length)
            self.consumed = length
        del self.tokens[length:]

    def _consume(self, token: int) -> bool:
        if token in self.ending:
            good = self.consumed < len(self.tokens) or self.matcher.is_accepting()
        else:
            # a draft may be any id
            known = 0 <= token < self.vocabulary and self.consumed == len(self.tokens)
            good = known and self.matcher.try_consume_tokens([token]) == 1
            self.consumed += good
        if good:
            self.tokens.append(token)
        return good

    def _mask(self) -> Tensor:
        ended = self.consumed < len(self.tokens)
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._check()
        forbidden = torch.from_numpy(np.unpackbits(bits, bitorder="little") == 0)
        if ended:
            forbidden.fill_(True)
        forbidden[self.ending_ids] = not (ended or self.matcher.is_accepting())
        return forbidden

    def _check(self) -> None:
        if self.matcher.is_error():
            fault = self.matcher.get_error().splitlines()[0]
            text = f"structured_outputs: the grammar is too complex to follow: {fault}."
            raise RequestError(text, "structured_outputs")


def depth_first(parents: Sequence[int]) -> list[int]:
    """The nodes of a tree in depth-first order, siblings in their own order."""
    children: dict[int, list[int]] = {}
    for node in reversed(range(len(parents))):
        children.setdefault(parents[node], []).append(node)
    order: list[int] = []
    stack = children.get(ROOT, [])
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children.get(node, ()))
    return order


class GrammarMask:
    """Mask every token that the grammar forbids; none after a forbidden path, which is never accepted."""

    def __init__(self, state: GrammarState) -> None:
        self.state = state

    def active(self, length: int) -> bool:
        return True

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        forbidden = self.state.forbidden(ids)
        if forbidden is None:
            return logits
        size, known = logits.numel(), forbidden.numel()
        if size > known:  # ids without a token
            forbidden = torch.cat([forbidden, forbidden.new_ones(size - known)])
        return logits.masked_fill(forbidden[:size].to(logits.device), float("-inf"))
