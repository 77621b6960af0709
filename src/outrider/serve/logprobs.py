"""Log-probabilities in the shapes of OpenAI's and vLLM's servers."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any

from outrider.core.logprobs import Entry
from outrider.engine.detokenizer import Detokenizer
from outrider.outputs import CompletionOutput
from outrider.progress import Request
from outrider.requests import Reader
from outrider.serve.protocol import Classic
from outrider.serve.tool_calls import Parsed

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def best_tokens(entry: Entry, count: int) -> list[int]:
    """The ids of the `count` best tokens of an entry, whose first one is the sampled token; -1: all."""
    return sorted(entry, key=lambda token: entry[token].rank)[: None if count == -1 else count]


def token_name(token: int, text: str, as_id: bool) -> str:
    """Name of a token in log-probabilities: its text, or its id as vLLM writes it."""
    return f"token_id:{token}" if as_id else text


def of_token(reader: Reader, token: int, entry: Entry, count: int, as_id: bool = False) -> dict[str, Any]:
    """A token with its `count` best alternatives, as chats and responses have them."""

    def one(token: int) -> dict[str, Any]:
        text = reader.piece(token)
        name, found = token_name(token, text, as_id), list(reader.bytes_of(token))
        return {"token": name, "logprob": bounded(entry[token].logprob), "bytes": found}

    return {**one(token), "top_logprobs": [one(other) for other in best_tokens(entry, count)]}


def prompt_logprobs(body: Classic, request: Request) -> dict[str, Any]:
    """vLLM's field: for each token of the prompt None, or {id: {logprob, rank, decoded_token}}."""
    asked = request.rows[0].logprobs
    if body.prompt_logprobs is None or asked is None:
        return {}
    return {"prompt_logprobs": [None if entry is None else _ranked(entry) for entry in asked.prompt]}


def _ranked(entry: Entry) -> dict[str, Any]:
    return {
        str(token): {"logprob": bounded(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in entry.items()
    }


class TextOffsets:
    """Offsets of tokens in a text, in characters.

    A token with the further bytes of a character begins where the character does.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader, self.offset = reader, 0
        self.decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        found = []
        for token in ids:
            found.append(self.offset)
            self.offset += len(self.decoder.decode(self.reader.bytes_of(token)))
        return found


class MessageLogprobs:
    """Log-probabilities of the tokens that make up the message of a response, in parts or whole.

    These are the tokens that begin within the content.  They do not include the end-of-sequence token, and
    where the text has tool calls, only those in front of the first one.  Nor those of a reasoning.
    """

    def __init__(self, reader: Reader, count: int, skip_special_tokens: bool) -> None:
        self.reader, self.count = reader, count
        self.text = Detokenizer(reader.tokenizer, skip_special_tokens)
        self.made: list[dict[str, Any]] = []
        self.next = 0  # token that was not looked at yet

    def of(self, sample: CompletionOutput, parsed: Parsed) -> list[dict[str, Any]]:
        """Log-probabilities of the content so far.  All calls return one list, which grows."""
        content, text = parsed.content, sample.text[parsed.start :]
        for token in sample.token_ids[self.text.count :]:
            self.text.feed(token)
        whole = text.startswith(content)
        end = parsed.start + (len(content) if whole else sum(takewhile(bool, map(eq, content, text))))
        entries, ends = sample.logprobs or [], self.text.ends
        while self.next < len(entries) and (begin := ends[self.next - 1] if self.next else 0) < end:
            if begin >= parsed.start:
                found = of_token(self.reader, sample.token_ids[self.next], entries[self.next], self.count)
                self.made.append(found)
            self.next += 1
        return self.made
