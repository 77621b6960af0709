"""Ranks on several machines, here network namespaces: torchrun starts them; their network may be lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from patience import HANG

from outrider import LLM, SamplingParams

PROGRAM = """
import sys
from outrider import LLM, SamplingParams
llm = LLM(sys.argv[1], pipeline_parallel_size=int(sys.argv[2]))
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
print("ready", flush=True)
while True:
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
"""
ANSWERS = """
import sys
from outrider import LLM, SamplingParams
draft = {"model": sys.argv[1], "draft_tensor_parallel_size": 2}
llm = LLM(sys.argv[1], tensor_parallel_size=2, speculative_config=draft)
params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0]
print(output.speculation.accepted > 0, list(output.outputs[0].token_ids), flush=True)
"""
pytestmark = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip"
)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=HANG)


class Machines:
    """Network namespaces: machine 0, which forwards, and a link from it to each of the others."""

    def __init__(self, name: str, count: int) -> None:
        self.names = [f"{name}m{i}" for i in range(count)]
        self.processes: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        for name in self.names:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        first = self.names[0]
        for i, name in enumerate(self.names[1:], start=1):
            ip(f"-n {first} link add to{i} type veth peer name eth0 netns {name}")
            ip(f"-n {first} addr add 10.213.{i}.1/24 dev to{i}")
            ip(f"-n {first} link set to{i} up")
            ip(f"-n {name} addr add 10.213.{i}.2/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} route add default via 10.213.{i}.1")
        ip(f"netns exec {first} sysctl -q -w net.ipv4.ip_forward=1")

    def run(self, rank: int, model: str) -> subprocess.Popen[str]:
        """The program, as rank `rank` on machine `rank`."""
        size = str(len(self.names))
        given = {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "10.213.1.1", "MASTER_PORT": "29711"}
        return self.start(rank, [sys.executable, "-c", PROGRAM, model, size], **given)

    def start(self, machine: int, command: Sequence[str], **given: str) -> subprocess.Popen[str]:
        """A command on a machine, with more environment variables."""
        pipe, env = subprocess.PIPE, {**os.environ, **given}
        command = ["ip", "netns", "exec", self.names[machine], *command]
        process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def machines() -> Iterator[Callable[[int], Machines]]:
    made = list[Machines]()

    def make(count: int) -> Machines:
        made.append(Machines(f"outr{os.getpid()}", count))
        try:
            made[0].connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr!r}")
        return made[0]

    yield make
    for each in made:
        each.end()


LOST = [  # ranks, what cuts the network, error of rank 0
    (2, "-n {0} link set to1 down", "rank 1 has not answered"),
    (3, "-n {1} route replace blackhole 10.213.2.0/24", "no rank has got on"),
]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "cut", "text"), LOST, ids=["to rank 0", "between others"])
def test_a_lost_network_ends_all_ranks(
    machines: Callable[[int], Machines], model: str, ranks: int, cut: str, text: str
) -> None:
    several = machines(ranks)
    first, *others = [several.run(rank, model) for rank in range(ranks)]
    assert first.stdout is not None and first.stdout.readline() == "ready\n"
    ip(cut.format(*several.names))
    _, messages = first.communicate(timeout=HANG)
    assert f"RankError: {text}" in messages and first.returncode == 1
    for other in others:
        other.communicate(timeout=HANG)
        assert other.returncode is not None


@pytest.mark.full
def test_torchrun_on_two_machines_gives_the_tokens_of_one(
    machines: Callable[[int], Machines], model: str, tmp_path: Path
) -> None:
    """With a draft that is divided over both."""
    two, program = machines(2), tmp_path / "answers.py"
    program.write_text(ANSWERS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    place = ["--master-addr", "10.213.1.1", "--master-port", "29712"]
    started = [
        two.start(i, [*torchrun, *place, "--node-rank", str(i), str(program), model]) for i in range(2)
    ]
    found = [process.communicate(timeout=2 * HANG) for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    (output,) = LLM(model, tensor_parallel_size=2).generate({"prompt_token_ids": [5, 6, 7]}, params)
    assert [text for text, _ in found] == [f"True {list(output.outputs[0].token_ids)}\n", ""]
