"""Ranks that differ, die or freeze: one clear error within seconds, and no process is left."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import token_prompts
from patience import HANG

from outrider import LLM, ConfigError, SamplingParams
from outrider.errors import RankError
from outrider.parallel import group, messages, start
from outrider.parallel.layout import Layout
from outrider.testing import random_prompts

LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
PROMPTS = token_prompts(random_prompts(2, seed=1))


def processes_of(llm: LLM) -> list[int]:
    """Process ids of the ranks that an engine started, in rank order."""
    return children(llm.engine.decoder.group.ranks.process.pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from outrider.testing import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=2200)


@pytest.fixture
def pair(long_model: str) -> Iterator[LLM]:
    llm = LLM(long_model, pipeline_parallel_size=2)
    launcher = llm.engine.decoder.group.ranks.process
    yield llm
    llm.engine.decoder.close()
    assert launcher.returncode is not None, "a process is left"


SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, SHORT)]


def interrupt(llm: LLM) -> None:
    """Ctrl-C while a command is on its way to the ranks leaves them in step."""
    expected, real, sent = tokens(llm), group.send, list[object]()

    def send(message: object, *connections: Any) -> None:
        real(message, *connections)
        sent.append(message)
        if len(sent) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's workers ignore it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "send", send)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG)
    signal.signal(signal.SIGINT, ignored)
    assert tokens(llm) == expected


def test_ranks_that_were_stopped_together_for_a_while_go_on(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, real, rounds = tokens(pair), group.wait, 0
    watched, pause = threading.Event(), 0.0

    def wait(*given: Any) -> list[Any]:
        """As after Ctrl-Z and fg: time has passed, and no rank has beaten."""
        nonlocal pause, rounds
        rounds += 1
        if rounds == 1:
            pause = 100 * group.SILENCE
            return []
        if rounds > 3:  # the first looks at the ranks after it are over
            watched.set()
        return list(real(*given))

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + pause, sleep=time.sleep)
    monkeypatch.setattr(group, "time", clock)
    monkeypatch.setattr(group, "wait", wait)
    while not watched.wait(0.01):  # pytest's time limit ends it otherwise
        assert pair.engine.decoder.failure is None
    assert tokens(pair) == expected


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_rank_ends_all_requests(pair: LLM, fate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SILENCE", 3.0)
    if fate == signal.SIGKILL:
        interrupt(pair)
    pids = processes_of(pair)
    assert len(pids) == 1 and all(map(alive, pids))
    real, sent = group.send, itertools.count()

    def send(message: object, *connections: Any) -> None:
        real(message, *connections)
        if next(sent) == 5:  # in the midst of the request, however fast it is
            os.kill(pids[0], fate)

    monkeypatch.setattr(group, "send", send)
    with pytest.raises(RankError, match=r"rank 1 has (ended|not answered)") as raised:
        pair.generate(PROMPTS, LONG)
    assert "Load the model again" in str(raised.value)
    assert pair.engine.decoder.failure is not None  # without a request, too
    with pytest.raises(RankError, match="rank 1"):  # at once, not after a time limit
        pair.generate(PROMPTS, LONG)
    assert not any(map(alive, pids))
    assert not pair.has_unfinished_requests()


PROGRAM = """
import sys, torch
from outrider import LLM, SamplingParams
from outrider.testing import random_prompts
torch.set_num_threads(1)
tensor, pipeline, *wait = map(int, sys.argv[2:])
llm = LLM(sys.argv[1], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, seed=1)]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
print([list(output.outputs[0].token_ids) for output in outputs], flush=True)
if wait:
    print(llm.engine.decoder.group.ranks.process.pid, flush=True)
    sys.stdin.read()
