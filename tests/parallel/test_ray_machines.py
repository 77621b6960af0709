"""Ray Serve on two machines, here network namespaces: replicas on both, of which one machine is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import Machines, ip, no_namespaces

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

from outrider import LLM, SamplingParams

HEAD, WORKER = "10.213.1.1", "10.213.1.2"
LOST = 45.0  # seconds that a client may have to wait when a machine is lost
PROGRAM = """
import json, sys, threading, time
import httpx, ray
from ray import serve
from outrider.serve.ray import deployment
options, body, expected = map(json.loads, sys.argv[2:])
ray.init(sys.argv[1] + ":6380", _node_ip_address=sys.argv[1], log_to_driver=False)
serve.start(http_options={"port": 8200})
serve.run(deployment("builtin-draft", max_model_len=512, threads=1, **options))
print("ready", flush=True)

def ask():
    text, began = "", time.monotonic()
    try:
        with httpx.stream("POST", "http://127.0.0.1:8200/v1/completions", json=body, timeout=100) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line[6:])
                    text += part["choices"][0]["text"] if "choices" in part else line
    except Exception as error:
        text += repr(error)
    print(json.dumps([text == expected, time.monotonic() - began, text[-300:]]), flush=True)

def ask_on():
    while not over.is_set():
        ask()

over = threading.Event()
clients = [threading.Thread(target=ask_on) for _ in range(3)]
for client in clients:
    client.start()
sys.stdin.readline()
over.set()
for client in clients:
    client.join()
print("null", flush=True)
"""
BODY = {"prompt": "The future of AI is", "ignore_eos": True, "temperature": 0.8, "seed": 3, "max_tokens": 200}
PLACE = {"num_cpus": 0, "resources": {"place": 1}}
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
pytestmark = [no_namespaces, pytest.mark.full, pytest.mark.timeout(400)]


OWN_FILES = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'


def cluster(machines: Machines) -> None:
    """Start Ray on both machines: with a place for one replica, and with two places and all CPUs."""
    common = ["--object-store-memory=80000000", "--block"]
    command = [str(Path(sys.executable).with_name("ray")), "start", *common]
    head = ["--head", "--port=6380", "--num-cpus=0", "--include-dashboard=false"]
    head += [f"--node-ip-address={HEAD}", '--resources={"place": 1}']
    first = machines.start(0, [*command, *head], **ENVIRONMENT)
    assert first.stdout is not None
    assert any("block forever" in line for line in first.stdout), first.communicate()
    worker = [
        f"--address={HEAD}:6380",
        "--num-cpus=2",
        f"--node-ip-address={WORKER}",
        '--resources={"place": 2}',
    ]
    machines.start(1, ["sh", "-c", OWN_FILES, "sh", *command, *worker], **ENVIRONMENT)


class Clients:
    """A program on the first machine that starts replicas and asks them until told to end."""

    def __init__(self, machines: Machines, expected: str, **options: Any) -> None:
        given = [json.dumps(each) for each in (options, BODY, expected)]
        self.program = machines.start(0, [sys.executable, "-c", PROGRAM, HEAD, *given], **ENVIRONMENT)
        assert self.program.stdout is not None and self.program.stdin is not None
        assert any(line == "ready\n" for line in self.program.stdout), self.program.communicate()
        self.seconds = list[float]()

    def read(self, count: int) -> None:
        """Check so many answers, or those that are left."""
        lines = iter(self.program.stdout)
        for line in itertools.islice(lines, count):
            if (answer := json.loads(line)) is None:
                return
            right, seconds, text = answer
            assert right, text
            self.seconds.append(seconds)

    def end(self) -> None:
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        self.read(1000)


def lose_power(machines: Machines) -> None:
    machines.kill(1)


def lose_network(machines: Machines) -> None:
    ip(f"-n {machines.names[0]} link set to1 down")


def processes(machines: Machines, machine: int, name: str) -> list[int]:
    """Ids of a machine's processes whose title contains a name."""
    return [pid for pid in machines.running(machine) if name in Path(f"/proc/{pid}/cmdline").read_text()]


def offline(**options: Any) -> str:
    """The text of BODY."""
    params = SamplingParams(ignore_eos=True, temperature=0.8, seed=3, max_tokens=200)
    llm = LLM("builtin-draft", max_model_len=512, **options)
    return llm.generate([BODY["prompt"]], params)[0].outputs[0].text


@pytest.mark.parametrize("lose", [lose_power, lose_network])
def test_a_lost_machine_changes_no_text(
    machines: Callable[[int], Machines], lose: Callable[[Machines], None]
) -> None:
    two = machines(2)
    cluster(two)
    clients = Clients(two, offline(), replicas=3, actor=PLACE)
    clients.read(20)
    assert [len(processes(two, machine, ":Model")) for machine in range(2)] == [1, 2]
    lose(two)
    clients.read(20)
    clients.end()
    print(sorted(clients.seconds))
    assert max(clients.seconds) < LOST


def test_ranks_on_two_machines_answer_like_local_ones_and_are_replaced(
    machines: Callable[[int], Machines],
) -> None:
    two, options = machines(2), {"tensor_parallel_size": 2}
    cluster(two)
    clients = Clients(two, offline(**options), placement="STRICT_SPREAD", actor=PLACE, **options)
    clients.read(5)
    ranks = [processes(two, machine, "ray::_rank") for machine in range(2)]
    (rank,) = ranks[0] or ranks[1]
    assert not (ranks[0] and ranks[1])
    os.kill(rank, signal.SIGKILL)
    clients.read(5)
    clients.end()
    print(sorted(clients.seconds))
