"""Process of the router: start of the replicas, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from outrider.core.validate import text_of
from outrider.errors import ConfigError, OutriderError
from outrider.serve.replicas.app import make_app
from outrider.serve.replicas.router import Router
from outrider.serve.run import Process, Service, log_address
from outrider.serve.state import cancelled

log = logging.getLogger("outrider.serve")


def run_replicas(service: Service) -> None:
    """Serve with several processes until SIGTERM or SIGINT.  SIGHUP restarts them one after the other.

    Raises EngineError if a replica cannot start, and ConfigError, also if the address is in use.
    """
    if (service.config or {}).get("online") is not None:
        raise ConfigError(
            "online: only one process learns in a folder, and there are several replicas: leave online or "
            "--replicas out."
        )
    if service.options.chat_template is not None:
        text_of(service.options.chat_template, "chat_template")
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        router = Router(service, Path(folder))

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(_run(process, router))
            rolls = set[asyncio.Task[None]]()
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(log_error)
            loop.add_signal_handler(signal.SIGHUP, lambda: rolls.add(loop.create_task(router.roll())))
            yield
            await cancelled([task, *rolls])

        process = Process(make_app(router, lifespan), router)
        process.run()


def log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a callback.

    Not that of anyio, which sets the result of a future whose task has been cancelled: a client has left
    while its replica sent a byte.
    """
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


async def _run(process: Process, router: Router) -> None:
    try:
        await router.run(partial(log_address, process, router.options, router.model))
    except OutriderError as error:
        process.fail(error)
