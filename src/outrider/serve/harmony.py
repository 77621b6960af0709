"""OpenAI's Harmony, the format of gpt-oss: a text is a row of messages, each on a channel.

<|channel|>analysis<|message|>What it thinks.<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>What it answers.<|return|>

There are no line breaks between messages; the prompt ends with the first `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile, zip_longest
from typing import NamedTuple

from outrider.core.reasoning import ReasoningMarkers, Thought, without_beginning
from outrider.serve.tool_calls import Pieces, ToolCall, Tools, between, end_of

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL, MESSAGE, CALLED = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
FUNCTIONS = "functions."
OPENINGS = ("<|channel|>", "<|start|>assistant")
# The recipient may be in front of the channel, too.  Possessive: a text without a head takes linear time.
HEAD = re.compile(
    r"\s*+(?:<\|start\|>assistant)?([^<]*+)<\|channel\|>(\w++)([^<]*+)"
    r"(?:<\|constrain\|>[^<]*+)?<\|message\|>"
)
# of a text that ended within its head, which may begin in the prompt
CUT_HEAD = re.compile(
    r"\s*+(?:<\|start\|>(?:assistant)?)?+(?:\s*to=functions\.[^<]*+)?"
    r"(?:<\|channel\|>[^<]*+(?:<\|constrain\|>[^<]*+)?+(?:<[|a-z]*+)?)?"
)
RECIPIENT = re.compile(r"to=(\S+)")
CLOSING = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")
CLOSINGS = ("<|end|>", CALLED, "<|return|>", "<|start|>")
ASSISTANT = "<|start|>assistant"
RECIPIENT_FIRST = f"{ASSISTANT} to=functions."
HEADS = (CALL, "to=functions.")  # beginnings of a call
# of a call, with its recipient behind the channel or in front of it
CALL_HEAD = re.compile(
    r"(?:<\|channel\|>commentary to=functions\.(?P<name>[\w.-]++)[^<]*+"
    r"|(?:<\|start\|>assistant ?)?to=functions\.(?P<first>[\w.-]++)[^<]*+<\|channel\|>\w++[^<]*+)"
    r"(?:<\|constrain\|>[^<]*+)?<\|message\|>\s*+"
)
BEGUN = "|".join(re.escape(HEADS[1][:length]) for length in range(len(HEADS[1])))
BARE_CALL = re.compile(rf"\s*(?:to=functions\.|(?:{BEGUN})\Z)")  # the prompt ends with <|start|>assistant


class Message(NamedTuple):
    """recipient: functions.NAME of a call, otherwise mostly none.

    start: of the content in the text.  end: of the message with its closing marker, if it is closed.
    """

    channel: str
    recipient: str
    content: str
    start: int
    end: int
    closed: bool

    @property
    def is_call(self) -> bool:
        return self.recipient.startswith(FUNCTIONS)

    @property
    def is_thought(self) -> bool:
        return self.channel == "analysis" and not self.is_call

    @property
    def in_answer(self) -> str:
        """The message in the answer to a user; a call in one spelling."""
        if not self.is_call:
            return self.content
        name = self.recipient.removeprefix(FUNCTIONS)
        return f"{CALL}{name}{MESSAGE}{self.content}{CALLED if self.closed else ''}"


def messages(text: str, finished: bool) -> list[Message]:
    """The messages of a text, as far as their heads are complete.

    Of a text that is not finished, an end that may become the end of a message is withheld.
    """
    found, at = list[Message](), 0
    while (head := HEAD.match(text, at)) is not None:
        closing = CLOSING.search(text, head.end())
        content = text[head.end() : closing.start() if closing else None]
        if closing is None and not finished:
            content = min((without_beginning(content, marker) for marker in CLOSINGS), key=len)
        recipient = RECIPIENT.search(f"{head[1]} {head[3]}")
        at = closing.end() if closing else len(text)
        name = recipient[1] if recipient else ""
        found.append(Message(head[2], name, content, head.end(), at, closing is not None))
        if closing is None:
            break
    return found


class HarmonyMarkers(ReasoningMarkers):
    """Reasoning is what is on the channel `analysis` in front of the first other message.

    The messages on other channels are the answer.  Thoughts between them are left out: reasoning that has
    ended does not go on.
    """

    def split(self, text: str, finished: bool) -> Thought:
        opening, found = self._messages(text, finished)
        if not found:
            return Thought("", None if _is_head(text, finished) else _unclosed(text))
        thoughts = "\n".join(filter(None, (message.content.strip() for message in _thoughts(found))))
        answers = [message for message in found if not message.is_thought]
        if not answers:
            return Thought(thoughts, None, len(text))
        answer = "\n".join(message.in_answer for message in answers)
        return Thought(thoughts, answer, answers[0].start - opening)

    def reasoning_end(self, text: str, finished: bool) -> int:
        opening, found = self._messages(text, finished)
        thoughts = _thoughts(found)
        return thoughts[-1].end - opening if thoughts else 0

    def _messages(self, text: str, finished: bool) -> tuple[int, list[Message]]:
        """The messages, and the length of the head that is in the prompt."""
        opening = "" if self.begin else ANALYSIS
        return len(opening), messages(opening + text, finished)


def _thoughts(found: Iterable[Message]) -> list[Message]:
    """The thoughts in front of the first other message."""
    return list(takewhile(lambda message: message.is_thought, found))


def _unclosed(text: str) -> str:
    """A text that is no message without the token that ended it."""
    for closing in CLOSINGS:
        text = text.removesuffix(closing)
    return text


def _is_head(text: str, finished: bool) -> bool:
    """Whether a text without a message is the beginning of one's head, or may become it."""
    begun, recipient = text.lstrip(), f"to={FUNCTIONS}"
    if finished:
        within_marker = len(begun) > 1 and any(marker.startswith(begun) for marker in OPENINGS)
        return within_marker or (bool(begun) and CUT_HEAD.fullmatch(text) is not None)
    return begun.startswith(("<", recipient)) or recipient.startswith(begun)


HARMONY = HarmonyMarkers(ANALYSIS, FINAL)


def read_calls(text: str, _: Tools) -> Pieces:
    """The calls of a text from the first one on, and what is between them."""
    pieces: Pieces = []
    heads = [*CALL_HEAD.finditer(text)]
    for head, following in zip_longest(heads, heads[1:]):
        part = text[head.end() : following.start() if following is not None else None]
        name = head["name"] or head["first"]
        arguments, closed, rest = without_beginning(part, CALLED).partition(CALLED)
        if closed and not arguments:
            arguments = "{}"
        end = end_of(arguments)
        if end is None:
            pieces.append(ToolCall(name, arguments, False))
        else:
            pieces += [ToolCall(name, arguments[:end]), arguments[end:]]
        pieces.append(between(rest, HEADS, (ASSISTANT, *HEADS)))
    return pieces
