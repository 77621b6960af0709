"""Ranks on several machines, here network namespaces: torchrun starts them; their network may be lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import Machines, ip, no_namespaces
from patience import HANG

from outrider import LLM, SamplingParams

PROGRAM = """
import sys
from outrider import LLM, SamplingParams
from outrider.parallel import start
start.LOST = 3.0  # the others give up before rank 0 does, which has to say why
llm = LLM(sys.argv[1], **{sys.argv[2]: int(sys.argv[3])})
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
print("ready", flush=True)
while True:
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
"""
ANSWERS = """
import sys
from outrider import LLM, SamplingParams
divided = {"tensor_parallel_size": 2}, {"draft_tensor_parallel_size": 2}
apart = {"pipeline_parallel_size": 2, "pipeline_layers": "0,4"}, {}
layout, draft = divided if sys.argv[2] == "divided" else apart
llm = LLM(sys.argv[1], **layout, speculative_config={"model": sys.argv[1], **draft})
params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0]
print(output.speculation.accepted > 0, list(output.outputs[0].token_ids), flush=True)
"""
pytestmark = no_namespaces


def run(several: Machines, rank: int, model: str, divided: str) -> subprocess.Popen[str]:
    """The program, as rank `rank` on machine `rank`."""
    size = str(len(several.names))
    given = {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "10.213.1.1", "MASTER_PORT": "29711"}
    return several.start(rank, [sys.executable, "-c", PROGRAM, model, divided, size], **given)


LOST = {  # what is divided, ranks, what cuts the network, error of rank 0
    "to rank 0": ("pipeline", 2, "-n {0} link set to1 down", "rank 1 has not answered"),
    "to rank 0, sums": ("tensor", 2, "-n {0} link set to1 down", "rank 1 has not answered"),
    "between others": ("pipeline", 3, "-n {1} route replace blackhole 10.213.2.0/24", "no rank has got on"),
}


@pytest.mark.full
@pytest.mark.parametrize(("divided", "ranks", "cut", "text"), LOST.values(), ids=[*LOST])
def test_a_lost_network_ends_all_ranks(
    machines: Callable[[int], Machines], model: str, divided: str, ranks: int, cut: str, text: str
) -> None:
    several = machines(ranks)
    first, *others = [run(several, rank, model, f"{divided}_parallel_size") for rank in range(ranks)]
    assert first.stdout is not None and first.stdout.readline() == "ready\n"
    ip(cut.format(*several.names))
    _, messages = first.communicate(timeout=HANG)
    assert f"RankError: {text}" in messages and first.returncode == 1, messages[-500:]
    for other in others:
        other.communicate(timeout=HANG)
        assert other.returncode is not None


def torchrun(several: Machines, *words: str) -> list[subprocess.Popen[str]]:
    """A program of one process on each machine, as docs/scale.md starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    place = ["--nnodes", str(len(several.names)), "--master-addr", "10.213.1.1", "--master-port", "29712"]
    return [
        several.start(i, [*command, *place, "--node-rank", str(i), *words]) for i in range(len(several.names))
    ]


@pytest.mark.full
@pytest.mark.parametrize("draft", ["divided", "apart"])
def test_torchrun_on_two_machines_gives_the_tokens_of_one(
    machines: Callable[[int], Machines], model: str, tmp_path: Path, draft: str
) -> None:
    """With a draft that is divided over both, as the target is; or on one, with the target on the other."""
    two, program = machines(2), tmp_path / "answers.py"
    program.write_text(ANSWERS)
    started = torchrun(two, str(program), model, draft)
    found = [process.communicate(timeout=2 * HANG) for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    llm = LLM(model, tensor_parallel_size=2 if draft == "divided" else 1)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
    assert [text for text, _ in found] == [f"True {list(output.outputs[0].token_ids)}\n", ""]


STREAM = """
import json, time, httpx
url, body = "http://127.0.0.1:8200", {"prompt": "The", "ignore_eos": True, "seed": 3, "temperature": 0.8}
client, deadline = httpx.Client(timeout=100), time.monotonic() + 100
def ready():
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
while not ready() and time.monotonic() < deadline:
    time.sleep(0.1)
answer = client.post(f"{url}/v1/completions", json={**body, "max_tokens": 24}).json()
print(json.dumps(answer["choices"][0]["text"]), flush=True)
long = {**body, "max_tokens": 900, "stream": True}
with client.stream("POST", f"{url}/v1/completions", json=long) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.mark.full
def test_a_server_on_two_machines_ends_its_requests_when_their_network_is_lost(
    machines: Callable[[int], Machines],
) -> None:
    two = machines(2)
    command = ["-m", "outrider", "serve", "builtin-draft", "-tp", "2", "--port", "8200"]
    first, other = torchrun(two, *command)
    client = two.start(0, [sys.executable, "-c", STREAM])
    assert client.stdout is not None
    params = SamplingParams(ignore_eos=True, temperature=0.8, seed=3, max_tokens=24)
    (output,) = LLM("builtin-draft", tensor_parallel_size=2).generate(["The"], params)
    assert json.loads(client.stdout.readline()) == output.outputs[0].text
    for _ in range(20):
        assert client.stdout.readline()
    ip(f"-n {two.names[0]} link set to1 down")
    events, _ = client.communicate(timeout=HANG)
    assert "rank 1 has not answered" in events, events[-500:]
    assert all(process.communicate(timeout=HANG) and process.returncode for process in (first, other))
