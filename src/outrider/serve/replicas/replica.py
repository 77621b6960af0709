"""One replica as the router sees it: a process that is started, watched and restarted.

starting ──/health──▶ ready ──no answer, or the process ends──▶ lost ──back-off──▶ starting
   └──────────────────────┴──restart──▶ stopping ──the process ends──▶ starting
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from outrider.errors import EngineError
from outrider.serve.replicas.child import main
from outrider.serve.replicas.relay import NotReached, Question, ReplicaLost, whole_events
from outrider.serve.replicas.routing import BLOCK_TOKENS, Prefixes
from outrider.serve.run import Service
from outrider.serve.state import cancelled

POLL, BEAT = 0.1, 1.0  # seconds between two health checks: while it starts, and later
FIRST_DELAY, LAST_DELAY = 0.5, 30.0  # seconds from the end of a process to the next, doubled each time
STEADY = 60.0  # seconds after which a replica counts as sound again
PREPARE_SECONDS = 60.0  # for it to load the adapters of the others
END_SECONDS = 4.0  # for a process without open requests to end
log = logging.getLogger("outrider.serve")


class Replica:
    """A server process, its open samples and the prefixes that it has.

    prepare: called with it once its server answers, before it gets requests; also after it was lost for a
    while.  Returns whether it has reached it
    adapters: name -> how it was loaded, of those that the process has
    changed: set when a replica becomes ready
    """

    def __init__(
        self,
        service: Service,
        timeout: float,
        prepare: Callable[[Replica], Awaitable[bool]],
        changed: asyncio.Event,
    ) -> None:
        self.number, self.service, self.timeout = service.number, service, timeout
        self.prepare, self.changed = prepare, changed
        self.state, self.open, self.used, self.restarts = "starting", 0, 0, 0
        self.prefixes, self.adapters = Prefixes(), dict[str, Question]()
        self._process: BaseProcess | None = None
        self._client: httpx.AsyncClient | None = None
        self._was_ready, self._started = False, asyncio.Event()  # set: the process serves, or has failed

    async def run(self) -> None:
        """Keep a process running until cancelled.  Raises EngineError if the first one does not start."""
        delay, loop = FIRST_DELAY, asyncio.get_running_loop()
        while True:
            ready_at = await self._run_process()
            if self.state == "stopping":
                continue
            if ready_at is None and not self._was_ready:
                raise EngineError(f"replica {self.number} did not start: see its messages.")
            self.state = "lost"
            self.restarts += 1
            delay = FIRST_DELAY if ready_at and loop.time() - ready_at > STEADY else delay
            log.error("replica %d has ended: another one starts in %.1f s", self.number, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY)

    async def restart(self) -> None:
        """Let open requests end, and start another process.  Returns once that serves, or has failed.

        A process that is starting has read what it serves: it is replaced, too.  Without a process, another
        one is about to start, or waits to.
        """
        process = self._process
        self._started.clear()
        if process is not None and process.is_alive():
            self.state = "stopping"
            process.terminate()
        await self._started.wait()

    async def end(self) -> None:
        """End the process, a frozen one too."""
        self.state, process = "lost", self._process
        if process is None or not process.is_alive():
            return
        process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await _ended(process)
        except TimeoutError:
            process.kill()
            await _ended(process)

    async def _run_process(self) -> float | None:
        """Run one process to its end.  Returns when it became ready, None if it never did."""
        self.state, self.prefixes, self.adapters = "starting", Prefixes(), {}
        Path(self.service.socket).unlink(missing_ok=True)
        process = self._process = _process(self.service)
        await asyncio.to_thread(process.start)
        ready_at: list[float] = []
        limits = httpx.Limits(max_keepalive_connections=0)  # a process may close an idle one at any time
        transport = httpx.AsyncHTTPTransport(uds=self.service.socket, limits=limits)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://replica{self.service.options.root_path}", timeout=None
        ) as self._client:
            watch = asyncio.create_task(self._watch(process, ready_at))
            try:
                await _ended(process)
            finally:
                await cancelled([watch])
        if self.state != "stopping":
            self._started.set()
        return ready_at[0] if ready_at else None

    async def _watch(self, process: BaseProcess, ready_at: list[float]) -> None:
        """Find out when the process is ready, and kill it if it freezes later."""
        while self.state == "starting" and not (await self._healthy(self.timeout) and await self._prepared()):
            await asyncio.sleep(POLL)
        await self._measure()
        if self.state == "starting":  # `stop` was not called meanwhile
            self.state, self._was_ready = "ready", True
            ready_at.append(asyncio.get_running_loop().time())
            self._started.set()
            self.changed.set()
            log.info("replica %d is ready: process %s", self.number, process.pid)
        while await self._healthy(self.timeout) is not None:
            if self.state == "lost" and await self._prepared():  # a connection broke, and not the process
                self._return()
            await asyncio.sleep(BEAT)
        planned = self.state == "stopping"
        await asyncio.sleep(self.service.options.shutdown_timeout + END_SECONDS if planned else POLL)
        log.error("replica %d does not answer: process %s is killed", self.number, process.pid)
        process.kill()

    async def _prepared(self) -> bool:
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                return await self.prepare(self)
        except TimeoutError:
            return False

    def _return(self) -> None:
        """Accept requests again, unless `stop` was called meanwhile."""
        if self.state == "lost":
            self.state = "ready"
            self.changed.set()

    async def _healthy(self, seconds: float) -> bool | None:
        """Whether it accepts requests; None without any answer."""
        assert self._client is not None
        try:
            async with asyncio.timeout(seconds):
                return (await self._client.get("/health")).status_code == 200
        except (httpx.HTTPError, TimeoutError):
            return None

    async def _measure(self) -> None:
        """Learn the size of the K/V cache."""
        for line in (await self.metrics()).splitlines():
            if line.startswith("outrider:kv_cache_tokens "):
                self.prefixes.capacity = max(1, round(float(line.split()[1])) // BLOCK_TOKENS)

    async def metrics(self) -> str:
        """Its metrics in the text format of Prometheus; nothing if it does not answer in time."""
        assert self._client is not None
        try:
            async with asyncio.timeout(self.timeout):
                return (await self._client.get("/metrics")).text
        except (httpx.HTTPError, TimeoutError):
            return ""

    @asynccontextmanager
    async def ask(self, question: Question) -> AsyncGenerator[HttpAnswer]:
        """The answer to a question.  Raises ReplicaLost and NotReached."""
        self.open += question.samples
        self.prefixes.add(question.blocks)
        try:
            async with AsyncExitStack() as opened:
                yield await self._send(question, opened)
        except (NotReached, ReplicaLost):
            self.lose()
            raise
        finally:
            self.open -= question.samples

    def lose(self) -> None:
        """Send it no requests until its health check succeeds."""
        if self.state == "ready":
            self.state = "lost"

    async def _send(self, question: Question, opened: AsyncExitStack) -> HttpAnswer:
        assert self._client is not None
        try:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in question.headers]
            stream = self._client.stream(
                question.method, question.target, headers=headers, content=question.body
            )
            response = await opened.enter_async_context(stream)
        except (httpx.ConnectError, RuntimeError) as error:  # the client is closed once the process has ended
            raise NotReached from error
        except httpx.TransportError as error:
            raise ReplicaLost(self.state == "stopping") from error
        return HttpAnswer(response.status_code, response.headers, self, response)


def _process(service: Service) -> BaseProcess:
    """A process that serves, not started yet.

    It is a fork of one that has imported all it needs: another one takes over soon.
    """
    forks = multiprocessing.get_context("forkserver")  # not on Windows
    forks.set_forkserver_preload(["outrider.serve.replicas.child"])
    return forks.Process(target=main, args=(service,), daemon=True)


async def _ended(process: BaseProcess) -> None:
    """Wait for the end of a process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    copy = os.dup(process.sentinel)  # several may wait
    loop.add_reader(copy, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(copy)
        os.close(copy)


@dataclass(frozen=True)
class HttpAnswer:
    """A response of a replica's server."""

    status: int
    headers: Mapping[str, str]
    source: Replica
    response: httpx.Response

    @property
    def replica(self) -> int:
        return self.source.number

    @property
    def planned(self) -> bool:
        return self.source.state == "stopping"

    async def read(self) -> bytes:
        with self._losing():
            return await self.response.aread()

    async def events(self) -> AsyncIterator[str]:
        with self._losing():
            async for event in whole_events(self.response.aiter_text()):
                yield event

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.StreamError) as error:
            planned = self.planned
            self.source.lose()
            raise ReplicaLost(planned) from error
