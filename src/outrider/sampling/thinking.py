"""End of a reasoning that has reached its budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.edits import Edits
from outrider.core.params import SamplingParams
from outrider.core.processor import Ids, Processor
from outrider.core.reasoning import ReasoningMarkers
from outrider.sampling.processors import NEVER

MARKED = 32  # tokens at the end of a prompt that may have a marker


class Texts(Protocol):
    """A tokenizer, and the token ids of a text and the text of a token."""

    @property
    def tokenizer(self) -> Any: ...

    def encode(self, text: str, name: str, special: bool, instead: str) -> list[int]: ...

    def piece(self, token: int) -> str: ...


class Place(NamedTuple):
    """start: of the reasoning that has not ended, counted in tokens; None if there is none.

    tail: end of the text, in which a marker may have begun.
    """

    start: int | None
    tail: str = ""


class ThinkingBudget:
    """Force the tokens of the end marker once a reasoning has `budget` tokens.

    A reasoning begins behind each begin marker in the output, or with the output if that is `opened` by the
    prompt.  Markers are found in the text, since a model may write them as other tokens than the tokenizer.
    ending: tokens of the end marker.  piece: text of a token.
    """

    def __init__(
        self,
        prompt: int,
        opened: bool,
        markers: ReasoningMarkers,
        ending: Sequence[int],
        budget: int,
        piece: Callable[[int], str],
    ) -> None:
        self.prompt, self.markers, self.ending, self.budget = prompt, markers, tuple(ending), budget
        self.piece = piece
        self.first = Place(prompt if opened else None)
        self.longest = max(map(len, markers))
        self.tokens: list[int] | None = None  # the list that is known, up to `upto`
        self.upto, self.place = prompt, self.first

    def active(self, length: int) -> bool:
        return length >= self.prompt + self.budget

    def __call__(self, ids: Ids, logits: Tensor) -> Tensor:
        token = self._forced(ids)
        if token is None or token >= logits.numel():
            return logits
        return torch.full_like(logits, NEVER).index_fill_(0, torch.tensor([token], device=logits.device), 0.0)

    def describe(self, edits: Edits) -> bool:
        """Nothing where no token is forced.  A forced one overrides all edits before."""
        every = [Ids(edits.tokens, path) for path in edits.paths]
        return all(self._forced(ids) is None for ids in every if self.active(len(ids)))

    def _forced(self, ids: Ids) -> int | None:
        """The token that must follow; None if any may."""
        if ids.tokens is not self.tokens or len(ids.tokens) < self.upto:
            self.tokens, self.upto, self.place = ids.tokens, self.prompt, self.first
        self.place = self._behind(self.place, ids.tokens[self.upto :], self.upto)
        self.upto = len(ids.tokens)
        start, _ = self._behind(self.place, ids.path, self.upto)
        if start is None:
            return None
        written = next(n for n in range(len(self.ending) - 1, -1, -1) if ids.tail(n) == self.ending[:n])
        return self.ending[written] if len(ids) - start - written >= self.budget else None

    def _behind(self, place: Place, tokens: Sequence[int], at: int) -> Place:
        """The place behind further tokens.  at: number of those before."""
        start, tail = place
        begin, end = self.markers
        for number, token in enumerate(tokens, at + 1):
            text = tail + self.piece(token)
            begun = text.rfind(begin) if begin else -1
            ended = text.rfind(end)
            if ended > begun:
                start = None
            elif begun >= 0 and start is None:
                start = number
            # a marker that has been seen is not found again
            seen = max(begun + len(begin) if begun >= 0 else 0, ended + len(end) if ended >= 0 else 0)
            tail = text[max(seen, len(text) - self.longest + 1) :]
        return Place(start, tail)


def thinking_budget(params: SamplingParams, prompt: Sequence[int], texts: Texts) -> list[Processor]:
    """The processor for thinking_token_budget, if it is given."""
    budget = params.thinking_token_budget
    if budget is None or params.reasoning_markers is None:
        return []
    markers = ReasoningMarkers(*params.reasoning_markers)
    ending = texts.encode(markers.end, "reasoning_markers", False, "leave them out")
    opened = markers.opened_by(texts.tokenizer.decode(prompt[-MARKED:]))
    return [ThinkingBudget(len(prompt), opened, markers, ending, budget, texts.piece)]