"""


def run(*given: str, **variables: str) -> subprocess.Popen[str]:
    """PROGRAM with these arguments and environment variables."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "address"),
    [
        (Layout(2), "127.0.0.1"),
        (Layout(2), "::1"),
        (Layout(1, 2), "127.0.0.1"),
        (Layout(2, 2), "127.0.0.1"),
    ],
)
def test_ranks_placed_by_a_launcher_give_the_tokens_of_local_ones(
    long_model: str, layout: Layout, address: str
) -> None:
    """As torchrun starts them, over gloo."""
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(layout.size), "MASTER_ADDR": address, "MASTER_PORT": port}
    given = long_model, str(layout.tensor), str(layout.pipeline)
    processes = [run(*given, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(layout.size)]
    found = [process.communicate()[0] for process in processes]
    local = LLM(long_model, tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
    assert found == [f"{tokens(local)}\n"] + [""] * (layout.size - 1)
    assert [process.returncode for process in processes] == [0] * layout.size


@pytest.mark.full
def test_no_rank_survives_rank_0(long_model: str) -> None:
    """Not even a frozen one."""
    program = run(long_model, "2", "1", "1")
    assert program.stdout is not None
    program.stdout.readline()
    launcher = int(program.stdout.readline())
    (child,) = children(launcher)
    os.kill(child, signal.SIGSTOP)
    program.kill()
    program.communicate()
    deadline = time.monotonic() + HANG
    while alive(launcher) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(launcher) and not alive(child)


ENDING = """
import atexit, os
from outrider.parallel import start
atexit.register(os.abort)  # as threads of torch do, now and then, at the end of the interpreter
start.run_rank = lambda: print("served")
start.join()
"""


def test_ranks_of_a_launcher_end_with_status_0() -> None:
    """Otherwise torchrun takes the rank for failed, and on other machines waits minutes for it."""
    done = subprocess.run([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, "served\n")


def test_differences_are_named() -> None:
    own = {"torch": "2.13", "outrider": "1.0"}
    messages.check_same(1, own, own)
    with pytest.raises(
        ConfigError, match=r"rank 3 differs from rank 0: torch is '2.9', and '2.13' on rank 0"
    ):
        messages.check_same(3, {"torch": "2.9", "outrider": "1.0"}, own)


def test_a_rank_with_another_version_is_refused_and_ends(
    long_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[start.Local](), start.Local
    monkeypatch.setattr(start, "Local", lambda *given: made.append(real(*given)) or made[0])
    monkeypatch.setattr(group, "versions", lambda: {"outrider": "0.0"})
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0: outrider is"):
        LLM(long_model, pipeline_parallel_size=2)
    assert made[0].process.returncode is not None


def test_a_launcher_with_another_number_of_processes_is_refused(
    long_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"started 3 processes \(WORLD_SIZE\).* is 2"):
        LLM(long_model, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tensor_parallel_size": 3},
            "does not divide 4 attention heads with 2 K/V heads: choose one of 1, 2, 4",
        ),
        ({"pipeline_parallel_size": 3}, "more than the 2 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "2,1"}, "2,1 are 3 layers, and the model has 2"),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": "2"},
            "pipeline_parallel_size, 2, such as 8,8: got",
        ),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "-1,3"}, "such as 8,8: got '-1,3'"),
        ({"pipeline_layers": "0,2"}, "pipeline_parallel_size, 1, such as 8: got '0,2'"),
        ({"tensor_parallel_size": 2, "gpu_layers": 1}, "gpu_layers"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    long_model: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(long_model, **options)


def test_models_outside_the_lean_decoder_are_refused(tmp_path: Path) -> None:
    from outrider.testing import bare_checkpoint

    with pytest.raises(ConfigError, match="GPT2LMHeadModel runs in one process"):
        LLM(str(bare_checkpoint(tmp_path, "GPT2")), tensor_parallel_size=2)


@pytest.mark.full
def test_a_file_that_is_missing_on_a_rank_is_its_error(
    long_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of the other ranks lies elsewhere: on another machine, it may not be there at all."""
    real = messages.Setup.of
    monkeypatch.setattr(messages.Setup, "of", lambda *given: replace(real(*given), model="/nowhere"))
    with pytest.raises(Exception, match="rank 1: there is no checkpoint folder '/nowhere'"):
        LLM(long_model, pipeline_parallel_size=2)


def test_layout_splits() -> None:
    layout = Layout(2, 2)
    assert [(layout.stage(r), layout.index(r)) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layout.layers(5) == [range(2), range(2, 5)]
    assert [layout.stage_of(i, 5) for i in range(6)] == [0, 0, 1, 1, 1, 1]
    uneven = Layout.of(1, 3, "0, 3,2")
    assert uneven.layers(5) == [range(0), range(3), range(3, 5)] and uneven.even == Layout(1, 3)
    assert [uneven.stage_of(i, 5) for i in range(6)] == [1, 1, 1, 2, 2, 2]
