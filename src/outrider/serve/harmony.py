"""OpenAI's Harmony, the format of gpt-oss: a text is a row of messages, each on a channel.

<|channel|>analysis<|message|>What it thinks.<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>What it answers.<|return|>

There are no line breaks between messages; the prompt ends with the first `<|start|>assistant`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from outrider.core.reasoning import ReasoningMarkers, Thought, without_beginning
from outrider.serve.tool_calls import Pieces, ToolCall, Tools, end_of

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL, MESSAGE, CALLED = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
FUNCTIONS = "functions."
# The recipient may be in front of the channel, too.
HEAD = re.compile(
    r"\s*(?:<\|start\|>assistant)?([^<]*)<\|channel\|>(\w+)([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
RECIPIENT = re.compile(r"to=(\S+)")
CLOSING = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")
CLOSINGS = ("<|end|>", CALLED, "<|return|>", "<|start|>")
NAMED = re.compile(r"([\w.-]+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>\s*")


class Message(NamedTuple):
    """recipient: functions.NAME of a call, otherwise mostly none.  start: of the content in the text."""

    channel: str
    recipient: str
    content: str
    start: int

    @property
    def in_answer(self) -> str:
        """The message in the answer to a user; a call in one spelling."""
        if not self.recipient.startswith(FUNCTIONS):
            return self.content
        return f"{CALL}{self.recipient.removeprefix(FUNCTIONS)}{MESSAGE}{self.content}"


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
        found.append(Message(head[2], recipient[1] if recipient else "", content, head.end()))
        if closing is None:
            break
        at = closing.end()
    return found


class HarmonyMarkers(ReasoningMarkers):
    """Reasoning is what is on the channel `analysis`; other messages are the answer."""

    def split(self, text: str, finished: bool) -> Thought:
        opening = "" if self.begin else ANALYSIS  # is in the prompt
        found = messages(opening + text, finished)
        if not found:
            waits = not finished and (not text.strip() or text.lstrip().startswith("<"))
            return Thought("", None if waits else text)
        thoughts, answers = list[str](), list[Message]()
        for message in found:
            if message.channel == "analysis" and not message.recipient.startswith(FUNCTIONS):
                thoughts.append(message.content.strip())
            else:
                answers.append(message)
        reasoning = "\n".join(filter(None, thoughts))
        if not answers:
            return Thought(reasoning, None, len(text))
        answer = "\n".join(message.in_answer for message in answers)
        return Thought(reasoning, answer, answers[0].start - len(opening))


HARMONY = HarmonyMarkers(ANALYSIS, FINAL)


def read_calls(text: str, _: Tools) -> Pieces:
    """The calls of a text from the first one on, and what is between them."""
    pieces: Pieces = []
    for part in text.split(CALL)[1:]:
        if (named := NAMED.match(part)) is None:
            continue
        arguments = part[named.end() :]
        end = end_of(arguments)
        if end is None:
            pieces.append(ToolCall(named[1], arguments, False))
        else:
            rest = arguments[end:].strip().removeprefix(CALLED).removeprefix("<|start|>assistant")
            pieces += [ToolCall(named[1], arguments[:end]), rest]
    return pieces
