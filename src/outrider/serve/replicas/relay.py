"""One request of a client, answered by a replica, and by another one if that process ends.

A request gets its seed and its id here, so that it can be repeated: the text is a function of the seed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import shortened
from outrider.serve.errors import ApiError, api_error
from outrider.serve.guard import GENERATING
from outrider.serve.ids import ATTEMPT, is_id
from outrider.serve.protocol import MOST_SAMPLES
from outrider.serve.replicas.replay import Replay
from outrider.serve.replicas.routing import blocks_of
from outrider.serve.wire import DONE, Events, dumps, strict_json, unless_left

MOST_LOST = 2  # replicas that may end while they compute one request
MOST_TRIES = 50  # answers "not ready" that one request may get: a replica that stops returns them
PAUSE = 0.1  # seconds after such an answer
NOT_COPIED = ("host", "connection", "content-length", "transfer-encoding", "keep-alive", "accept-encoding",
              "te", "date", "server")  # headers of one connection  # fmt: skip
LAST = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
ENDS = tuple(f"event: {name}\n" for name in LAST)
log = logging.getLogger("outrider.serve")


class ReplicaLost(Exception):
    """A replica ended before its answer was complete.  planned: it was stopped on purpose."""

    def __init__(self, planned: bool = False) -> None:
        super().__init__()
        self.planned = planned


class NotReached(Exception):
    """A replica was gone before it got the request."""


@dataclass(frozen=True)
class Question:
    """A request as replicas get it.

    target: path with query, percent-encoded, without `root_path`.
    blocks: keys of its prompt.  samples: rows that it makes.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    blocks: tuple[int, ...] = ()
    samples: int = 1
    generates: bool = False

    @staticmethod
    def of(method: str, target: str, headers: Collection[tuple[str, str]], body: bytes) -> Question:
        """A request of a client, with a seed and an id if it generates."""
        kept = tuple((name, value) for name, value in headers if name.lower() not in {*NOT_COPIED, ATTEMPT})
        if method != "POST" or target.partition("?")[0] not in GENERATING:
            return Question(method, target, kept, body)
        try:
            given = strict_json(body)
        except ValueError:  # the replica refuses it in its words
            given = None
        if not isinstance(given, dict):
            return Question(method, target, kept, body)
        seed = given.get("seed")
        if seed is None or (type(seed) is int and seed == -1):  # a random one
            given["seed"] = secrets.randbits(62)
        named = is_id({name.lower(): value for name, value in kept}.get("x-request-id", ""))
        if given.get("request_id") is None and named:
            kept += ((ATTEMPT, uuid4().hex),)
        elif given.get("request_id") is None:
            given["request_id"] = uuid4().hex
        prompt, n = given.get("prompt"), given.get("best_of") or given.get("n")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        samples = prompts * (min(n, MOST_SAMPLES) if isinstance(n, int) else 1)
        blocks = tuple(blocks_of(given))
        return Question(method, target, kept, dumps(given).encode(), blocks, max(1, samples), True)


