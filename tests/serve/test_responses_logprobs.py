"""Log-probabilities of /v1/responses: those of the tokens of its message, in parts and whole."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from served import Served

from outrider import LLM, SamplingParams
from outrider.core.logprobs import Logprob
from outrider.outputs import CompletionOutput
from outrider.serve.chat import Reply
from outrider.serve.logprobs import MessageLogprobs
from outrider.serve.output_items import OutputItems
from outrider.serve.tools import HERMES

GIVEN: Any = {
    "model": "builtin", "input": "What is 3 + 4?", "temperature": 0, "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def test_every_token_of_the_message_has_its_log_probability(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, logprobs=2)
    (sample,) = llm.chat([{"role": "user", "content": GIVEN["input"]}], params)[0].outputs
    response = client.responses.create(**GIVEN)
    found = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert response.top_logprobs == 2 and sample.finish_reason == "stop"
    assert "".join(one.token for one in found) == response.output_text == sample.text
    assert sample.logprobs is not None and len(found) == len(sample.logprobs) - 1, "the end is no text"
    for one, token, entry in zip(found, sample.token_ids, sample.logprobs):
        assert one.logprob == entry[token].logprob and bytes(one.bytes).decode() == one.token
        best = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
        assert [other.logprob for other in one.top_logprobs] == best


def test_a_stream_has_them_beside_its_parts(client: OpenAI) -> None:
    whole = client.responses.create(**GIVEN).output[0].content[0].logprobs  # type: ignore[union-attr]
    events = list(client.responses.create(**GIVEN, stream=True))
    parts: list[Any] = [event for event in events if event.type == "response.output_text.delta"]
    assert len(parts) > 1 and all("".join(one.token for one in part.logprobs) == part.delta for part in parts)
    assert [one.logprob for part in parts for one in part.logprobs] == [one.logprob for one in whole]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.logprob for one in done.logprobs] == [one.logprob for one in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole  # type: ignore[union-attr]


def test_there_are_none_unless_asked_for(client: OpenAI) -> None:
    response = client.responses.create(model="builtin", input="Hello", max_output_tokens=4)
    assert response.output[0].content[0].logprobs == []  # type: ignore[union-attr]


CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"Let me see. {CALL}", "Let me see."),
        (f"Yes 😀. {CALL} And then?", "Yes 😀."),
        (f"{CALL} Done.", ""),
        ("No call <tool_cal", "No call <tool_cal"),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_tokens_of_tool_calls_are_no_part_of_the_message(
    text: str, message: str, step: int, llm: LLM
) -> None:
    """Nor those of a text behind a call, whose place in the message is another one."""
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    reply, items, logprobs = Reply(HERMES), OutputItems("resp_1"), MessageLogprobs(llm.reader, 0, False)
    deltas: list[Any] = []
    for end in [*range(step, len(tokens), step), len(tokens)]:
        ended, ids = end == len(tokens), tokens[:end]
        visible = llm.tokenizer.decode(ids).rstrip("\ufffd")
        entries = [{token: Logprob(-0.5, 1, None)} for token in ids]
        sample = CompletionOutput(0, visible, ids, "stop" if ended else None, logprobs=entries)
        parsed = reply.read(visible, sample.finish_reason)
        events = items.grow(parsed, "completed" if ended else None, logprobs.of(sample, parsed))
        deltas += [event for event in events if event["type"] == "response.output_text.delta"]
    found = [
        one for item in items.items if item["type"] == "message" for one in item["content"][0]["logprobs"]
    ]
    told = b"".join(bytes(one["bytes"]) for one in found)
    assert told.decode().strip() == message
    assert found == [one for delta in deltas for one in delta["logprobs"]]
