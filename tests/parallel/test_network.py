"""Ranks on two machines (here two network namespaces) whose network is lost: both end within seconds."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

PROGRAM = """
import sys
from outrider import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
print("ready", flush=True)
while True:
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
"""
OURS, THEIRS = "10.213.7.1", "10.213.7.2"
pytestmark = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip"
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace, and a link of its name to it."""
    name = f"outr{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    except subprocess.CalledProcessError:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip("no network namespaces here")
    for words in (
        f"addr add {OURS}/24 dev {name}",
        f"link set {name} up",
        f"-n {name} addr add {THEIRS}/24 dev eth0",
        f"-n {name} link set eth0 up",
        f"-n {name} link set lo up",
    ):
        ip(*words.split())
    yield name
    ip("netns", "del", name)


def run(rank: int, port: int, model: str, *prefix: str) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": OURS, "MASTER_PORT": str(port)}
    command = [*prefix, sys.executable, "-c", PROGRAM, model]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.timeout(150)
@pytest.mark.full
def test_a_lost_network_ends_all_ranks(namespace: str, model: str) -> None:
    with socket.create_server((OURS, 0)) as free:
        port = free.getsockname()[1]
    first, other = run(0, port, model), run(1, port, model, "ip", "netns", "exec", namespace)
    try:
        assert first.stdout is not None and first.stdout.readline() == "ready\n"
        ip("link", "set", namespace, "down")
        began = time.monotonic()
        _, text = first.communicate(timeout=40)
        assert "RankError: rank 1 has not answered" in text and first.returncode == 1
        other.communicate(timeout=max(1.0, 40 - time.monotonic() + began))
        assert other.returncode != 0
    finally:
        for process in (first, other):
            process.kill()
            process.wait()