class Answer(Protocol):
    """The answer of a replica, which has begun.  Reading it raises ReplicaLost if the replica ends."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def replica(self) -> int: ...

    @property
    def planned(self) -> bool:
        """Whether the replica is being stopped."""

    def events(self) -> AsyncIterator[str]:
        """Whole events of a stream."""

    async def read(self) -> bytes:
        """The body."""


class Pool(Protocol):
    """Replicas that can answer requests."""

    def ask(self, question: Question, avoid: Collection[int]) -> AbstractAsyncContextManager[Answer]:
        """An answer of the best replica, none of `avoid` if there is another one that is ready.

        Raises ReplicaLost, NotReached, and ApiError if none becomes ready in time.
        """

    def ready(self) -> Collection[int]:
        """Numbers of the replicas that accept requests: another one is tried where one is full."""
        return ()

    def note_retry(self) -> None:
        """Count a repeated request, if nothing else does."""


class Relay:
    """A question on its way to an answer."""

    def __init__(self, pool: Pool, question: Question) -> None:
        self.pool, self.question = pool, question
        self._lost, self._tries = 0, 0
        self._avoid, self._full = set[int](), set[int]()
        self._opened = AsyncExitStack()  # the answer that is being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            response = await unless_left(receive, self._response())
            await response(scope, receive, send)

    async def _response(self) -> Response:
        answer, body = await self._ask()
        if body is None:
            return await Events.begun(self._events(answer), ExitStack())
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_COPIED}
        return Response(body, answer.status, kept)

    async def _ask(self) -> tuple[Answer, bytes | None]:
        """An answer and its body, None of a stream.  Retries until a replica does not fail."""
        while True:
            await self._opened.aclose()
            try:
                asked = self.pool.ask(self.question, self._avoid | self._full)
                answer = await self._opened.enter_async_context(asked)
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    return answer, None
                body = await answer.read()
                if not self._refused(answer, body):
                    return answer, body
            except (ReplicaLost, NotReached) as error:
                self._note(error)
            await asyncio.sleep(PAUSE if self._tries else 0)

    def _refused(self, answer: Answer, body: bytes) -> bool:
        """Whether to try another replica instead of returning this answer."""
        if answer.status == 429:
            self._full.add(answer.replica)
            return bool(set(self.pool.ready()) - self._full)
        if answer.status != 503 or not self.question.generates:
            return False
        self._avoid = {answer.replica}
        if b'"engine_error"' in body:
            raise ReplicaLost(answer.planned)
        self._tries += 1
        return self._tries < MOST_TRIES

    def _note(self, error: Exception) -> None:
        """Count an attempt that failed.  Raises ApiError if there were too many."""
        self.pool.note_retry()
        if isinstance(error, ReplicaLost) and not error.planned:
            self._lost += 1
            log.warning("a replica ended while it computed a request (%d of %d)", self._lost, MOST_LOST)
        else:
            self._tries += 1
        if self._lost >= MOST_LOST:
            text = f"{self._lost} replicas ended while they computed this request: it is not tried again."
            raise ApiError(503, text, code="replica_lost")
        if self._tries >= MOST_TRIES:
            raise ApiError(503, "no replica could be reached.", code="not_reached", retry_after=5)

    async def _events(self, answer: Answer) -> AsyncGenerator[str]:
        """The events of one answer after another, without what has been sent."""
        sent: list[str] = []
        try:
            while True:
                replay = Replay(sent)
                try:
                    async with aclosing(_checked(answer)) as events:
                        async for text in events:
                            if (rest := replay.rest(text)) is not None:
                                sent.append(rest)
                                yield rest
                    return
                except ReplicaLost as error:
                    self._avoid = {answer.replica}  # its end may not be known yet
                    self._note(error)
                answer, body = await self._ask()
                if body is not None:
                    text = shortened(body.decode(errors="replace"), 200)
                    raise ApiError(503, f"the request could not be repeated: {text}", code="replica_lost")
        except Exception as error:
            if not sent:
                raise
            for text in Replay(sent).failure(api_error(error)):
                yield text


async def _checked(answer: Answer) -> AsyncGenerator[str]:
    """The events of an answer.  Raises ReplicaLost for an event that reports the end of the engine."""
    ended = False
    async for text in answer.events():
        if text.startswith(('data: {"error":', "event: error\n")) and '"code":"engine_error"' in text:
            raise ReplicaLost(answer.planned)
        ended = ended or text == DONE or text.startswith(ENDS)
        yield text
    if not ended:
        raise ReplicaLost(answer.planned)


async def whole_events(texts: AsyncIterator[str]) -> AsyncGenerator[str]:
    """The events of a stream that comes in any pieces."""
    rest = ""
    async for text in texts:
        *whole, rest = (rest + text).split("\n\n")
        for each in whole:
            yield f"{each}\n\n"
