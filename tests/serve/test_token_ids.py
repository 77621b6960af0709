"""vLLM's return_token_ids and return_tokens_as_token_ids: ids beside the texts, and as names of tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import Served

from outrider import LLM, SamplingParams
from outrider.outputs import RequestOutput

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["The future of AI is", "Once upon a time"]
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
PARAMS: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 12, "n": 2}


def chunks_of(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def offline(llm: LLM, path: str) -> list[RequestOutput]:
    if path == CHAT:
        return llm.chat(MESSAGES, SamplingParams(**PARAMS))
    return llm.generate(PROMPTS, SamplingParams(**PARAMS))


def body_of(path: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPTS}
    return {**asked, **PARAMS, **more}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ids_of_prompt_and_output_are_returned(path: str, server: Served, llm: LLM) -> None:
    """Those of the prompt in each choice of completions, and once in the response of a chat."""
    outputs = offline(llm, path)
    answer = server.post(path, body_of(path, return_token_ids=True)).json()
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    for choice, (output, sample) in zip(answer["choices"], samples, strict=True):
        assert choice["token_ids"] == sample.token_ids
        place = answer if path == CHAT else choice
        assert place["prompt_token_ids"] == output.prompt_token_ids
    assert ("prompt_token_ids" in answer) == (path == CHAT)


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_completions_has_the_prompt_in_the_first_chunk_of_a_choice(
    echo: bool, server: Served, llm: LLM
) -> None:
    chunks = chunks_of(server, COMPLETIONS, body_of(COMPLETIONS, return_token_ids=True, echo=echo))
    samples = [(o.prompt_token_ids, sample) for o in offline(llm, COMPLETIONS) for sample in o.outputs]
    for index, (prompt, sample) in enumerate(samples):
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [part["prompt_token_ids"] for part in parts] == [prompt] + [None] * (len(parts) - 1)
        assert [token for part in parts for token in part["token_ids"]] == sample.token_ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks)


def test_a_stream_of_a_chat_has_the_prompt_beside_the_first_delta_of_a_choice(
    server: Served, llm: LLM
) -> None:
    (output,) = offline(llm, CHAT)
    chunks = chunks_of(server, CHAT, body_of(CHAT, return_token_ids=True))
    for sample in output.outputs:
        parts = [chunk for chunk in chunks if chunk["choices"][0]["index"] == sample.index]
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        prompts = [chunk.get("prompt_token_ids") for chunk in parts]
        assert prompts == [output.prompt_token_ids] + [None] * (len(parts) - 1)
        assert [token for one in parts for token in one["choices"][0]["token_ids"]] == sample.token_ids


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_left_out_unless_asked_for(path: str, stream: bool, server: Served) -> None:
    assert "token_ids" not in server.post(path, body_of(path, stream=stream)).text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_completion_can_be_named_by_their_ids(stream: bool, server: Served) -> None:
    body = body_of(COMPLETIONS, prompt=PROMPTS[0], n=1, logprobs=2, echo=True)
    plain = server.post(COMPLETIONS, {**body, "return_token_ids": True}).json()["choices"][0]
    more = {**body, "return_tokens_as_token_ids": True}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(server, COMPLETIONS, more)]
        found = {name: [one for part in parts for one in part[name]] for name in plain["logprobs"]}
    else:
        found = server.post(COMPLETIONS, more).json()["choices"][0]["logprobs"]
    ids = plain["prompt_token_ids"] + plain["token_ids"]
    assert found["tokens"] == [f"token_id:{token}" for token in ids]
    for name in ("token_logprobs", "text_offset"):
        assert found[name] == plain["logprobs"][name]
    for token, logprob, best in zip(ids[1:], found["token_logprobs"][1:], found["top_logprobs"][1:]):
        assert best[f"token_id:{token}"] == logprob and len(best) in (2, 3)
        assert all(name.startswith("token_id:") for name in best)


def test_tokens_of_a_chat_can_be_named_by_their_ids(server: Served, llm: LLM) -> None:
    body = body_of(CHAT, n=1, logprobs=True, top_logprobs=2)
    answer = server.post(CHAT, {**body, "return_tokens_as_token_ids": True, "return_token_ids": True}).json()[
        "choices"
    ][0]
    entries = answer["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in answer["token_ids"]]
    for entry, token in zip(entries, answer["token_ids"]):
        assert bytes(entry["bytes"]).decode() == llm.tokenizer.decode([token])
        assert all(one["token"].startswith("token_id:") for one in entry["top_logprobs"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_part_of_a_stream_has_the_ids_of_its_log_probabilities(path: str, server: Served) -> None:
    """Also where the first token is a part of a character, which has no text yet."""
    choice = {"guided_choice": ["😀x"], "speculation": {"enabled": False}, "return_token_ids": True}
    body = body_of(path, n=1, logprobs=True if path == CHAT else 0, **choice)
    parts = [one for chunk in chunks_of(server, path, body) for one in chunk["choices"]]
    counts = [(one["logprobs"] or {}).get("content" if path == CHAT else "tokens", []) for one in parts]
    assert [len(one["token_ids"]) for one in parts] == [len(count) for count in counts]
    assert sum(len(one["token_ids"]) for one in parts) > 2
