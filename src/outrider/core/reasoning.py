"""What a model thinks before it answers, between two markers: `<think>…</think>`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Thought(NamedTuple):
    """reasoning, answer: parts of a text, without the markers and the space around them.

    An answer that has not begun is None.  start: of the answer in the text; the text's end before it.
    """

    reasoning: str
    answer: str | None
    start: int = 0


class ReasoningMarkers(NamedTuple):
    """Texts in front of the reasoning and behind it.  An empty `begin`: texts begin within the reasoning.

    calls: texts that end a reasoning, too, and begin the answer: markers of tool calls.
    """

    begin: str
    end: str
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, texts: Sequence[str]) -> ReasoningMarkers:
        """The markers of a flat list: begin, end, those of tool calls."""
        begin, end, *calls = texts
        return cls(begin, end, tuple(calls))

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.begin, *self.ends)

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of which the first one ends the reasoning."""
        return (self.end, *self.calls)

    def opened_by(self, prompt: str) -> bool:
        """Whether the reasoning begins in the prompt, as templates of models write that always think."""
        return prompt.rstrip().endswith(self.begin)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt has a reasoning already: an empty one, if the model is not to think."""
        return prompt.rstrip().endswith(self.end)

    def behind(self, prompt: str) -> ReasoningMarkers | None:
        """The markers in a text behind this prompt; None if it has no reasoning."""
        if self.closed_by(prompt):
            return None
        return self._replace(begin="") if self.opened_by(prompt) else self

    def continued(self, prompt: str) -> ReasoningMarkers | None:
        """The same, also behind a prompt that ends within a reasoning.  prompt: its last turn."""
        _, begun, thought = prompt.rpartition(self.begin) if self.begin else ("", "", "")
        if begun and not any(end in thought for end in self.ends):
            return self._replace(begin="")
        return self.behind(prompt)

    def within(self, text: str) -> ReasoningMarkers | None:
        """The markers in what continues a text of the model; None if its reasoning is over."""
        _, begun, thought = text.rpartition(self.begin)
        if any(end in (thought if begun else text) for end in self.ends):
            return None
        return self._replace(begin="") if begun else self

    def split(self, text: str, finished: bool) -> Thought:
        """Reasoning and answer.  Of a text that is not finished, an end that may become a marker is withheld.

        A reasoning that has begun and does not end is all of the text.
        """
        given = text.lstrip()
        if not given.startswith(self.begin):
            waits = not finished and self.begin.startswith(given)
            return Thought("", None if waits else text)
        start = len(text) - len(given) + len(self.begin)
        if (at := first_of(self.ends, text, start)) >= 0:
            answer = text[at:].removeprefix(self.end).lstrip()
            return Thought(text[start:at].strip(), answer, len(text) - len(answer))
        reasoning = text[start:] if finished else held_back(text[start:], self.ends)
        return Thought(reasoning.strip(), None, len(text))

    def reasoning_end(self, text: str, finished: bool) -> int:
        """Where the reasoning ends in a text, with its markers; 0 if there is none."""
        return self.split(text, finished).start


def first_of(markers: Iterable[str], text: str, start: int = 0) -> int:
    """Index of the first marker in a text; -1 if it has none."""
    return min((at for marker in markers if (at := text.find(marker, start)) >= 0), default=-1)


def held_back(text: str, markers: Iterable[str]) -> str:
    """A text without an end that may become one of the markers."""
    return min((without_beginning(text, marker) for marker in markers), key=len, default=text)


def without_beginning(text: str, marker: str) -> str:
    """A text without an end that may become the marker."""
    most = min(len(text), len(marker) - 1)
    held = next((n for n in range(most, 0, -1) if marker.startswith(text[-n:])), 0)
    return text[: len(text) - held]
