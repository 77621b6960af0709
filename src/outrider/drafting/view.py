"""How far back a draft sees (MagicDec, arXiv 2408.11049), and the target as its own draft.

With a budget, a draft looks at the first few tokens of a request and at the most recent ones, as StreamingLLM (arXiv 2309.17453) does,
but at their true positions: their K/V is used where it lies, in full, and nothing is computed again.

    budget 6, sink 2     0 1 · · · 5 6 7 8 │ guesses        a row at 8 sees 0 1 5 6 7 8, its guesses these and themselves

A prompt is computed as it will be looked at, in pieces of as many tokens as are recent: its cost grows with its length, not with the
square of it.  All tokens of a piece see what the first one may, and each other.

As its own draft ("self"), the target reads its own pool through such a view.  All known tokens have their K/V there but the pending one;
that one and the guesses write to slots that this step reserved for them, and verification writes over all of these.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.core.step_input import StepInput
from outrider.errors import ConfigError

SELF = "self"


class View(NamedTuple):
    """The slots of a request that its draft sees; token p of the text lies in slots[p - shift], unless it is one of the first.
    adapter: the request's, where the target drafts."""

    slots: array[int]
    shift: int = 0
    adapter: Any = None

    def chain(self, step_input: StepInput, start: int, tokens: Sequence[int]) -> None:
        """Tokens at positions start … of the text, each behind the one before."""
        first = step_input.length
        step_input.chain(self.slots, start - self.shift, tokens, self.shift)
        if self.adapter is not None:
            step_input.adapt(first, self.adapter)

    def node(self, step_input: StepInput, base: int, path: Sequence[int], token: int) -> None:
        """A guess of a tree that hangs from position base - 1; path: the nodes from the root to it."""
        first, at = step_input.length, base - self.shift
        step_input.node(self.slots, at, [self.slots[at + i] for i in path], token, self.shift)
        if self.adapter is not None:
            step_input.adapt(first, self.adapter)


@dataclass(frozen=True)
class Window:
    """The first `sink` tokens and the last `recent` ones, the row's own among them."""

    sink: int = 0
    recent: int = sys.maxsize

    @classmethod
    def of(cls, budget: int | None, sink: int) -> Window:
        return cls() if budget is None else cls(sink, budget - sink)

    def view(self, slots: array[int], start: int, end: int, adapter: Any = None) -> View:
        """What rows at the positions start … end - 1 see; `slots` itself where that is all."""
        first = start + 1 - self.recent
        if first <= self.sink:
            return View(slots, 0, adapter)
        return View(slots[: self.sink] + slots[first:end], first - self.sink, adapter)

    def read(
        self,
        step_input: StepInput,
        slots: array[int],
        start: int,
        tokens: Sequence[int],
        draft_tree: int,
        adapter: Any = None,
    ) -> View:
        """Known tokens at positions start … as rows of the plan, piece by piece; the view of the last, with room for guesses."""
        assert tokens, "nothing to read"
        if self.recent == sys.maxsize:
            view = View(slots, 0, adapter)
            view.chain(step_input, start, tokens)
            return view
        end = start + len(tokens)
        for piece in range(start, end, self.recent):
            view = self.view(slots, piece, end + draft_tree, adapter)
            view.chain(step_input, piece, tokens[piece - start : piece - start + self.recent])
        return view


def check(options: Any) -> None:
    """Refuses budgets that show nothing, and a draft of its own beside the target's."""
    budget, sink = options.draft_kv_budget, options.draft_kv_sink
    if not _whole(sink):
        raise ConfigError(f"draft_kv_sink must be a whole number of at least 0, got {sink!r}.")
    if budget is not None and not (_whole(budget) and budget > sink):
        raise ConfigError(
            f"draft_kv_budget must be a whole number of at least draft_kv_sink + 1 = {sink + 1} (the first {sink} tokens and one more), "
            f"or None for all, got {budget!r}."
        )
    if options.model != SELF:
        return
    if budget is None:
        raise ConfigError(
            'model "self" needs a draft_kv_budget: with all of the context the target would do its own work twice.'
        )
    for name in (
        "draft_dtype",
        "quantization",
        "revision",
        "draft_device",
        "draft_gpu_layers",
        "vocab_mismatch",
    ):
        if (given := getattr(options, name)) != getattr(type(options), name):
            raise ConfigError(
                f'{name} = {given!r} is about a draft with weights of its own, and model "self" has the target\'s: leave it out.'
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
