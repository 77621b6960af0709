"""Load on a running server with OpenAI's completions: closed loop (n clients) or open (Poisson).

    outrider serve builtin --port 8000 &
    python benchmarks/serve.py --url http://127.0.0.1:8000 --clients 1 4 16 64
    python benchmarks/serve.py --url http://127.0.0.1:8000 --rate 2 8 --requests 200

The server may be any that streams /v1/completions: outrider, llama-server, vLLM.  Prompts are the questions
of `--questions`; every request asks for `--max-tokens` tokens and does not end earlier where ignore_eos is
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

QUESTIONS = Path(__file__).parent / "questions.jsonl"


@dataclass
class Answer:
    """Times of one request, in seconds from its start.  error: what went wrong."""

    began: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """One measurement.  clients: closed loop; rate: open loop, requests per second.

    seconds: no further request is sent after these; None: until `requests` have been.
    """

    url: str
    model: str
    prompts: Sequence[str]
    requests: int
    max_tokens: int
    temperature: float
    seed: int
    clients: int | None = None
    rate: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def numbers(self) -> Iterator[int]:
        """Numbers of the requests, as long as one may be sent."""
        began = time.perf_counter()
        for i in range(self.requests):
            if self.seconds is not None and time.perf_counter() - began > self.seconds:
                return
            yield i

    def body(self, i: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self.prompts[i % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + i,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self.extra,
        }


async def ask(client: httpx.AsyncClient, load: Load, i: int) -> Answer:
    """Send request i and read its stream.  The number of tokens is that of `usage`."""
    answer = Answer(time.perf_counter())
    try:
        async with client.stream("POST", f"{load.url}/v1/completions", json=load.body(i)) as stream:
            if stream.status_code != 200:
                answer.error = f"status {stream.status_code}"
                return answer
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    answer.error = str(chunk["error"])
                if chunk.get("choices") and not answer.first:
                    answer.first = time.perf_counter() - answer.began
                if chunk.get("usage"):
                    answer.tokens = chunk["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        answer.error = repr(error)
    answer.ended = time.perf_counter() - answer.began
    return answer


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
    rng, tasks = random.Random(load.seed), []
    for i in load.numbers():
        tasks.append(asyncio.create_task(one(i)))
        await asyncio.sleep(rng.expovariate(load.rate or 1.0))
    return list(await asyncio.gather(*tasks))


async def measure(load: Load) -> dict[str, Any]:
    """Figures of one load, after a short warm-up."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        for i in range(2):
            await ask(client, load, load.requests + i)
        began = time.perf_counter()
        answers = await (opened if load.rate else closed)(load, lambda i: ask(client, load, i))
        seconds = time.perf_counter() - began
    return {**figures(answers, seconds), "clients": load.clients, "rate": load.rate}


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Throughput, and percentiles in milliseconds: to the first token, and mean time between tokens."""
    good = [answer for answer in answers if answer.error is None and answer.tokens > 1]
    firsts = [1000 * answer.first for answer in good]
    gaps = [1000 * (answer.ended - answer.first) / (answer.tokens - 1) for answer in good]
    return {
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(answer.tokens for answer in good) / seconds,
        "tokens": sum(answer.tokens for answer in good),
        "errors": len(answers) - len(good),
        **{f"ttft_p{p}": percentile(firsts, p) for p in (50, 95, 99)},
        **{f"tpot_p{p}": percentile(gaps, p) for p in (50, 95, 99)},
        "tpot_mean": mean(gaps) if gaps else None,
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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of each body, as JSON")
    parser.add_argument("--label", default="", help="name of the server in the results")
    parser.add_argument("--out", type=Path, help="append the results to this file, one JSON object a line")
    given = parser.parse_args()
    model = given.model or httpx.get(f"{given.url}/v1/models").json()["data"][0]["id"]
    prompts = [json.loads(line)["turns"][0] for line in given.questions.read_text().splitlines()]
    random.Random(given.seed).shuffle(prompts)
    loads: list[tuple[int | None, float | None]] = [
        (n, None) for n in given.clients or ([] if given.rate else [1])
    ]
    loads += [(None, rate) for rate in given.rate]
    print("     load   req/s  tokens/s   TTFT p50/p95/p99 ms      TPOT p50/p95/p99 ms   errors")
    for clients, rate in loads:
        count = given.requests or (8 * clients if clients else 100)
        load = Load(
            given.url,
            model,
            prompts,
            count,
            given.max_tokens,
            given.temperature,
            given.seed,
            clients,
            rate,
            given.extra,
        )
        found = asyncio.run(measure(load))
        print(line(found), flush=True)
        if given.out is not None:
            settings = {key: value for key, value in asdict(load).items() if key not in ("prompts", "url")}
            with given.out.open("a") as file:
                file.write(json.dumps({"label": given.label, **settings, **found}) + "\n")


def line(found: dict[str, Any]) -> str:
    name = f"{found['clients']} clients" if found["clients"] else f"{found['rate']}/s"

    def three(kind: str) -> str:
        return " / ".join(f"{found[f'{kind}_p{p}'] or 0:6.1f}" for p in (50, 95, 99))

    speed = f"{found['requests_per_second']:7.2f} {found['tokens_per_second']:9.1f}"
    return f"{name:>11} {speed}   {three('ttft')}   {three('tpot')}   {found['errors']}"


if __name__ == "__main__":
    main()
