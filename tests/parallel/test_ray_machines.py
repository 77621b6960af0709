"""Ray on several machines, here network namespaces: replicas, ranks, and a machine that is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machines, ip, no_namespaces

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

from outrider import LLM, SamplingParams

HEAD = "10.213.1.1"
LOST = 60.0  # seconds that a client may have to wait when a machine is lost
PROGRAM = """
import json, os, sys, threading, time
out = os.dup(1)
os.dup2(2, 1)  # for what Ray prints

def tell(answer):
    os.write(out, json.dumps(answer).encode() + b"\\n")

import httpx, ray
from ray import serve
from outrider.serve.ray import deployment
options, body, expected = map(json.loads, sys.argv[2:])
ray.init(sys.argv[1] + ":6380", _node_ip_address=sys.argv[1], log_to_driver=False)
serve.start(http_options={"port": 8200})
serve.run(deployment("builtin-draft", max_model_len=512, threads=1, **options))
tell("ready")

def ask():
    text, began = "", time.monotonic()
    try:
        with httpx.stream("POST", "http://127.0.0.1:8200/v1/completions", json=body, timeout=200) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line[6:])
                    text += part["choices"][0]["text"] if "choices" in part else line
    except Exception as error:
        text += repr(error)
    tell([text == expected, time.monotonic() - began, text[-300:]])

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
tell(None)
"""
PARAMS = {"ignore_eos": True, "temperature": 0.8, "seed": 3, "max_tokens": 200}
BODY = {"prompt": "The future of AI is", "stream": True, **PARAMS}
PLACE = {"num_cpus": 0, "resources": {"place": 1}}
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",  # of five checks, after which Ray gives a machine up
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
pytestmark = [no_namespaces, pytest.mark.full, pytest.mark.timeout(400)]
# Ray's default folder, one for each machine
OWN_FILES = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'


@pytest.fixture(autouse=True)
def address() -> Iterator[None]:
    """Removes the address of the head, which is killed: otherwise later calls of ray.init would use it."""
    yield
    Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)


def cluster(machines: Machines, *places: int) -> None:
    """Start Ray on machines that have room for so many ranks.  Machine 0 is the head."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--block", "--object-store-memory=80000000"]
    for machine, count in enumerate(places):
        own = [*command, f'--resources={{"place": {count}}}']
        if machine == 0:
            own += ["--head", f"--node-ip-address={HEAD}", "--port=6380", "--num-cpus=0"]
            first = machines.start(0, [*own, "--include-dashboard=false"], **ENVIRONMENT)
            assert first.stdout is not None
            assert any("block forever" in line for line in first.stdout), first.communicate()
        else:
            own += [f"--address={HEAD}:6380", f"--node-ip-address=10.213.{machine}.2", "--num-cpus=1"]
            machines.start(machine, ["sh", "-c", OWN_FILES, "sh", *own], **ENVIRONMENT)


class Clients:
    """A program on the first machine that starts replicas and asks them until told to end."""

    def __init__(self, machines: Machines, expected: str, **options: Any) -> None:
        given = [json.dumps(each) for each in (options, BODY, expected)]
        self.program = machines.start(0, [sys.executable, "-c", PROGRAM, HEAD, *given], **ENVIRONMENT)
        assert self.program.stdout is not None and self.program.stdin is not None
        assert self.program.stdout.readline() == '"ready"\n', self.program.communicate()
        self.seconds = list[float]()

    def read(self, count: int) -> None:
        """Check so many answers, or those that are left."""
        for line in itertools.islice(self.program.stdout, count):
            if (answer := json.loads(line)) is None:
                return
            right, seconds, text = answer
            assert right, text
            self.seconds.append(seconds)

    def end(self) -> None:
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        self.read(100_000)
        print(sorted(self.seconds))
        assert max(self.seconds) < LOST


def lose_power(machines: Machines, machine: int) -> None:
    machines.kill(machine)


def lose_network(machines: Machines, machine: int) -> None:
    ip(f"-n {machines.names[machine]} link set eth0 down")


def processes(machines: Machines, name: str) -> list[int]:
    """How many processes on each machine have a title that contains a name."""

    def titled(pid: int) -> bool:
        with contextlib.suppress(OSError):  # it has ended
            return name in Path(f"/proc/{pid}/cmdline").read_text()
        return False

    return [sum(map(titled, machines.running(machine))) for machine in range(len(machines.names))]


def offline(**options: Any) -> str:
    """The text of BODY."""
    llm = LLM("builtin-draft", max_model_len=512, **options)
    return llm.generate([BODY["prompt"]], SamplingParams(**PARAMS))[0].outputs[0].text


@pytest.mark.parametrize("lose", [lose_power, lose_network])
def test_a_lost_machine_with_replicas_changes_no_text(
    machines: Callable[[int], Machines], lose: Callable[[Machines, int], None]
) -> None:
    two = machines(2)
    cluster(two, 1, 2)
    clients = Clients(two, offline(), replicas=3, actor=PLACE)
    clients.read(20)
    assert processes(two, ":Model") == [1, 2]
    lose(two, 1)
    clients.read(20)
    clients.end()


@pytest.mark.parametrize(
    ("lose", "layout"),
    [
        (lose_power, {"tensor_parallel_size": 2}),
        (lose_network, {"tensor_parallel_size": 2}),
        (lose_power, {"pipeline_parallel_size": 2}),
        (lose_network, {"pipeline_parallel_size": 2}),
    ],
)
def test_a_lost_machine_with_a_rank_changes_no_text(
    machines: Callable[[int], Machines], lose: Callable[[Machines, int], None], layout: dict[str, int]
) -> None:
    """Ray places the ranks anew, on the two machines that are left of three."""
    three = machines(3)
    cluster(three, 1, 1, 1)
    clients = Clients(three, offline(**layout), placement="STRICT_SPREAD", actor=PLACE, **layout)
    clients.read(5)
    used = [sum(pair) for pair in zip(processes(three, ":Model"), processes(three, "ray::rank"))]
    assert sorted(used) == [0, 1, 1]
    lost = 2 if used[2] else 1
    lose(three, lost)
    clients.read(5)
    clients.end()
    ranks = processes(three, "ray::rank")
    assert sum(ranks) - ranks[lost] == 1


def test_stages_have_machines_of_their_own_and_one_that_is_lost_changes_no_text(
    machines: Callable[[int], Machines],
) -> None:
    """Two ranks share the layers of a stage, and two stages divide them."""
    three, layout = machines(3), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    cluster(three, 2, 2, 2)
    clients = Clients(three, offline(**layout), placement="PACK", actor=PLACE, **layout)
    clients.read(5)
    places = [processes(three, name) for name in (":Model", "ray::rank 1", "ray::rank 2", "ray::rank 3")]
    assert places[0] == places[1] != places[2] == places[3]
    lost = 2 if places[0][2] or places[2][2] else 1
    lose_network(three, lost)
    clients.read(5)
    clients.end()
    ranks = processes(three, "ray::rank")
    assert sum(ranks) - ranks[lost] == 3
