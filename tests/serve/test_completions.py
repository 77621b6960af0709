"""/v1/completions over a socket, with OpenAI's client: the texts are those of the offline API."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from served import Served

from outrider import LLM, SamplingParams

PROMPT = "The future of AI is"


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client()


def offline(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params))[0]


def test_the_client_of_vllms_page_runs(server: Served) -> None:
    """Its lines, but for the address."""
    client = OpenAI(api_key="EMPTY", base_url=f"{server.url}/v1")
    models = client.models.list()
    model = models.data[0].id
    for stream in (False, True):
        completion = client.completions.create(model=model, prompt=PROMPT, echo=False, n=1, stream=stream)
        chunks = list(completion) if stream else [completion]
        assert all(chunk.object == "text_completion" and chunk.model == model for chunk in chunks)
        assert "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_and_usage_are_those_of_the_offline_api(temperature: float, client: OpenAI, llm: LLM) -> None:
    params = {"temperature": temperature, "seed": 7, "max_tokens": 40, "stop": ["."], "n": 2}
    expected = offline(llm, PROMPT, **params)
    got = client.completions.create(model="builtin", prompt=PROMPT, **params)
    assert [choice.text for choice in got.choices] == [sample.text for sample in expected.outputs]
    reasons = [sample.finish_reason for sample in expected.outputs]
    assert [choice.finish_reason for choice in got.choices] == reasons
    usage = got.usage
    assert usage is not None and usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.completion_tokens == sum(len(sample.token_ids) for sample in expected.outputs)
    stream = client.completions.create(model="builtin", prompt=PROMPT, stream=True, **params)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [sample.text for sample in expected.outputs]


def test_prompts_of_all_kinds_are_continued_in_order(client: OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    prompts: list[Any] = [PROMPT, [PROMPT, "Once upon a time"], ids, [ids, ids[:2]]]
    for prompt in prompts:
        several = prompt if isinstance(prompt[0], list) or not isinstance(prompt[0], int | str) else None
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        got = client.completions.create(model="builtin", prompt=prompt, temperature=0, max_tokens=5)
        expected = [offline(llm, one, temperature=0, max_tokens=5).outputs[0].text for one in several]
        assert [choice.text for choice in got.choices] == expected
        assert [choice.index for choice in got.choices] == list(range(len(several)))


def test_echo_and_logprobs_cover_prompt_and_output(client: OpenAI, llm: LLM) -> None:
    expected = offline(llm, PROMPT, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    got = client.completions.create(
        model="builtin", prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2, echo=True
    ).choices[0]
    assert got.text == PROMPT + expected.outputs[0].text
    ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    entries = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    found = got.logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert found.token_logprobs[0] is None
    for token, entry, value, best in list(
        zip(ids, entries, found.token_logprobs, found.top_logprobs, strict=True)
    )[1:]:
        assert value == entry[token].logprob
        assert len(best) <= 3 and max(best.values()) >= value  # the two best ones, and itself


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True},
        {"echo": True, "truncate_prompt_tokens": 3},
        {"guided_choice": ["😀 and 𝄞"], "speculation": {"enabled": False}},
    ],
)
def test_logprobs_of_a_stream_are_those_of_the_whole(more: Any, server: Served) -> None:
    body: Any = {"prompt": PROMPT, "seed": 3, "max_tokens": 12, "logprobs": 1, "n": 2, **more}
    whole = server.post("/v1/completions", body).json()["choices"]
    lines = server.post("/v1/completions", {**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for choice in whole:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [x for part in parts if (found := part["logprobs"]) for x in found[name]] == values


@pytest.mark.parametrize("prompt", [PROMPT, [70, 80, 90, 300, 310]])
@pytest.mark.parametrize(("keep", "stream"), [(3, False), (3, True), (50, False), (-1, True)])
def test_the_echo_of_a_truncated_prompt_is_what_the_model_got(
    prompt: Any, keep: int, stream: bool, server: Served, llm: LLM
) -> None:
    ids = (llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)[-keep if keep > 0 else 0 :]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    answer = server.post("/v1/completions", {**body, "truncate_prompt_tokens": keep, "stream": stream})
    lines = [line[6:] for line in answer.text.split("\n\n")[:-2]] if stream else [answer.text]
    parts = [json.loads(line)["choices"][0] for line in lines]
    text = "".join(part["text"] for part in parts)
    found = {
        name: [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        for name in ("tokens", "text_offset", "token_logprobs")
    }
    assert text.startswith(llm.tokenizer.decode(ids)) and text == "".join(found["tokens"])
    assert found["tokens"][: len(ids)] == [llm.tokenizer.decode([token]) for token in ids]
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert text[offset:].startswith(token)
    assert found["token_logprobs"][0] is None and None not in found["token_logprobs"][1:]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_one_character_begin_where_it_does(stream: bool, server: Served) -> None:
    """Each counted as a character of its own."""
    more = {"guided_choice": ["a😀b"], "speculation": {"enabled": False}}
    body = {"prompt": "é日", "echo": True, "logprobs": 0, "max_tokens": 20, "stream": stream, **more}
    answer = server.post("/v1/completions", body)
    lines = [line[6:] for line in answer.text.split("\n\n")[:-2]] if stream else [answer.text]
    parts = [json.loads(line)["choices"][0] for line in lines]
    text = "".join(part["text"] for part in parts)
    assert text == "é日a😀b"
    names = [name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]]
    offsets = [place for part in parts if part["logprobs"] for place in part["logprobs"]["text_offset"]]
    assert sum("\ufffd" in name for name in names) > 4, "these characters have several tokens"
    begun = {place: name for name, place in zip(reversed(names), reversed(offsets)) if place < len(text)}
    assert sorted(begun) == [*range(len(text))]
    for place, name in begun.items():
        assert name in (text[place], "\ufffd") or text[place:].startswith(name)


def test_usage_of_a_stream_comes_last_when_asked_for(client: OpenAI) -> None:
    given: Any = {"model": "builtin", "prompt": PROMPT, "max_tokens": 8, "stream": True, "temperature": 0}
    chunks = list(client.completions.create(**given, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in client.completions.create(**given))


def test_vllms_sampling_parameters_arrive(client: OpenAI, llm: LLM) -> None:
    extra: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "ignore_eos": True,
        "min_tokens": 3,
        "stop_token_ids": [11],
        "skip_special_tokens": False,
    }
    given: Any = {"seed": 5, "temperature": 0.9, "max_tokens": 30}
    expected = offline(llm, PROMPT, **given, **extra).outputs[0]
    got = client.completions.create(model="builtin", prompt=PROMPT, extra_body=extra, **given).choices[0]
    assert got.text == expected.text


def test_speculation_is_reported_and_can_be_off_or_capped(server: Served) -> None:
    body: dict[str, Any] = {
        "prompt": "a b c d a b c d a b c d a b c d a b",
        "max_tokens": 40,
        "temperature": 0,
        "return_speculation": True,
        "ignore_eos": True,
    }
    full = server.post("/v1/completions", body).json()
    off = server.post("/v1/completions", {**body, "speculation": {"enabled": False}}).json()
    capped = server.post("/v1/completions", {**body, "speculation": {"max_tokens": 1}}).json()
    assert len({answer["choices"][0]["text"] for answer in (full, off, capped)}) == 1
    assert off["speculation"]["drafted"] == 0 and off["speculation"]["tokens_per_step"] == 1.0
    assert full["speculation"]["drafted"] > 0 and len(capped["speculation"]["acceptance_by_depth"]) <= 1
    found, details = full["speculation"], full["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == found["accepted"]
    assert details["rejected_prediction_tokens"] == found["drafted"] - found["accepted"]
    assert math.isclose(found["tokens_per_step"], found["emitted"] / found["steps"], rel_tol=1e-3)


def test_the_sampled_token_is_among_the_best_ones(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.5, "seed": 3, "logprobs": 1}
    found = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    for token, logprob, best in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert best[token] >= logprob and 1 <= len(best) <= 2
    assert any(len(best) == 2 for best in found["top_logprobs"])


def test_a_predicted_output_saves_steps(server: Served) -> None:
    body: dict[str, Any] = {"prompt": "The cat", "max_tokens": 40, "temperature": 0.7, "seed": 2}
    body |= {"return_speculation": True, "ignore_eos": True}
    plain = server.post("/v1/completions", body).json()
    text = plain["choices"][0]["text"]
    parts = [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]
    for content in (text, parts):
        reply = server.post(
            "/v1/completions", {**body, "prediction": {"type": "content", "content": content}}
        )
        assert reply.json()["choices"][0]["text"] == text
        assert reply.json()["speculation"]["steps"] < 0.7 * plain["speculation"]["steps"]
        assert reply.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 15


def test_a_repeated_prompt_is_cached(server: Served) -> None:
    body = {"prompt": "Cached words " * 30, "max_tokens": 1}
    for _ in range(2):
        usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_many_clients_get_the_texts_of_one(client: OpenAI, llm: LLM) -> None:
    def ask(i: int) -> str:
        return (
            client.completions.create(model="builtin", prompt=f"Number {i % 7}:", seed=i % 7, max_tokens=12)
            .choices[0]
            .text
        )

    expected = [offline(llm, f"Number {i}:", seed=i, max_tokens=12).outputs[0].text for i in range(7)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(28))) == [expected[i % 7] for i in range(28)]


def test_prompt_logprobs_are_those_of_the_offline_api(server: Served, llm: LLM) -> None:
    expected = offline(llm, PROMPT, temperature=0, max_tokens=1, prompt_logprobs=2).prompt_logprobs
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 2}
    got = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert got[0] is None and len(got) == len(expected)
    for entry, other in zip(got[1:], expected[1:]):
        assert {int(token): one["rank"] for token, one in entry.items()} == {
            token: one.rank for token, one in other.items()
        }
    assert server.post("/v1/completions", {**body, "stream": True}).status_code == 400


def test_every_choice_of_a_stream_ends_once(server: Served) -> None:
    """Also when another choice goes on for longer."""
    body = {"prompt": ["The future of AI is", "Once"], "n": 2, "max_tokens": 30, "temperature": 1, "seed": 2,
            "stop": ["e", "a"], "stream": True}  # fmt: skip
    lines = server.post("/v1/completions", body).text.split("\n\n")[:-2]
    ends = [
        choice["index"]
        for line in lines
        for choice in json.loads(line[6:])["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 1, 2, 3]
