"""The server with every kind of drafting, and llama-server beside it, under closed and open loops.

    python benchmarks/serving.py --json OUT                          all loads and ways, 25 minutes
    python benchmarks/serving.py --parts 0.5 --rounds 1 --seconds 10 --json OUT          in 10 minutes
    python benchmarks/serving.py --clients 1 16 --parts 0.5 --ways plain auto --json OUT
    python benchmarks/serving.py --clients 16 --parts --ways plain …  beside the offline API, in 4 minutes
    python benchmarks/serving.py --beside vLLM=http://127.0.0.1:8001 …                   any other server
    python benchmarks/serving.py --gguf DIR/target-bf16.gguf …       llama-server, too: OUTRIDER_LLAMA_CPP, or
                                   OUTRIDER_LLAMA_CPP_PYTHON, an interpreter with the wheel xllamacpp

All servers run at once, each round of a load takes them in turn, and idle ones take no processor.  Rates of
the open loop (Poisson arrivals) are parts of what the plain server completes with 16 clients.  At the end,
plain serving of 16 clients takes turns with the offline API on the same requests.

Our own servers also have their CPU time a token, of all processes and threads, and "of plain" how much of it
plain serving takes, as the median of the rounds: above 1 is better than plain.  Compare by it on a busy
machine, with OMP_NUM_THREADS=1, since threads that wait for each other spin, and many short rounds.  HTTP is
the thread with the event loop.
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
from command_line import parser_of, settings, write
from serve import HEADER, QUESTIONS, Load, Sent, figures, length_of, line, prompt_of

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from served import served

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions

WAYS: dict[str, Any] = {
    "plain": {"method": "off"},
    "n-gram": {"method": "ngram"},
    "draft": {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 3},
    "auto": {"method": "auto", "model": "builtin-draft"},
}
CLIENTS, PARTS = (1, 4, 16, 64), (0.3, 0.7)  # clients of the closed loop, parts of the rate of the open one
BATCH = 16  # clients beside the offline API
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


@dataclass
class Bench:
    """Servers under load.  pids: label -> process, of our own servers."""

    given: argparse.Namespace
    urls: dict[str, str]
    pids: dict[str, int]
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
        sent = {label: Sent(self.pids.get(label)) for label in self.urls}
        costs: dict[str, list[float]] = {label: [] for label in self.pids}  # CPU time a token, by round
        for _ in range(self.given.rounds):
            first = next(self.numbers)
            for label in self.urls:
                own = Sent(self.pids.get(label))
                asyncio.run(own.run(self.load(label, first, **load)))
                sent[label].add(own)
                if label in costs:
                    costs[label].append(own.microseconds(own.cpu_seconds) or math.nan)
        for label, each in sent.items():
            found = {"label": label, "clients": None, "rate": None, **load, **figures(each)}
            found["cpu_us_by_round"] = costs.get(label)
            ratios = [plain / cost for plain, cost in zip(costs["plain"], costs.get(label, ()))]
            found["of_plain_by_cpu"] = median(ratios) if ratios else None
            self.results.append(found)
            ratio = f"{found['of_plain_by_cpu']:.3f} of plain" if found["of_plain_by_cpu"] else ""
            print(f"{label:>12} {line(found)}  {ratio}", flush=True)

    def run(self) -> None:
        print(" " * 12, HEADER)
        for clients in self.given.clients:
            self.one(clients=clients)
        plain = [each for each in self.results if each["label"] == "plain"]
        most = max(each["requests_per_second"] for each in plain if each["clients"] <= BATCH)
        for part in self.given.parts:
            self.one(rate=round(part * most, 2))

    def offline(self, threads: int) -> dict[str, Any]:
        """The plain server with BATCH clients beside the offline API on the same requests, by both clocks."""
        given, count = self.given, 4 * BATCH
        torch.set_num_threads(threads)
        llm = LLM(given.model, speculative_config={"method": "off"}, max_num_seqs=BATCH, max_model_len=LENGTH)
        rates: dict[str, list[float]] = {"served": [], "offline": [], "ratio": [], "ratio_by_cpu": []}
        for _ in range(1 + given.offline):
            sent, first = Sent(self.pids["plain"]), next(self.numbers)
            asyncio.run(sent.run(self.load("plain", first, clients=BATCH, requests=count, seconds=None)))
            found = figures(sent)
            rate, cpu_rate = self.generated(llm, range(first, first + count))
            ratios = found["tokens_per_second"] / rate, 1e6 / found["cpu_us_per_token"] / cpu_rate
            for name, value in zip(rates, (found["tokens_per_second"], rate, *ratios)):
                rates[name].append(value)
        middle = {name: median(values[1:]) for name, values in rates.items()}
        ratio = f"{middle['ratio']:.3f} of the offline API, {middle['ratio_by_cpu']:.3f} by CPU time"
        print(f"{middle['served']:.0f} tokens/s of {BATCH} clients, {ratio}", flush=True)
        return {"median": middle, **{name: values[1:] for name, values in rates.items()}}

    def generated(self, llm: LLM, numbers: Sequence[int]) -> tuple[float, float]:
        """Tokens of the offline API on these requests, by second and by second of CPU time."""
        prompts = [prompt_of(self.questions, i) for i in numbers]
        mean, own = self.given.max_tokens, {"temperature": self.given.temperature, "ignore_eos": True}
        params = [SamplingParams(seed=i, max_tokens=length_of(mean, i), **own) for i in numbers]
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens / seconds, tokens / cpu_seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    parser.add_argument("--gguf", type=Path, help="the same model for llama-server")
    parser.add_argument("--beside", nargs="*", default=[], metavar="LABEL=URL", help="servers that run")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, help="of the closed loop")
    parser.add_argument("--parts", type=float, nargs="*", default=PARTS, help="of that rate, open loop")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="of sending, for each round and server")
    parser.add_argument("--offline", type=int, default=3, help="rounds beside the offline API; 0: none")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
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
            server = stack.enter_context(served(*options, *config, environment={"OMP_NUM_THREADS": threads}))
            bench.urls[label], bench.pids[label] = server.url, server.process.pid
        bench.urls |= dict(each.split("=", 1) for each in given.beside)
        if given.gguf:
            bench.urls["llama-server"] = stack.enter_context(llama_server(given.gguf, slots))
        bench.run()
        offline = bench.offline(int(threads)) if given.offline else None
    result = {"results": bench.results, "beside the offline API": offline}
    write(given.json, {**conditions(), **settings(given, "gguf"), **result})


if __name__ == "__main__":
    main()
