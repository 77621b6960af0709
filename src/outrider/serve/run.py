"""Process of the server: loading, signals, the line about throughput."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from socket import socket
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from outrider.async_llm import AsyncLLM
from outrider.backends.cpu.threads import use
from outrider.core.collector import set_apart
from outrider.errors import ConfigError, EngineError
from outrider.serve.app import make_app
from outrider.serve.connection import connection_within
from outrider.serve.guard import Gate
from outrider.serve.listening import mark_of, tcp_sockets, unix_socket, unlink_marked
from outrider.serve.log import described, log_throughput
from outrider.serve.options import ServerOptions
from outrider.serve.state import Server, cancelled

WATCH_INTERVAL = 0.5  # seconds
LOADER = "load"  # name of the thread that loads
GRACE = 5.0  # seconds between the end of the engine and that of connections
log = logging.getLogger("outrider.serve")


@dataclass(frozen=True)
class Service:
    """Options of a serving process.

    engine: options of `LLM`, with the model.  config: its speculative_config.  threads: of the CPU.
    number, socket, gpus: of a replica, which listens on a Unix socket
    """

    options: ServerOptions
    engine: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    threads: int | None = None
    number: int = 0
    socket: str = ""
    gpus: Sequence[str] = ()

    def load(self) -> AsyncLLM:
        use(self.threads)
        restarts, warm_up = self.options.restart_engine, self.options.warmup
        llm = AsyncLLM(
            speculative_config=self.config, restart_on_error=restarts, warm_up=warm_up, **self.engine
        )
        set_apart()
        return llm


def run(service: Service) -> None:
    """Serve until SIGTERM or SIGINT.  The engine loads in another thread, while /health answers 503.

    Raises the error of loading, EngineError if the engine stops, and ConfigError if the address is in use.
    """
    server = Server(service.options, service.engine["model"])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = _load(process, server, service.load), log_throughput(server), watch_engine(process, server)
        tasks = [asyncio.create_task(task) for task in work]
        yield
        await cancelled(tasks)
        await server.end()
        if server.traces is not None:
            await asyncio.to_thread(server.traces.shutdown)

    process = Process(make_app(server, lifespan), server, service.socket)
    try:
        process.run()
    finally:
        gc.unfreeze()  # else extension modules such as Triton's report their objects as leaked
    if any(thread.name == LOADER for thread in threading.enumerate()):
        os._exit(0)  # the end of the interpreter would abort the process, inside a library of that thread


async def _load(process: Process, server: Server, load: Callable[[], AsyncLLM]) -> None:
    log.info("loading %s", server.model)
    try:
        engine = await asyncio.wrap_future(_loading(load))
        await asyncio.to_thread(server.started, engine)  # while /health is answered
    except Exception as error:
        process.fail(error)
        return
    gc.freeze()  # a collection that visits all that is loaded takes a tenth of a second
    log.info(described(server.llm.engine))
    if process.config.uds is None:
        await log_address(process, server.options, server.names[0])


async def log_address(process: Process, options: ServerOptions, name: str) -> None:
    while not process.started:
        await asyncio.sleep(0.01)
    for listener in [each for server in process.servers for each in server.sockets]:
        if isinstance(address := listener.getsockname(), str):
            log.info("%s is served at unix://%s", name, address)
            continue
        host, port = address[:2]
        host = f"[{host}]" if ":" in host else host
        log.info("%s is served at %s://%s:%d", name, "https" if options.ssl_certfile else "http", host, port)


def _loading(load: Callable[[], AsyncLLM]) -> Future[AsyncLLM]:
    """The result of `load`, run in a daemon thread: a process that ends does not wait for it."""
    future = Future[AsyncLLM]()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(load())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name=LOADER, daemon=True).start()
    return future


async def watch_engine(process: Process, server: Server) -> None:
    """End the process with a failure once the engine has stopped for good, for its supervisor."""
    while server.status != "ready" or server.engine.is_running:
        await asyncio.sleep(WATCH_INTERVAL)
    process.fail(server.engine.error or EngineError("the engine has stopped."))
    log.error("%s", process.failure)


class Ending(Gate, Protocol):
    """A server or router that can be shut down.  open: samples that are queued or running."""

    @property
    def open(self) -> int: ...

    async def end(self) -> None:
        """End every request."""


class Process(uvicorn.Server):
    """uvicorn's server, with a graceful end.

    After the first signal no request is accepted, and open ones have shutdown_timeout seconds.  Then the
    engine ends, and with it every request, with an error that its client can read.  A second signal ends
    all at once.
    """

    failure: Exception | None = None

    def __init__(self, app: ASGIApp, server: Ending, path: str = "") -> None:
        """path: of a Unix socket to listen on, instead of the address of the options."""
        self.server, options = server, server.options
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            uds=path or None,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=connection_within(options.body_timeout),
            ws="none",
            timeout_graceful_shutdown=int(options.shutdown_timeout + GRACE) + 1,
        )
        super().__init__(config)

    def fail(self, error: Exception) -> None:
        """End with an error, which `run` raises."""
        self.failure, self.should_exit = error, True

    def run(self, sockets: list[socket] | None = None) -> None:
        self._load_config()
        found = sockets or self._listening()
        path = self.server.options.uds if self.config.uds is None else None
        mark = mark_of(path) if path else ()
        try:
            super().run(found)
        finally:
            if path:  # a successor may listen there by now
                unlink_marked(path, mark)
        if self.failure is not None:
            raise self.failure

    def _load_config(self) -> None:
        """Read the files for TLS, which may ask for a passphrase.  Raises ConfigError for a wrong one."""
        try:
            self.config.load()
        except OSError as error:
            file = f"ssl_keyfile {str(self.config.ssl_keyfile)!r}"
            raise ConfigError(f"{file} cannot be read: is the passphrase right?") from error

    def _listening(self) -> list[socket] | None:
        """Sockets to listen on, before anything is loaded; None for those of uvicorn.  Raises ConfigError."""
        if self.config.uds is not None:
            return None
        options = self.server.options
        return [unix_socket(options.uds)] if options.uds else tcp_sockets(options.host, options.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # not super(): it would raise the signal again at the end, so the status of the process were not 0
        self.server.status = "stopping"
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self.server.status = "stopping"
        deadline = asyncio.get_running_loop().time() + self.server.options.shutdown_timeout
        await self._end_engine(deadline)  # meanwhile new connections get status 503
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        self.config.timeout_graceful_shutdown = int(left + GRACE) + 1
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out, and logs a traceback for it

    async def _end_engine(self, deadline: float) -> None:
        """End the engine once no request is open, by the deadline or a second signal at the latest."""
        while self.server.open and not self.force_exit and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if self.server.open:
            log.warning("%d requests did not end in time", self.server.open)
            await self.server.end()
