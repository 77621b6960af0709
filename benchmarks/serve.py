"""Load on a running server with OpenAI's completions: closed loop (n clients) or open (Poisson).

    outrider serve builtin --port 8000 &
    python benchmarks/serve.py --url http://127.0.0.1:8000 --clients 1 4 16 64
    python benchmarks/serve.py --url http://127.0.0.1:8000 --rate 2 8 --requests 200

The server may be any that streams /v1/completions: outrider, llama-server, vLLM.  With `--pid`, its process,
figures have its CPU time a token, which other programs on the machine hardly change.  Each prompt has two of
the questions of `--questions` behind its number: no request repeats another.  Requests ask for half to three
halves of `--max-tokens` tokens, as answers differ in length, and do not end earlier where ignore_eos is
known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from client import Answer, Connections
from cpu_time import first_thread_seconds, process_seconds

QUESTIONS = Path(__file__).parent / "questions.jsonl"
WARM_UP = range(1_000_000, 1_000_002)  # numbers of requests


@dataclass(frozen=True)
class Load:
    """One measurement.  clients: closed loop; rate: open loop, requests per second.

    first: number of the first request, which its prompt and seed depend on.
    seconds: no further request is sent after these; None: until `requests` have been.
    """

    url: str
    model: str
    questions: Sequence[str]
    requests: int
    max_tokens: int
    temperature: float
    first: int = 0
    clients: int | None = None
    rate: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def numbers(self) -> Iterator[int]:
        """Numbers of the requests, as long as one may be sent."""
        began = time.perf_counter()
        for i in range(self.first, self.first + self.requests):
            if self.seconds is not None and time.perf_counter() - began > self.seconds:
                return
            yield i

    def body(self, i: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_of(self.questions, i),
            "max_tokens": length_of(self.max_tokens, i),
            "temperature": self.temperature,
            "seed": i,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self.extra,
        }


def prompt_of(questions: Sequence[str], i: int) -> str:
    """Prompt of request i: an own beginning, and two questions."""
    return "\n".join([f"Request {i}.", *random.Random(i).sample(questions, 2)])


def length_of(mean: int, i: int) -> int:
    """Tokens of answer i.  With one length for all, clients would ask and prompts be computed in step."""
    return random.Random(i).randint(mean // 2, mean + mean // 2)


async def closed(load: Load, one: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """Each of n clients sends its next request when the one before has ended."""
    numbers, answers = load.numbers(), []

    async def client() -> None:
        for i in numbers:
            answers.append(await one(i))

    await asyncio.gather(*(client() for _ in range(load.clients or 1)))
    return answers


async def opened(load: Load, one: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """Requests arrive at random, whether or not others have ended."""
    rng, tasks = random.Random(load.first), []
    for i in load.numbers():
        tasks.append(asyncio.create_task(one(i)))
        await asyncio.sleep(rng.expovariate(load.rate or 1.0))
    return list(await asyncio.gather(*tasks))


@dataclass
class Sent:
    """Answers of one load, of several runs of it, too.

    pid: of the server, on this machine; None: its CPU time is not measured.
    cpu_seconds: CPU time of its process and children; http_seconds: of the thread with the event loop.
    """

    pid: int | None = None
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    http_seconds: float = 0.0

    def add(self, other: Sent) -> None:
        self.answers += other.answers
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.http_seconds += other.http_seconds

    async def run(self, load: Load) -> None:
        """Send the requests of a load, after two that warm up."""
        connections = Connections(load.url)

        async def one(i: int) -> Answer:
            return await connections.ask(load.body(i))

        for i in WARM_UP:
            await one(i)
        self._count(-1)
        self.answers += await (opened if load.rate else closed)(load, one)
        self._count(1)
        connections.close()

    def _count(self, sign: int) -> None:
        """Add the clocks' times, or take them off."""
        self.seconds += sign * time.perf_counter()
        if self.pid is not None:
            self.cpu_seconds += sign * process_seconds(self.pid)
            self.http_seconds += sign * first_thread_seconds(self.pid)

    def microseconds(self, seconds: float) -> float | None:
        """Of the server, per emitted token; None without its process."""
        tokens = sum(answer.tokens for answer in self.answers)
        return 1e6 * seconds / tokens if self.pid is not None and tokens else None


