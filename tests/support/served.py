"""A server in a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI


@dataclass
class Served:
    """A running server, at `url`."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def client(self, key: str = "EMPTY") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any = None, **given: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **given)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **given)

    def metric(self, name: str, labels: str = "") -> float:
        """Value of a metric, by its name without prefix."""
        found = re.search(rf"(?m)^outrider:{name}{re.escape(labels)} (\S+)$", self.get("/metrics").text)
        assert found, name
        return float(found[1])

    def idle(self) -> bool:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)


@contextmanager
def served(*options: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Start `python -m outrider.serve` with these options on a free port, and kill it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        command = [sys.executable, "-m", "outrider.serve", *options, "--port", "0"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with path.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
        try:
            yield Served(process, _address(process, path), path)
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], path: Path) -> str:
    for _ in range(1200):
        if found := re.search(r"is served at (\S+)", path.read_text()):
            return found[1]
        assert process.poll() is None, path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"the server does not start: {path.read_text()}")
