"""The draft's window on a request (MagicDec, arXiv 2408.11049), and the target as its own draft.

With a KV budget a draft attends to the first tokens of a request and the most recent ones, as StreamingLLM
does (arXiv 2309.17453), but at their true positions.  K/V is used where it is, and nothing is computed again.

    budget 6, sink 2     0 1 · · · 5 6 7 8 │ nodes      a row at 8 attends to 0 1 5 6 7 8, and so do its nodes

A prompt is computed in pieces of `recent` tokens, so its cost grows linearly with its length.  All tokens of
a piece attend to what its first one may, and to each other.

As its own draft ("self"), the target reads its own pool through such a view.  All known tokens but the
pending one have their K/V there.  The pending token and the draft nodes write to slots that this step
reserved for them, and verification overwrites these.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.core.block_table import PAGE
from outrider.core.step_input import StepInput
from outrider.core.validate import is_whole
from outrider.errors import ConfigError

SELF = "self"


class View(NamedTuple):
    """The slots of a request that its draft attends to.

    Position p of the text is at slots[p - shift], except for the first `sink` positions, which are not
    shifted.
    adapter: the request's LoRA adapter, if the target is its own draft.
    """

    slots: array[int]
    shift: int = 0
    adapter: Any = None

    def chain(self, step_input: StepInput, start: int, tokens: Sequence[int]) -> None:
        """Append tokens at positions start, start + 1, … of the text."""
        first = step_input.length
        step_input.chain(self.slots, start - self.shift, tokens, self.shift)
        if self.adapter is not None:
            step_input.adapt(first, self.adapter)

    def node(self, step_input: StepInput, base: int, path: Sequence[int], token: int) -> None:
        """Append a node of a tree with its root at base - 1.  path: the nodes from the root to it."""
        first, at = step_input.length, base - self.shift
        step_input.node(self.slots, at, [self.slots[at + i] for i in path], token, self.shift)
        if self.adapter is not None:
            step_input.adapt(first, self.adapter)


NO_VIEW = View(array("i"))  # of a drafter whose nodes have no K/V


@dataclass(frozen=True)
class Window:
    """The first `sink` tokens and the last `recent` ones, the row's own among them.

    parts: positions of `sink` tokens in place of the first ones, in order.
    """

    sink: int = 0
    recent: int = sys.maxsize
    parts: tuple[range, ...] = ()

    @classmethod
    def of(cls, budget: int | None, sink: int) -> Window:
        """The window of a KV budget in tokens, `sink` of them first ones; None: all tokens."""
        return cls() if budget is None else cls(sink, budget - sink)

    def view(self, slots: array[int], start: int, end: int, adapter: Any = None) -> View:
        """The view of rows at positions start … end - 1; all of `slots` if the window covers them."""
        first = start + 1 - self.recent
        if first <= self.sink:
            return View(slots, 0, adapter)
        pinned = slots[: self.sink] if not self.parts else array("i")
        for part in self.parts:
            pinned += slots[part.start : part.stop]
        return View(pinned + slots[first:end], first - self.sink, adapter)

    def read(
        self,
        step_input: StepInput,
        slots: array[int],
        start: int,
        tokens: Sequence[int],
        nodes: int,
        adapter: Any = None,
    ) -> View:
        """Append known tokens at positions start, start + 1, …, in pieces of `recent` tokens.

        Returns the view of the last piece, with room for `nodes` draft nodes.
        """
        assert tokens, "nothing to read"
        if self.recent == sys.maxsize:
            view = View(slots, 0, adapter)
            view.chain(step_input, start, tokens)
            return view
        end = start + len(tokens)
        for piece in range(start, end, self.recent):
            view = self.view(slots, piece, end + nodes, adapter)
            view.chain(step_input, piece, tokens[piece - start : piece - start + self.recent])
        return view


OWN = ("draft_dtype", "quantization", "revision", "draft_device", "draft_gpu_layers", "vocab_mismatch")


def check(options: Any) -> None:
    """Raise ConfigError for a KV budget without room, and, for "self", for options of a model's weights."""
    budget, sink = options.draft_kv_budget, options.draft_kv_sink
    retrieves = options.draft_kv_policy == "retrieval"
    if budget is not None and not is_whole(budget, sink + 1):
        raise ConfigError(
            f"draft_kv_budget must be a whole number of at least draft_kv_sink + 1 = {sink + 1} "
            f"(the first {sink} tokens and one more), or None for all, got {budget!r}."
        )
    if retrieves and (options.model != SELF or budget < sink + 2 * PAGE):
        raise ConfigError(
            f'draft_kv_policy "retrieval" is for model "self", with a draft_kv_budget of at least '
            f"draft_kv_sink + {2 * PAGE}: got {options.model!r} and {budget!r}."
        )
    if options.model != SELF:
        return
    if budget is None:
        raise ConfigError(
            'model "self" needs a draft_kv_budget: with all of the context the target would do its own work '
            "twice."
        )
    for name in OWN:
        if (value := getattr(options, name)) != getattr(type(options), name):
            raise ConfigError(
                f'{name} = {value!r} is about a draft with weights of its own, and model "self" has the '
                "target's: leave it out."
            )