def figures(sent: Sent) -> dict[str, Any]:
    """Throughput, CPU time, and percentiles in milliseconds: to the first token, mean time between tokens."""
    good = [answer for answer in sent.answers if answer.error is None and answer.tokens > 1]
    firsts = [1000 * answer.first for answer in good]
    gaps = [1000 * (answer.ended - answer.first) / (answer.tokens - 1) for answer in good]
    return {
        "requests_per_second": len(good) / sent.seconds,
        "tokens_per_second": sum(answer.tokens for answer in good) / sent.seconds,
        "tokens": sum(answer.tokens for answer in good),
        "errors": len(sent.answers) - len(good),
        **{f"ttft_p{p}": percentile(firsts, p) for p in (50, 95, 99)},
        **{f"tpot_p{p}": percentile(gaps, p) for p in (50, 95, 99)},
        "tpot_mean": mean(gaps) if gaps else None,
        "cpu_us_per_token": sent.microseconds(sent.cpu_seconds),
        "http_us_per_token": sent.microseconds(sent.http_seconds),
    }


def percentile(values: Sequence[float], p: float) -> float | None:
    """The smallest value that p percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] if ordered else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one that the server names")
    parser.add_argument("--clients", type=int, nargs="*", default=[])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests per second")
    parser.add_argument("--requests", type=int, help="default: 8 for each client, 100 for a rate")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of each body, as JSON")
    parser.add_argument("--pid", type=int, help="process of the server, for its CPU time")
    parser.add_argument("--label", default="", help="name of the server in the results")
    parser.add_argument("--out", type=Path, help="append the results to this file, one JSON object a line")
    given = parser.parse_args()
    model = given.model or httpx.get(f"{given.url}/v1/models").json()["data"][0]["id"]
    questions = [json.loads(line)["turns"][0] for line in given.questions.read_text().splitlines()]
    loads: list[tuple[int | None, float | None]] = [
        (n, None) for n in given.clients or ([] if given.rate else [1])
    ]
    loads += [(None, rate) for rate in given.rate]
    print(HEADER)
    for clients, rate in loads:
        count = given.requests or (8 * clients if clients else 100)
        load = Load(
            given.url,
            model,
            questions,
            count,
            given.max_tokens,
            given.temperature,
            0,
            clients,
            rate,
            given.extra,
        )
        sent = Sent(given.pid)
        asyncio.run(sent.run(load))
        found = {"clients": clients, "rate": rate, **figures(sent)}
        print(line(found), flush=True)
        if given.out is not None:
            settings = {key: value for key, value in asdict(load).items() if key not in ("questions", "url")}
            with given.out.open("a") as file:
                file.write(json.dumps({"label": given.label, **settings, **found}) + "\n")


HEADER = (
    "       load   req/s  tokens/s    TTFT p50/p95/p99 ms        TPOT p50/p95/p99 ms    errors   CPU  HTTP"
)


def line(found: dict[str, Any]) -> str:
    """Figures as a row below HEADER.  CPU and HTTP: microseconds of the server a token."""
    name = f"{found['clients']} clients" if found["clients"] else f"{found['rate']}/s"

    def three(kind: str) -> str:
        return " / ".join(f"{found[f'{kind}_p{p}'] or 0:6.1f}" for p in (50, 95, 99))

    speed = f"{found['requests_per_second']:7.2f} {found['tokens_per_second']:9.1f}"
    spent = " ".join(f"{found[f'{kind}_us_per_token'] or math.nan:5.0f}" for kind in ("cpu", "http"))
    return f"{name:>11} {speed}   {three('ttft')}   {three('tpot')}   {found['errors']:4} {spent}"


if __name__ == "__main__":
    main()
