"""Ray Serve in front of replicas, in processes: some are killed, during a stream and between requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from patience import HANG

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
LAYOUTS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]
PROGRAM = """
import faulthandler, json, sys, ray
from ray import serve
from outrider.serve.options import ServerOptions
from outrider.serve.ray import deployment
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
serve.start(http_options={"port": int(sys.argv[1])})
app = lambda: deployment("builtin-draft", speculative_config={"method": "ngram"}, threads=1,
                         max_model_len=512, server=ServerOptions(api_key=("secret",)),
                         actor={"num_cpus": 0.1}, **json.loads(sys.argv[3]))
serve.run(app(), name=sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    serve.run(app(), name=sys.argv[2])
    print("restarted", flush=True)
faulthandler.dump_traceback_later(60, repeat=True)  # what keeps a driver that does not end
serve.shutdown()
print("shut down", flush=True)
"""
KEY = {"Authorization": "Bearer secret"}
TEXT = {"prompt": "The future of AI is", "ignore_eos": True, "temperature": 0.8, "seed": 3, "max_tokens": 400}
PREDICTION = {"type": "content", "content": "a bright one"}
FIELDS = {"cache_salt": "mine", "priority": 1, "return_token_ids": True, "prediction": PREDICTION}
LONGEST = 30.0  # seconds that a stream may take while replicas are replaced
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_worker_niceness": "0"}  # on a busy machine


def processes(name: str) -> list[int]:
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if name in line and "ps -eo" not in line]


def busiest(pids: list[int]) -> int:
    """The process that computes."""

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = {pid: ticks(pid) for pid in pids}
    time.sleep(0.1)
    return max(pids, key=lambda pid: ticks(pid) - before[pid])


class Running(NamedTuple):
    """Replicas.  name: of their processes; program: that has started them."""

    url: str
    name: str
    program: subprocess.Popen[str]

    def restart(self) -> None:
        """Replace all replicas."""
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        assert any(line == "restarted\n" for line in self.program.stdout)


@contextmanager
def running(**options: Any) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app, pipe = f"test{port}", subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, str(port), app, json.dumps(options)]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**PATIENT, **os.environ})
    assert process.stdout is not None
    try:
        assert any(line == "ready\n" for line in process.stdout)
        yield Running(f"http://127.0.0.1:{port}/v1", f"ServeReplica:{app}:Model", process)
        assert "shut down" in process.communicate("", timeout=HANG)[0] and process.returncode == 0
    finally:
        process.kill()
        process.wait()


def offline(**options: Any) -> str:
    llm, params = LLM("builtin-draft", max_model_len=512, **options), {**TEXT, "ignore_eos": True}
    prompt = str(params.pop("prompt"))
    return llm.generate([prompt], SamplingParams(**params))[0].outputs[0].text


def choice_of(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/completions", json={**TEXT, **fields}, headers=KEY, timeout=200).json()
    return dict(answer["choices"][0])


def streamed(url: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """The choice in every event of a stream."""
    body = {**TEXT, **fields, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, headers=KEY, timeout=200) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]


def test_a_killed_replica_changes_no_text() -> None:
    plain, found, ids = offline(), list[str](), list[int]()
    with running(replicas=2) as (url, name, _):
        assert httpx.get(f"{url}/models").status_code == 401
        for choice in streamed(url, **FIELDS):
            found.append(choice["text"])
            ids += choice["token_ids"]
            if len(found) == 5:
                os.kill(busiest(processes(name)), signal.SIGKILL)
        assert "".join(found) == plain == choice_of(url)["text"]
        assert len(ids) == TEXT["max_tokens"] and ids == choice_of(url, **FIELDS)["token_ids"]


def test_a_rolling_restart_changes_no_text() -> None:
    """Of streams that are open meanwhile; no client is refused, and none waits for a model to load."""
    plain, over, seconds = offline(), threading.Event(), list[float]()

    def ask_on(url: str) -> None:
        while not over.is_set():
            began = time.monotonic()
            assert "".join(choice["text"] for choice in streamed(url)) == plain
            seconds.append(time.monotonic() - began)

    with running(replicas=2) as service, ThreadPoolExecutor(3) as pool:
        before = {*processes(service.name)}
        clients = [pool.submit(ask_on, service.url) for _ in range(3)]
        try:
            while len(seconds) < 3 and not any(client.done() for client in clients):
                time.sleep(0.1)
            service.restart()
            complete = len(seconds)
            while len(seconds) < complete + 6 and not any(client.done() for client in clients):
                time.sleep(0.1)
        finally:
            over.set()
        for client in clients:
            client.result()
        print(len(seconds), "streams, the longest took", max(seconds))
        assert max(seconds) < LONGEST
        after = {*processes(service.name)}
        assert len(before) == len(after) == 2 and not before & after


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "pipeline", "both"])
def test_ranks_that_ray_places_answer_like_local_ones_and_are_replaced(layout: dict[str, int]) -> None:
    plain = offline(**layout)
    with running(placement="PACK", **layout) as (url, *_):
        assert choice_of(url)["text"] == plain
        ranks = processes("ray::rank")
        assert len(ranks) == prod(layout.values()) - 1
        os.kill(ranks[-1], signal.SIGKILL)
        assert choice_of(url)["text"] == plain
        replaced = processes("ray::rank")
        assert replaced and not {*ranks} & {*replaced}
