"""Position of one row in its grammar, and the mask that follows from it.

One matcher serves the whole draft tree.  It moves from node to node by rolling back to their common ancestor:

    root ─ a ─ b          a, b, roll back 1, c, roll back 2, d: five moves for four nodes, in the order in
        │    └ c          which rules visit them (depth first), and none is replayed from the root
        └─ d
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.edits import Edits, bits_of
from outrider.core.processor import Ids
from outrider.core.tree import ROOT, DraftTree
from outrider.errors import RequestError

MOST_SECONDS = 0.2  # for compiling a grammar again for the output of a row, while all others wait


@dataclass(frozen=True)
class Source:
    """A grammar that can be compiled again.

    compile: makes a matcher at its beginning.  seconds: that this takes.
    forget: makes later requests compile it again, too, and frees what its matchers share, up to 200 MB.
    shared: whether other rows have, or had, a copy of the first matcher.
    """

    compile: Callable[[], Any]
    forget: Callable[[], None]
    shared: Callable[[], bool]
    seconds: float


class GrammarState:
    """Matcher of one row, with the tokens that it has consumed.

    matcher: an LLMatcher at the beginning of the grammar.  prompt: number of prompt tokens.
    ending: tokens that are allowed exactly where the grammar may end.  The matcher never sees them: `tokens`
    may end with some that `consumed` does not count.  vocabulary: number of ids that the matcher knows.
    source: of further matchers.

    The library gives up where a grammar is too complex to follow, and then on all copies of its matcher,
    those of other rows too.  What counts is all that it ever computed for them, for rejected drafts too.  So
    from then on the row has a matcher of its own, as in plain decoding alone: none of its drafts is followed
    any more (`drafts`).  It fails only if the library gives up on that one.
    """

    def __init__(
        self,
        matcher: Any,
        prompt: int,
        ending: Iterable[int],
        vocabulary: int,
        source: Source,
    ) -> None:
        self.matcher, self.prompt, self.ending = matcher, prompt, frozenset(ending)
        self.vocabulary, self.source = vocabulary, source
        self.drafts = True  # whether draft tokens are followed
        self.drafted = False  # whether the matcher has computed something for drafts
        self.spent = 0.0  # seconds of compilations that only the output made necessary
        self.ending_ids = torch.tensor(sorted(self.ending))
        self.tokens: list[int] = []  # output tokens and draft path that lead to the matcher's position
        self.consumed = 0  # those that the matcher has consumed
        self.emitted = 0  # those that are output tokens
        self.masks: dict[tuple[int, ...], Tensor] = {}  # by path from the root; of this root only
        self.unmasked: list[list[int]] = []  # outputs and paths of the last root after which no mask is known
        self.fault: RequestError | None = None  # of a row that has failed

    def forbidden(self, ids: Ids) -> Tensor | None:
        """Mask of the tokens that may not follow, bool [vocabulary]; None if the grammar forbids `ids`.

        None, too, after a draft path that is not followed: see `checked`.
        Raises RequestError if the library gives up on the output.
        """
        if self.fault is not None:
            raise self.fault
        if len(ids.tokens) - self.prompt == self.emitted and tuple(ids.path) in self.masks:
            return self.masks[tuple(ids.path)]
        return self._after_path(ids) if ids.path else self._after_output(ids)

    def checked(self, ids: Ids) -> int:
        """Number of the tokens of `ids.path` that may be emitted: none after a path without a mask."""
        if not self.unmasked:
            return len(ids.path)
        wanted, output = ids.since(self.prompt), len(ids.tokens) - self.prompt
        here = [known for known in self.unmasked if len(known) > output]  # others are of earlier steps
        lengths = [len(known) for known in here if wanted[: len(known)] == known]
        return min([len(wanted), *lengths]) - output

    def restart(self) -> None:
        """Go back to the beginning: an interrupt may have come between a move and its record."""
        if self.matcher is not None and not self.matcher.is_error():
            self.matcher.reset()
        self._at_beginning()

    def _at_beginning(self) -> None:
        """Record that the matcher has consumed nothing."""
        self.tokens, self.consumed, self.emitted = [], 0, 0
        self.masks.clear()

    def forced(self, ids: Ids) -> list[int]:
        """Tokens of the only text that can follow `ids`, without a last one that later text could change."""
        if not self._follows() or not self.move(ids) or self.consumed < len(self.tokens):
            return []
        self.drafted = True
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens if self._follows() else []

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
            judged = node < tree.size and tree.distribution(node) is None
            if not judged or (self._follows() and self.move(Ids(ids.tokens, path))):
                paths[node] = path
                allowed.add(node)
        return range(len(tree.tokens)) if len(allowed) == len(tree.tokens) else sorted(allowed)

    def move(self, ids: Ids) -> bool:
        """Move to the position after `ids`.  Returns False if the grammar forbids them, or is given up."""
        self.drafted |= bool(ids.path)
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

    def _masked(self, ids: Ids) -> Tensor | None:
        """The mask behind `ids`; None if they are forbidden, or the matcher gives up."""
        if not self.move(ids):
            self.matcher.compute_bitmask()  # it tells whether the library has given up in another row
            return None
        path = tuple(self.tokens[self.emitted :])
        if path not in self.masks:
            bits = self.matcher.compute_bitmask()
            if self.matcher.is_error():
                return None
            self.masks[path] = self._mask(bits)
        return self.masks[path]

    def _mask(self, allowed: bytes) -> Tensor:
        ended = self.consumed < len(self.tokens)
        bits = np.frombuffer(allowed, np.uint8)
        forbidden = torch.from_numpy(np.unpackbits(bits, bitorder="little") == 0)
        if ended:
            forbidden.fill_(True)
        forbidden[self.ending_ids] = not (ended or self.matcher.is_accepting())
        return forbidden

    def _after_output(self, ids: Ids) -> Tensor | None:
        mask = None if self.matcher.is_error() else self._masked(ids)
        if self.matcher.is_error() and self._begin_again():
            mask = self._masked(ids)
        if self.matcher.is_error():
            self.fault = too_complex(self.matcher)
            self.matcher = None  # what it holds is large, and the row goes later
            raise self.fault
        return mask

    def _after_path(self, ids: Ids) -> Tensor | None:
        mask = self._masked(ids) if self._follows() else None
        if not self._follows():
            output = len(ids.tokens) - self.prompt
            path = ids.since(self.prompt)
            self.unmasked = [known for known in self.unmasked if len(known) > output and known != path]
            self.unmasked.append(path)
        return mask

    def _follows(self) -> bool:
        """Whether drafts are followed: not any more once the library has given up."""
        if self.drafts and self.matcher.is_error():
            self.drafts = False
            self.source.forget()
        return self.drafts

    def _begin_again(self) -> bool:
        """Replace a matcher that has given up by one at the beginning, from which `move` goes on.

        Returns False if only the output of this row used it, and compiling takes too long for a step.
        """
        self.drafts = False
        self.source.forget()
        alone = not self.drafted and not self.source.shared()
        if alone and self.spent + self.source.seconds > MOST_SECONDS:
            return False
        began = time.perf_counter()
        self.matcher = self.source.compile()
        seconds = time.perf_counter() - began
        self.source = replace(self.source, seconds=seconds, shared=lambda: False)
        self.spent += seconds if alone else 0.0
        self.drafted = False
        self._at_beginning()
        return True


def too_complex(matcher: Any) -> RequestError:
    """The error of a row whose matcher has given up."""
    fault = matcher.get_error().splitlines()[0]
    text = f"structured_outputs: the grammar is too complex to follow: {fault}."
    return RequestError(text, "structured_outputs")


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
    """Mask every token that the grammar forbids.

    None after a forbidden path, which is never accepted, and after one that is not followed, where a step
    ends (`Grammar.checked`).
    """

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

    def describe(self, edits: Edits) -> bool:
        """Masks of all nodes, by one walk.  False if the grammar does not follow a node, or fails."""
        tree = edits.tree
        for node in (ROOT, *depth_first(tree.parents[: tree.size])):
            ids = Ids(edits.tokens, edits.path(node))
            try:
                forbidden = self.state.forbidden(ids)
            except RequestError:  # the pick at the root raises it again
                return False
            if forbidden is not None:
                edits.allow(bits_of(np.logical_not(np.from_dlpack(forbidden))), node)
            elif node != ROOT and not self.state.drafts:
                return False
        return True
