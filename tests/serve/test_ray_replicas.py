"""Ray Serve in front of replicas, in processes: some are killed, during a stream and between requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

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
app = deployment("builtin-draft", speculative_config={"method": "ngram"}, threads=1, max_model_len=512,
                 server=ServerOptions(api_key=("secret",)), actor={"num_cpus": 0.1},
                 **json.loads(sys.argv[3]))
serve.run(app, name=sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
faulthandler.dump_traceback_later(60, repeat=True)  # what keeps a driver that does not end
serve.shutdown()
print("shut down", flush=True)
"""
KEY = {"Authorization": "Bearer secret"}
TEXT = {"prompt": "The future of AI is", "ignore_eos": True, "temperature": 0.8, "seed": 3, "max_tokens": 400}
PREDICTION = {"type": "content", "content": "a bright one"}
FIELDS = {"cache_salt": "mine", "priority": 1, "return_token_ids": True, "prediction": PREDICTION}
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


@contextmanager
def running(**options: Any) -> Iterator[tuple[str, str]]:
    """Replicas: their URL, and the name of their processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app, pipe = f"test{port}", subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, str(port), app, json.dumps(options)]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**PATIENT, **os.environ})
    assert process.stdout is not None
    try:
        assert any(line == "ready\n" for line in process.stdout)
        yield f"http://127.0.0.1:{port}/v1", f"ServeReplica:{app}:Model"
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


def test_a_killed_replica_changes_no_text() -> None:
    plain, found, ids = offline(), list[str](), list[int]()
    body = {**TEXT, **FIELDS, "stream": True}
    with running(replicas=2) as (url, name):
        assert httpx.get(f"{url}/models").status_code == 401
        with httpx.stream("POST", f"{url}/completions", json=body, headers=KEY, timeout=200) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    found.append(choice["text"])
                    ids += choice["token_ids"]
                    if len(found) == 5:
                        os.kill(busiest(processes(name)), signal.SIGKILL)
        assert "".join(found) == plain == choice_of(url)["text"]
        assert len(ids) == TEXT["max_tokens"] and ids == choice_of(url, **FIELDS)["token_ids"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "pipeline", "both"])
def test_ranks_that_ray_places_answer_like_local_ones_and_are_replaced(layout: dict[str, int]) -> None:
    plain = offline(**layout)
    with running(placement="PACK", **layout) as (url, _):
        assert choice_of(url)["text"] == plain
        ranks = processes("ray::rank")
        assert len(ranks) == prod(layout.values()) - 1
        os.kill(ranks[-1], signal.SIGKILL)
        assert choice_of(url)["text"] == plain
        replaced = processes("ray::rank")
        assert replaced and not {*ranks} & {*replaced}
