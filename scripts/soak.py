#!/usr/bin/env python
"""Soak a server: mixed requests, random disconnects, little memory, a kill -9 and a restart in the middle.

    python scripts/soak.py --json soak.json               10,000 requests
    python scripts/soak.py --requests 600 --distinct 100  a minute or two

Every text that arrives whole is compared with the one of the offline API for the same seed.  At the end
nothing may be left in the engine, and rows must have been preempted.  Memory of the server is printed as it
goes, and reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from served import Served, served  # noqa: E402

from outrider import LLM, SamplingParams  # noqa: E402
from outrider.bench.conditions import conditions  # noqa: E402
from outrider.core.block_table import PAGE  # noqa: E402

LENGTH, ROWS = 256, 8  # tokens of a request at most, and requests in a step
PAGES = 20  # of K/V for these rows: one request of LENGTH tokens needs 16
SPECULATION = '{"method": "suffix", "suffix_decoding_max_cached_requests": 100}'
EVERY = 500  # requests between two looks at the memory
FORMS: list[dict[str, Any] | None] = [None, None, None, {"choice": ["yes", "no"]}, {"regex": "[a-z]{3,9}"}]
FORMS += [{"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}]


@dataclass(frozen=True)
class Case:
    """One request and the text that it must give."""

    body: dict[str, Any]
    text: str


@dataclass
class Count:
    """Answers by kind."""

    same: int = 0
    wrong: list[Any] = field(default_factory=list)
    left: int = 0
    refused: int = 0
    failed: int = 0
    megabytes: list[tuple[int, float]] = field(default_factory=list)  # (requests so far, of the server)
    preemptions: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the soak

    @property
    def total(self) -> int:
        return self.same + len(self.wrong) + self.left + self.refused + self.failed


def options_of(llm: LLM, model: str) -> list[str]:
    """Options of a server whose K/V memory has PAGES pages."""
    memory = PAGES * PAGE * llm.engine.decoder.footprint.total()
    limits = ["--max-model-len", str(LENGTH), "--max-num-seqs", str(ROWS), "--max-requests", "64"]
    return [model, *limits, "--kv-cache-memory-bytes", str(memory), "--speculative-config", SPECULATION]


def cases(llm: LLM, count: int, seed: int) -> list[Case]:
    """Requests of mixed lengths, temperatures and constraints, answered by the offline API."""
    rng = random.Random(seed)
    bodies = []
    for i in range(count):
        words = rng.choices(
            ["one", "two", "red", "blue", "the", "and", "Why", "sum", "\n"], k=rng.randint(1, 60)
        )
        body: dict[str, Any] = {
            "prompt": " ".join(words),
            "max_tokens": rng.randint(1, 60),
            "seed": i,
            "temperature": rng.choice([0, 0.5, 1.0]),
            "n": rng.choice([1, 1, 1, 3]),
        }
        if (form := rng.choice(FORMS)) is not None:
            body["structured_outputs"] = form
        bodies.append(body)
    prompts = [body["prompt"] for body in bodies]
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    outputs = llm.generate(prompts, params)
    return [Case(body, json.dumps([s.text for s in o.outputs])) for body, o in zip(bodies, outputs)]


async def one(client: httpx.AsyncClient, url: str, case: Case, rng: random.Random, count: Count) -> None:
    """Send one request, as a stream or whole; one in ten leaves early."""
    leaves, streams = rng.random() < 0.1, rng.random() < 0.6
    try:
        async with client.stream(
            "POST", f"{url}/v1/completions", json={**case.body, "stream": streams}
        ) as answer:
            if answer.status_code == 429:
                count.refused += 1
                return
            texts = [""] * case.body["n"]
            async for line in answer.aiter_lines():
                if leaves:
                    count.left += 1
                    return
                part = line.removeprefix("data: ")
                for choice in json.loads(part).get("choices", ()) if part.startswith("{") else ():
                    texts[choice["index"]] += choice["text"]
        if answer.status_code == 200 and json.dumps(texts) == case.text:
            count.same += 1
        else:
            count.wrong.append((case, answer.status_code, texts))
    except httpx.HTTPError:
        count.failed += 1  # the server was killed


async def load(server: Served, cases: Sequence[Case], requests: int, clients: int, count: Count) -> None:
    """Send so many requests, or fewer if the server dies."""
    rng, numbers = random.Random(len(cases) + count.total), iter(range(requests))

    async def client() -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            for i in numbers:
                if server.process.poll() is None:
                    await one(http, server.url, rng.choice(cases), rng, count)
                if i % EVERY == 0 and server.process.poll() is None:
                    count.megabytes.append((count.total, megabytes(server)))
                    print("{} requests, {:.0f} MB".format(*count.megabytes[-1]), flush=True)

    await asyncio.gather(*(client() for _ in range(clients)))


def megabytes(server: Served) -> float:
    """Resident memory of a server."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def settled(server: Served, seconds: float = 30) -> None:
    """Wait until nothing runs.  Raises AssertionError if something stays."""
    deadline = time.monotonic() + seconds
    while not server.idle():
        assert time.monotonic() < deadline, "a request is left in the engine"
        time.sleep(0.05)
    assert server.metric("kv_cache_usage_perc") == 0, "pages are left"


def soak(model: str, requests: int, clients: int, seed: int, distinct: int) -> Count:
    """Run the whole soak, with a kill -9 after a third.  Raises AssertionError for what is wrong."""
    count, began = Count(), time.monotonic()
    llm = LLM(model, speculative_config={"method": "off"}, max_model_len=LENGTH)
    options, made = options_of(llm, model), cases(llm, distinct, seed)
    del llm
    count.seconds["offline"] = time.monotonic() - began

    async def killed(server: Served) -> None:
        task = asyncio.create_task(load(server, made, requests, clients, count))
        while count.total < requests // 3:
            await asyncio.sleep(0.01)
        count.preemptions = int(await asyncio.to_thread(server.metric, "num_preemptions_total"))
        server.process.kill()
        await task

    with served(*options) as first:
        asyncio.run(killed(first))
    count.seconds["until kill -9"] = time.monotonic() - began
    with served(*options) as second:
        asyncio.run(load(second, made, requests - count.total, clients, count))
        settled(second)
        count.megabytes.append((count.total, megabytes(second)))
        count.preemptions += int(second.metric("num_preemptions_total"))
        assert "Traceback" not in second.log
        assert second.stop() == 0
    count.seconds["all"] = time.monotonic() - began
    assert not count.wrong, count.wrong[0]
    assert count.preemptions, "the memory was not tight"
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin-draft", help="a small one: most time is the server's")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--distinct", type=int, default=500, help="different requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the report")
    given = parser.parse_args()
    count = soak(given.model, given.requests, given.clients, given.seed, given.distinct)
    print(
        f"{count.same} equal to the offline API, {count.left} left, {count.refused} refused, "
        f"{count.failed} cut off, {count.preemptions} preemptions, "
        f"{count.megabytes[-1][1]:.0f} MB at the end, {count.seconds['all']:.0f} s"
    )
    if given.json:
        given.json.write_text(json.dumps({**conditions(), **asdict(count)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
