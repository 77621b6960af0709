"""Requests whose replica ends, freezes, is full or stops: pools that are scripts, no processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.serve.errors import ApiError
from outrider.serve.ids import ATTEMPT
from outrider.serve.replicas import relay
from outrider.serve.replicas.relay import Answer, NotReached, Question, Relay, ReplicaLost
from outrider.serve.wire import DONE, event

WORDS = ["The ", "future ", "of ", "AI ", "is ", "bright"]
ENGINE = '{"error":{"message":"a step failed","type":"server_error","param":null,"code":"engine_error"}}'


def chunk(text: str, end: str | None = None) -> str:
    return event({"created": 1, "choices": [{"index": 0, "text": text, "finish_reason": end}]})


WHOLE = [*map(chunk, WORDS), chunk("", "stop"), DONE]


@dataclass
class Scripted:
    """An answer.  lost: raised after the last event."""

    parts: list[str]
    replica: int = 0
    status: int = 200
    lost: bool = False
    planned: bool = False
    stream: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "text/event-stream" if self.stream else "application/json"}

    async def events(self) -> AsyncIterator[str]:
        for part in self.parts:
            yield part
        if self.lost:
            raise ReplicaLost(self.planned)

    async def read(self) -> bytes:
        if self.lost:
            raise ReplicaLost(self.planned)
        return "".join(self.parts).encode()


@dataclass
class Script:
    """A pool whose answers are given, in order."""

    answers: list[Scripted | Exception]
    replicas: int = 2
    retries: int = 0
    asked: list[tuple[bytes, set[int]]] = field(default_factory=list)
    open: int = 0

    @asynccontextmanager
    async def ask(self, question: Question, avoid: Collection[int]) -> AsyncGenerator[Answer]:
        self.asked.append((question.body, {*avoid}))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.open += 1
        try:
            yield answer
        finally:
            self.open -= 1

    def ready(self) -> Collection[int]:
        return range(self.replicas)

    def note_retry(self) -> None:
        self.retries += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PAUSE", 0.0)


def ask(pool: Script, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and body that a client gets."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    given = json.dumps({"prompt": "x", "stream": True} if body is None else body).encode()
    question = Question.of("POST", "/v1/completions", [], given)
    asyncio.run(Relay(pool, question)({"type": "http"}, receive, send))
    assert pool.open == 0
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


def text_of(body: str) -> str:
    values = [json.loads(part[6:]) for part in body.split("\n\n") if part and part != DONE.strip()]
    return "".join(choice["text"] for value in values for choice in value["choices"])


@pytest.mark.parametrize("length", range(len(WHOLE)))
@pytest.mark.parametrize("failed", [False, True], ids=["killed", "failed"])
def test_a_lost_stream_goes_on(length: int, failed: bool) -> None:
    """Also where the engine has failed, and its server lives."""
    lost = [*WHOLE[:length], *([f"data: {ENGINE}\n\n", DONE] if failed else [])]
    coarse = [chunk("".join(WORDS[:3])), chunk("".join(WORDS[3:])), *WHOLE[-2:]]
    pool = Script([Scripted(lost, lost=not failed), Scripted(coarse, 1)])
    status, body = ask(pool)
    assert status == 200 and text_of(body) == "".join(WORDS) and body.count("[DONE]") == 1
    assert body.count("stop") == 1 and "error" not in body
    assert pool.asked[0][0] == pool.asked[1][0], "the same seed and id"
    assert pool.retries == 1 and pool.asked[1][1] == {0}, "not the lost one, which may look ready"


def test_a_stream_that_ends_too_early_is_repeated() -> None:
    """A connection may end without an error."""
    assert text_of(ask(Script([Scripted(WHOLE[:2]), Scripted(WHOLE)]))[1]) == "".join(WORDS)


def test_a_request_that_ends_replicas_is_given_up() -> None:
    pool = Script([Scripted(WHOLE[:2], lost=True), Scripted(WHOLE[:3], 1, lost=True), Scripted(WHOLE)])
    status, body = ask(pool)
    assert len(pool.answers) == 1 and status == 200
    assert "2 replicas ended while they computed this request" in body and body.endswith(DONE)
    *tokens, error, end = body.split("\n\n")[:-1]
    assert text_of("\n\n".join(tokens)) == "The future of " and "replica_lost" in error and end in DONE


@pytest.mark.parametrize("stream", [False, True])
def test_before_its_first_event_it_is_given_up_with_a_status(stream: bool) -> None:
    pool = Script([Scripted([], lost=True, stream=stream), ReplicaLost(), Scripted(WHOLE)])
    with pytest.raises(ApiError, match="2 replicas ended") as raised:
        ask(pool)
    assert raised.value.status == 503


def test_replicas_that_are_stopped_do_not_count() -> None:
    pool = Script([*(Scripted(WHOLE[:2], lost=True, planned=True) for _ in range(3)), Scripted(WHOLE)])
    assert text_of(ask(pool)[1]) == "".join(WORDS)


def test_a_replica_that_was_not_reached_does_not_count() -> None:
    pool = Script([NotReached(), NotReached(), NotReached(), Scripted(WHOLE)])
    assert text_of(ask(pool)[1]) == "".join(WORDS) and pool.retries == 3


def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_TRIES", 3)
    with pytest.raises(ApiError, match="no replica could be reached"):
        ask(Script([NotReached() for _ in range(9)]))


def test_a_full_replica_tries_another_and_all_full_ones_are_reported() -> None:
    full = [Scripted(["full"], i, 429, stream=False) for i in range(2)]
    pool = Script([full[0], Scripted(["{}"], 1, stream=False)])
    assert ask(pool) == (200, "{}") and pool.asked[1][1] == {0}
    assert ask(Script([full[0], full[1]])) == (429, "full")


@pytest.mark.parametrize("code", ["stopping", "engine_stopped"])
def test_a_replica_that_stops_is_avoided_and_does_not_count(code: str) -> None:
    stopping = Scripted([json.dumps({"error": {"code": code}})], 0, 503, stream=False)
    pool = Script([stopping, stopping, stopping, Scripted(["{}"], 1, stream=False)])
    assert ask(pool) == (200, "{}") and [avoid for _, avoid in pool.asked] == [set(), {0}, {0}, {0}]


def test_refusals_of_a_replica_are_passed_on() -> None:
    assert ask(Script([Scripted(["wrong"], 0, 400, stream=False)])) == (400, "wrong")


FIELDS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "\u00e9 \ud83d\ude00"}],
    "documents": [{"title": "One", "text": "first", "of": [1, 2.5, None]}],
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
    "cache_salt": "mine",
    "priority": -3,
    "return_token_ids": True,
    "temperature": 0.1 + 0.2,
    "max_tokens": None,
}


def bodies() -> Iterator[tuple[bytes, bool]]:
    yield b'{"prompt": "x", "seed": 3, "request_id": "a"}', True
    yield b'{"prompt": "x"}', True
    yield json.dumps(FIELDS).encode(), True
    for odd in (b"", b"{", b"[1]", b'{"seed": NaN}', b'{"a": 1e999}', b"\xff"):
        yield odd, False


@pytest.mark.parametrize(("given", "generates"), list(bodies()))
def test_a_request_gets_a_seed_and_an_id_once(given: bytes, generates: bool) -> None:
    question = Question.of(
        "POST", "/v1/completions?a=1", [("Host", "x"), ("Authorization", "Bearer k")], given
    )
    assert question.generates == generates and question.headers == (("Authorization", "Bearer k"),)
    if not generates:
        assert question.body == given
        return
    made = json.loads(question.body)
    known = json.loads(given)
    assert isinstance(made["seed"], int) and made["request_id"]
    assert {name: made[name] for name in known} == known


def test_a_request_that_a_header_names_has_an_own_id_for_its_attempts() -> None:
    """The replica makes the ids of the parts from it, so a repeated request has them again."""
    given = [("X-Request-Id", "trace-1"), (ATTEMPT.title(), "of a client")]
    questions = [Question.of("POST", "/v1/completions", given, b'{"prompt": "x"}') for _ in range(2)]
    for question in questions:
        assert "request_id" not in json.loads(question.body)
        assert question.headers[0] == given[0] and question.headers[1][0] == ATTEMPT
    assert len({question.headers[1][1] for question in questions}) == 2
    question = Question.of("POST", "/v1/completions", given, b'{"prompt": "x", "request_id": "a"}')
    assert question.headers == (given[0],) and json.loads(question.body)["request_id"] == "a"
    odd = Question.of("POST", "/v1/completions", [("X-Request-Id", "a b")], b'{"prompt": "x"}')
    assert json.loads(odd.body)["request_id"]


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": ["x", "y"], "n": 3}, 6),
        ({"prompt": "x", "n": 2, "best_of": 5}, 5),
        ({"prompt": "x", "best_of": 1000}, 128),
        ({"prompt": "x", "best_of": "5"}, 1),
    ],
)
def test_samples_are_counted_for_the_choice_of_a_replica(given: Any, samples: int) -> None:
    assert Question.of("POST", "/v1/completions", [], json.dumps(given).encode()).samples == samples


def test_other_routes_pass_unchanged() -> None:
    body = b'{"prompt": "x"}'
    assert Question.of("POST", "/tokenize", [], body).body == body
    assert Question.of("GET", "/v1/models", [], b"").generates is False


def test_a_body_that_is_nested_too_deeply_is_left_to_the_replica() -> None:
    body = b'{"prompt": ' + b"[" * 100_000
    assert Question.of("POST", "/v1/completions", [], body).body == body
