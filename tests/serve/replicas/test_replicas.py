"""Processes behind one port: killed, frozen and restarted ones change no text."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import HANG
from served import Served, served

from outrider import LLM, SamplingParams
from outrider.serve.replicas.replay import parsed

LONGEST = 400
KEY = {"Authorization": "Bearer secret"}
TEXT: dict[str, Any] = {"prompt": "The future of AI is", "ignore_eos": True, "temperature": 0.8, "seed": 3}


TEMPLATE = (
    "{% for document in documents or () %}<{{ document.title }}>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--replicas", "2", "--replica-timeout", "8", "--api-key", "secret", "--max-requests", "8"]
    flags += ["--root-path", "/llm", "--stream-interval", "0"]
    flags += ["--chat-template", str(template), "--speculative-config", '{"method": "ngram"}']
    with served("builtin-draft", *flags) as running:
        yield running


def processes(server: Served) -> list[int]:
    """The newest process of every replica."""
    return [
        int(pid)
        for _, pid in sorted(dict(re.findall(r"replica (\d) is ready: process (\d+)", server.log)).items())
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def states(server: Served) -> set[str]:
    return {*server.get("/health").json().get("replicas", {"": "none"}).values()}


def await_ready(server: Served, seconds: float = 2 * HANG) -> None:
    deadline = time.monotonic() + seconds
    while states(server) != {"ready"}:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)


def offline(bodies: list[dict[str, Any]]) -> list[str]:
    """Texts of the offline API, without speculation."""
    names = ("temperature", "seed", "max_tokens", "ignore_eos")
    params = [SamplingParams(**{name: body[name] for name in names}) for body in bodies]
    outputs = LLM("builtin-draft").generate([body["prompt"] for body in bodies], params)
    return [output.outputs[0].text for output in outputs]


def busy(server: Served) -> int | None:
    """Process of the replica that answers, if one still does."""
    numbers = re.findall(r'router_open_samples\{replica="(\d)"\} [1-9]', server.get("/metrics").text)
    return processes(server)[int(numbers[0])] if numbers else None


def streamed(server: Served, body: dict[str, Any], fate: int) -> tuple[str, list[int], bool]:
    """Text and tokens of a stream, and whether its replica was there to get a signal after some events."""
    found, hurt = [], False
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=KEY, timeout=HANG
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(parsed(line)["choices"][0])
            if len(found) == 5 and not hurt and (pid := busy(server)):
                os.kill(pid, fate)
                hurt = True
    assert [part["prompt_token_ids"] is None for part in found] == [False] + [True] * (len(found) - 1)
    ids = [token for part in found for token in part["token_ids"]]
    return "".join(part["text"] for part in found), ids, hurt


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_stream_survives_its_replica(pair: Served, fate: int) -> None:
    await_ready(pair)
    body = {**TEXT, "max_tokens": LONGEST, "return_token_ids": True, "cache_salt": "mine"}
    (plain,) = offline([body])
    whole = pair.post("/v1/completions", body, headers=KEY).json()["choices"][0]
    retries = pair.metric("router_retries_total")
    for _ in range(20):  # until the signal comes before the end of the replica's answer
        await_ready(pair)
        text, ids, hurt = streamed(pair, body, fate)
        assert text == whole["text"] == plain and ids == whole["token_ids"]
        if hurt and pair.metric("router_retries_total") > retries:
            break
    assert pair.metric("router_retries_total") == retries + 1


def test_keys_limits_and_other_routes_are_those_of_one_server(pair: Served) -> None:
    for path in ("/v1/models", "/nowhere"):
        assert pair.get(path).status_code == 401
    assert pair.post("/v1/completions", {**TEXT, "max_tokens": 1}).status_code == 401
    assert pair.get("/v1/models", headers=KEY).json()["data"][0]["id"] == "builtin-draft"
    assert pair.get("/nowhere", headers=KEY).status_code == 404
    assert "Outrider" in pair.get("/", headers=KEY).text
    assert pair.get("/openapi.json", headers=KEY).json()["info"]["title"] == "Outrider"
    assert (
        pair.post("/v1/completions", {"prompt": "x", "nope": 1}, headers=KEY).json()["error"]["param"]
        == "nope"
    )
    too_many = pair.post("/v1/completions", {**TEXT, "n": 9}, headers=KEY)
    assert too_many.status_code == 400 and "8 samples at most" in too_many.text
    text = pair.get("/metrics").text
    assert re.search(r'(?m)^outrider:kv_cache_tokens\{replica="\d"\} \d', text)
    assert text.count("# TYPE outrider:kv_cache_tokens ") == 1


def test_fields_of_a_chat_reach_its_replica(pair: Served) -> None:
    """And so does the next request with the same salt, at the replica that has its pages."""
    await_ready(pair)
    messages = [{"role": "user", "content": "Which of them is the first one? " * 6}]
    body = {"messages": messages, "documents": [{"title": "One"}, {"title": "Two"}], "cache_salt": "a",
            "priority": 3, "return_token_ids": True, "temperature": 0, "max_tokens": 24}  # fmt: skip

    def chat(**more: Any) -> dict[str, Any]:
        answer = pair.post("/v1/chat/completions", {**body, **more}, headers=KEY)
        return dict(answer.json())

    first = chat()
    prompt = {"tokens": first["prompt_token_ids"]}
    assert pair.post("/detokenize", prompt, headers=KEY).json()["prompt"].startswith("<One><Two>Which of")
    text = first["choices"][0]["message"]["content"]
    found = [chat(prediction={"type": "content", "content": text}), chat(cache_salt="b")]
    assert all(one["choices"][0]["token_ids"] == first["choices"][0]["token_ids"] for one in found)
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, *found)]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert found[0]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_the_root_path_may_be_in_the_path_of_a_request_or_not(pair: Served) -> None:
    for root in ("", "/llm"):
        for path in ("/health", "/ping", "/", "/static/app.js", "/openapi.json"):
            assert pair.get(root + path).status_code == 200
        for path in ("/v1/models", "/static/%2e%2e/v1/models", "/llm/v1/models"):
            assert pair.get(root + path).status_code == 401
        assert pair.get(f"{root}/v1/models", headers=KEY).json()["data"][0]["id"] == "builtin-draft"
        blocks = pair.metric("router_prompt_blocks_total")
        pair.post(f"{root}/v1/completions", {**TEXT, "prompt": "x " * 99, "max_tokens": 1}, headers=KEY)
        assert pair.metric("router_prompt_blocks_total") > blocks, "routed by its prompt"


def test_turns_of_conversations_find_what_is_cached(pair: Served) -> None:
    """At least 80 % of what one engine finds."""
    await_ready(pair)
    llm, found, possible = LLM("builtin-draft"), 0, 0
    texts = [
        f"{name} walked through the village and looked for an inn. " * 3 for name in ("Anna", "Otto", "Emil")
    ]
    for _ in range(3):
        for i, text in enumerate(texts):
            body = {**TEXT, "prompt": text, "temperature": 0.0, "max_tokens": 30}
            answer = pair.post("/v1/completions", body, headers=KEY).json()
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            (output,) = llm.generate(text, params)
            assert answer["choices"][0]["text"] == output.outputs[0].text
            found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            possible += output.num_cached_tokens or 0
            texts[i] += output.outputs[0].text
    assert 0.8 * possible <= found <= possible and possible > 300


def test_a_full_replica_hands_on_and_a_client_that_leaves_frees_its_place(pair: Served) -> None:
    """Eight places each; the prompt is cached at one."""
    await_ready(pair)
    body = {**TEXT, "prompt": "The future of AI is " * 10, "max_tokens": 2 * LONGEST, "stream": True}
    body["speculation"] = {"enabled": False}  # so that no answer ends before the last request comes

    def first_line() -> httpx.Response:
        request = client.build_request("POST", f"{pair.url}/v1/completions", json=body, headers=KEY)
        return client.send(request, stream=True)

    with httpx.Client(timeout=HANG) as client, ThreadPoolExecutor(17) as threads:
        answers = list(threads.map(lambda _: first_line(), range(17)))
        assert sorted(answer.status_code for answer in answers) == [200] * 16 + [429]
        for answer in answers:
            answer.close()
    deadline = time.monotonic() + HANG
    while re.search(r"router_open_samples\S+ [1-9]", pair.get("/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="did not start"),
        served(str(tmp_path / "none"), "--replicas", "2"),
    ):
        pass


def test_the_end_of_the_router_is_that_of_its_replicas(pair: Served) -> None:
    """Last in this file: open requests end, and no process is left, after a signal."""
    await_ready(pair)
    pids = processes(pair)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            pair.post("/v1/completions", {**TEXT, "max_tokens": LONGEST}, headers=KEY)
        )
    )
    asking.start()
    while pair.get("/load").json() != {"server_load": 1}:
        assert asking.is_alive()
    assert pair.stop(seconds=HANG) == 0
    asking.join()
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert len(pids) == 2 and not any(map(alive, pids))


@pytest.mark.full
def test_under_load_with_kills_and_a_rolling_restart_every_reply_is_the_offline_one() -> None:
    """Three replicas, one killed every 5 s."""
    bodies = [
        {**TEXT, "prompt": f"Chapter {i}", "seed": i, "max_tokens": 20 + 30 * (i % 7), "temperature": i % 2}
        for i in range(40)
    ]
    expected, stop = offline(bodies), threading.Event()
    with served("builtin-draft", "--replicas", "3", "--api-key", "secret") as server:

        def kill() -> None:
            for turn in itertools.count():
                if stop.wait(5):
                    break
                os.kill(processes(server)[turn % 3], signal.SIGKILL)

        def ask(body: dict[str, Any]) -> str:
            answer = server.post("/v1/completions", body, headers=KEY)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            while time.monotonic() - began < 20:
                assert list(threads.map(ask, bodies)) == expected
            stop.set()
            killer.join()
            assert server.metric("router_retries_total") > 0
            await_ready(server)
            pids = processes(server)
            server.process.send_signal(signal.SIGHUP)
            while {*pids} & {*processes(server)}:
                assert list(threads.map(ask, bodies)) == expected
