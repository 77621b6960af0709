"""End of a reasoning that has reached its budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.edits import Edits
from outrider.core.params import SamplingParams
from outrider.core.processor import Ids, Processor
from outrider.core.reasoning import ReasoningMarkers, first_of
from outrider.core.structured import StructuredOutputs
from outrider.sampling.processors import NEVER


class Texts(Protocol):
    """A tokenizer, and the token ids of a text and the text of a token."""

    @property
    def tokenizer(self) -> Any: ...

    def encode(self, text: str, name: str, special: bool, instead: str) -> list[int]: ...

    def piece(self, token: int) -> str: ...


class Place(NamedTuple):
    """start: of the reasoning that has not ended, counted in tokens; None if there is none.

    tail: end of the text, in which a marker may have begun.  over: no reasoning can come any more.
    """

    start: int | None
    tail: str = ""
    over: bool = False


class ThinkingBudget:
    """Force the tokens of the end marker once a reasoning has `budget` tokens.

    There is one reasoning at most, that `ReasoningMarkers.split` finds: it begins with the output, or behind
    a begin marker in front of all other text.  Markers are found in the text, since a model may write them
    as other tokens than the tokenizer.  ending: tokens of the end marker.  piece: text of a token.
    """

    def __init__(
        self,
        prompt: int,
        markers: ReasoningMarkers,
        ending: Sequence[int],
        budget: int,
        piece: Callable[[int], str],
    ) -> None:
        self.prompt, self.markers, self.ending, self.budget = prompt, markers, tuple(ending), budget
        self.piece = piece
        self.first = Place(None if markers.begin else prompt)
        self.longest = max(map(len, markers.ends))
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
        start = self._behind(self.place, ids.path, self.upto).start
        if start is None:
            return None
        written = next(n for n in range(len(self.ending) - 1, -1, -1) if ids.tail(n) == self.ending[:n])
        return self.ending[written] if len(ids) - start - written >= self.budget else None

    def _behind(self, place: Place, tokens: Sequence[int], at: int) -> Place:
        """The place behind further tokens.  at: number of those before."""
        for number, token in enumerate(tokens, at + 1):
            if place.over:
                break
            place = self._next(place, self.piece(token), number)
        return place

    def _next(self, place: Place, piece: str, number: int) -> Place:
        """The place behind the text of one more token, of `number` ones."""
        start, text = place.start, place.tail + piece
        if start is None:
            text = text.lstrip()
            if not text.startswith(self.markers.begin):
                return Place(None, text, over=not self.markers.begin.startswith(text))
            start, text = number, text[len(self.markers.begin) :]
        if first_of(self.markers.ends, text) >= 0:
            return Place(None, over=True)
        return Place(start, text[max(0, len(text) - self.longest + 1) :])


def last_turn(prompt: Sequence[int], markers: Sequence[str], texts: Texts) -> str:
    """Text of the end of a prompt, behind the last special token that is no part of a marker."""
    special = {i for i, token in texts.tokenizer.added_tokens_decoder.items() if token.special}
    start = len(prompt)
    while start:
        token = prompt[start - 1]
        if token in special and not any(texts.piece(token) in marker for marker in markers):
            break
        start -= 1
    return str(texts.tokenizer.decode(prompt[start:]))


def thinking_budget(params: SamplingParams, prompt: Sequence[int], texts: Texts) -> list[Processor]:
    """The processor for thinking_token_budget, if it is given.

    There is none for a form of the output that leaves no room for a reasoning.
    """
    budget, form = params.thinking_token_budget, params.structured_outputs
    if budget is None or params.reasoning_markers is None:
        return []
    if isinstance(form, StructuredOutputs) and form.reasoning is None:
        return []
    given = params.reasoning_markers
    markers = ReasoningMarkers.of(given).continued(last_turn(prompt, given, texts))
    if markers is None:
        return []
    ending = texts.encode(markers.end, "reasoning_markers", False, "leave them out")
    return [ThinkingBudget(len(prompt), markers, ending, budget, texts.piece)]
