"""Machines of a network, here network namespaces: their processes, and links that a test may cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest
from patience import HANG

no_namespaces = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip"
)


def ip(words: str) -> str:
    """The output of a command of `ip`."""
    done = subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=HANG, text=True)
    return done.stdout


class Machines:
    """Network namespaces: machine 0, which forwards, and a link from it to each of the others.

    Machine i has the address 10.213.i.2 in the network of its link, and machine 0 has 10.213.i.1.
    """

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

    def start(self, machine: int, command: Sequence[str], **given: str) -> subprocess.Popen[str]:
        """A command on a machine, with more environment variables."""
        pipe, env = subprocess.PIPE, {**os.environ, **given}
        command = ["ip", "netns", "exec", self.names[machine], *command]
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.processes.append(process)
        return process

    def running(self, machine: int) -> list[int]:
        """Ids of the processes on a machine."""
        return [int(pid) for pid in ip(f"netns pids {self.names[machine]}").split()]

    def kill(self, machine: int) -> None:
        """End a machine's processes, as when its power fails."""
        while pids := self.running(machine):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for machine, name in enumerate(self.names):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                self.kill(machine)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines() -> Iterator[Callable[[int], Machines]]:
    """`machines(count)`: so many, connected."""
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
