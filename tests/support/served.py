"""A server in a process of its own: `served`, as users start it, or `forked`, which imports nothing anew."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from openai import OpenAI
from patience import HANG
from server_process import serve

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["outrider.serve.replicas.child", "transformers"])


class Process(Protocol):
    """What tests use of `Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def wait(self, seconds: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Fork:
    """`serve` in a fork of a process that has imported the server (`Process`)."""

    def __init__(self, options: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
        self.process = CONTEXT.Process(target=serve, args=(options, log, environment), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"the server has not ended after {seconds} s"
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


@dataclass
class Served:
    """A running server, at `url`."""

    process: Process
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def client(self, key: str = "EMPTY") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG)

    def post(self, path: str, body: Any = None, **given: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=HANG, **given)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=HANG, **given)

    def metric(self, name: str, labels: str = "") -> float:
        """Value of a metric, by its name without prefix."""
        found = re.search(rf"(?m)^outrider:{name}{re.escape(labels)} (\S+)$", self.get("/metrics").text)
        assert found, name
        return float(found[1])

    def idle(self) -> bool:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0

    def stop(self, sig: int = signal.SIGTERM, seconds: float = HANG) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)


def served(*options: str, environment: dict[str, str] | None = None) -> AbstractContextManager[Served]:
    """Start `python -m outrider.serve` with these options on a free port, and kill it at the end."""
    return _running(_command, options, environment or {})


def forked(*options: str, environment: dict[str, str] | None = None) -> AbstractContextManager[Served]:
    """As `served`, in a fork: for what does not depend on how the process starts."""
    return _running(Fork, options, environment or {})


def _command(options: tuple[str, ...], log: Path, environment: dict[str, str]) -> Process:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "outrider.serve", *options],
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
        )


@contextmanager
def _running(
    start: Callable[[tuple[str, ...], Path, dict[str, str]], Process],
    options: tuple[str, ...],
    environment: dict[str, str],
) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.touch()
        process = start((*options, "--port", "0"), path, {"OMP_NUM_THREADS": "1", **environment})
        try:
            yield Served(process, _address(process, path), path)
        finally:
            process.kill()
            process.wait()


def _address(process: Process, path: Path) -> str:
    for _ in range(1200):
        if found := re.search(r"is served at (\S+)", path.read_text()):
            return found[1]
        assert process.poll() is None, path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"the server does not start: {path.read_text()}")
