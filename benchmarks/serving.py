"""The server with every kind of drafting, and llama-server beside it, under closed and open loops.

    python benchmarks/serving.py --json OUT                          all loads and ways, 25 minutes
    python benchmarks/serving.py --parts 0.5 --rounds 1 --seconds 10 --json OUT          in 10 minutes
    python benchmarks/serving.py --clients 1 16 --parts 0.5 --ways plain auto --json OUT
    python benchmarks/serving.py --beside vLLM=http://127.0.0.1:8001 …                   any other server
    python benchmarks/serving.py --gguf DIR/target-bf16.gguf …       llama-server, too: OUTRIDER_LLAMA_CPP, or
                                   OUTRIDER_LLAMA_CPP_PYTHON, an interpreter with the wheel xllamacpp

All servers run at once, each round of a load takes them in turn, and idle ones take no processor.  Rates of
the open loop (Poisson arrivals) are parts of what the plain server completes with 16 clients.  The CPU time
of HTTP is that of the thread with the event loop.  At the end, plain serving of 16 clients takes turns with
the offline API on the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from core import conditions
from serve import QUESTIONS, Load, Sent, figures, length_of, line, prompt_of

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from served import Served, served

from outrider import LLM, SamplingParams

WAYS: dict[str, Any] = {
    "plain": {"method": "off"},
    "n-gram": {"method": "ngram"},
    "draft": {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 3},
    "auto": {"method": "auto", "model": "builtin-draft"},
}
CLIENTS, PARTS = (1, 4, 16, 64), (0.3, 0.7)  # clients of the closed loop, parts of the rate of the open one
BATCH, ROUNDS = 16, 4  # clients beside the offline API, and rounds after one that warms up
LENGTH = 1024  # tokens of a request at most
MANY = 1000  # more requests than a round sends


@contextmanager
def llama_server(gguf: Path, slots: int) -> Iterator[str]:
    """A llama-server on a free port, yielded as its address."""
    program = [str(Path(os.environ.get("OUTRIDER_LLAMA_CPP", ""), "llama-server"))]
    if python := os.environ.get("OUTRIDER_LLAMA_CPP_PYTHON"):
        program = [python, str(Path(__file__).with_name("llama_server.py"))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    command = [*program, "-m", str(gguf), "--port", str(port), "-np", str(slots), "-c", str(slots * LENGTH)]
    process = subprocess.Popen(
        [*command, "-t", threads], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"llama-server ended with status {process.returncode}: {command}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def http_seconds(server: Served | None) -> float:
    """CPU time of a server's event loop, which runs in the first thread; nan where /proc does not tell."""
    try:
        assert server is not None
        path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/stat")
        fields = path.read_text().rpartition(")")[2].split()
    except (AssertionError, OSError):
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Bench:
    """Servers under load.  servers: None for a foreign one."""

    given: argparse.Namespace
    urls: dict[str, str]
    servers: dict[str, Served]
    questions: list[str]
    results: list[dict[str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(0, MANY))  # of first requests

    def load(self, label: str, first: int, **more: Any) -> Load:
        url, given = self.urls[label], self.given
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        settings = {"requests": MANY, "seconds": given.seconds, "first": first, **more}
        return Load(
            url, model, self.questions, max_tokens=given.max_tokens, temperature=given.temperature, **settings
        )

    def one(self, **load: Any) -> None:
        """One load: in each round on every server in turn, with the same requests."""
        sent, http = {label: Sent() for label in self.urls}, dict.fromkeys(self.urls, 0.0)
        for _ in range(self.given.rounds):
            first = next(self.numbers)
            for label in self.urls:
                before = http_seconds(self.servers.get(label))
                asyncio.run(sent[label].run(self.load(label, first, **load)))
                http[label] += http_seconds(self.servers.get(label)) - before
        for label in self.urls:
            found = {"label": label, "clients": None, "rate": None, **load, **figures(sent[label])}
            found["http_us_per_token"] = 1e6 * http[label] / max(1, found["tokens"])
            self.results.append(found)
            print(f"{label:>12} {line(found)}  {found['http_us_per_token']:5.0f} us HTTP a token", flush=True)

    def run(self) -> None:
        for clients in self.given.clients:
            self.one(clients=clients)
        plain = [each for each in self.results if each["label"] == "plain"]
        most = max(each["requests_per_second"] for each in plain if each["clients"] <= BATCH)
        for part in self.given.parts:
            self.one(rate=round(part * most, 2))

    def offline(self, threads: int) -> dict[str, Any]:
        """Tokens/s of the plain server with BATCH clients, and of the offline API on the same requests."""
        given, count = self.given, 6 * BATCH
        torch.set_num_threads(threads)
        llm = LLM(given.model, speculative_config={"method": "off"}, max_num_seqs=BATCH, max_model_len=LENGTH)
        served, offline = list[float](), list[float]()
        for _ in range(1 + ROUNDS):
            sent, first = Sent(), next(self.numbers)
            asyncio.run(sent.run(self.load("plain", first, clients=BATCH, requests=count, seconds=None)))
            served.append(figures(sent)["tokens_per_second"])
            offline.append(self.generated(llm, range(first, first + count)))
        ratio = median(a / b for a, b in zip(served[1:], offline[1:]))
        print(
            f"{median(served[1:]):.0f} tokens/s of {BATCH} clients, {ratio:.3f} of the offline API",
            flush=True,
        )
        return {"served": served[1:], "offline": offline[1:], "ratio": ratio}

    def generated(self, llm: LLM, numbers: Sequence[int]) -> float:
        """Tokens/s of the offline API on these requests."""
        prompts = [prompt_of(self.questions, i) for i in numbers]
        mean, own = self.given.max_tokens, {"temperature": self.given.temperature, "ignore_eos": True}
        params = [SamplingParams(seed=i, max_tokens=length_of(mean, i), **own) for i in numbers]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    parser.add_argument("--gguf", type=Path, help="the same model for llama-server")
    parser.add_argument("--beside", nargs="*", default=[], metavar="LABEL=URL", help="servers that run")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, help="of the closed loop")
    parser.add_argument("--parts", type=float, nargs="*", default=PARTS, help="of that rate, open loop")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="of sending, for each round and server")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if "plain" not in given.ways or min(given.clients, default=BATCH) > BATCH:
        parser.error(f"the rates of the open loop need the way plain with {BATCH} clients or fewer")
    slots = max(*given.clients, BATCH)
    options = [given.model, "--max-num-seqs", str(slots), "--max-model-len", str(LENGTH)]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    questions = [json.loads(row)["turns"][0] for row in QUESTIONS.read_text().splitlines()]
    bench = Bench(given, {}, {}, questions)
    with ExitStack() as stack:
        for label in given.ways:
            config = ["--speculative-config", json.dumps(WAYS[label])]
            server = served(*options, *config, environment={"OMP_NUM_THREADS": threads})
            bench.servers[label] = stack.enter_context(server)
            bench.urls[label] = bench.servers[label].url
        bench.urls |= dict(each.split("=", 1) for each in given.beside)
        if given.gguf:
            bench.urls["llama-server"] = stack.enter_context(llama_server(given.gguf, slots))
        bench.run()
        offline = bench.offline(int(threads))
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key not in ("json", "gguf")}
        told = {**conditions(), **settings, "results": bench.results, "beside the offline API": offline}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
