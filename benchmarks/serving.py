"""The server with every kind of drafting, and llama-server beside it, under closed and open loops.

    python benchmarks/serving.py [--json OUT]                        all loads, 40 minutes
    python benchmarks/serving.py --subset --json OUT                 1 and 16 clients and a rate, 7 minutes
    python benchmarks/serving.py --gguf DIR/target-bf16.gguf …       llama-server, too (OUTRIDER_LLAMA_CPP)

All servers run at once, each load takes them in turn, and idle ones take no processor.  Rates of the open
loop (Poisson arrivals) are parts of what the plain server completes with 16 clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from core import conditions
from serve import QUESTIONS, Load, line, measure

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from served import served

WAYS: dict[str, Any] = {
    "plain": None,
    "n-gram": {"method": "ngram"},
    "draft": {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": 3},
    "auto": {"method": "auto", "model": "builtin-draft"},
}
CLIENTS, PARTS = (1, 4, 16, 64), (0.3, 0.7)  # clients of the closed loop, parts of the rate of the open one
SUBSET_CLIENTS, SUBSET_PARTS = (1, 16), (0.5,)
LENGTH = 1024  # tokens of a request at most


@contextmanager
def llama_server(gguf: Path, slots: int) -> Iterator[str]:
    """A llama-server on a free port, yielded as its address."""
    program = str(Path(os.environ.get("OUTRIDER_LLAMA_CPP", ""), "llama-server"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    command = [program, "-m", str(gguf), "--port", str(port), "-np", str(slots), "-c", str(slots * LENGTH)]
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


def run(given: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, Any]]:
    """Figures of every load on every server."""
    prompts = [json.loads(row)["turns"][0] for row in QUESTIONS.read_text().splitlines()]
    results = list[dict[str, Any]]()

    def one(clients: int | None, rate: float | None) -> None:
        for label, url in urls.items():
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            load = Load(url, model, prompts, 100_000, given.max_tokens, given.temperature, 1, clients, rate,
                        seconds=given.seconds)  # fmt: skip
            found = {"label": label, **asyncio.run(measure(load))}
            results.append(found)
            print(f"{label:>12} {line(found)}", flush=True)

    for clients in SUBSET_CLIENTS if given.subset else CLIENTS:
        one(clients, None)
    plain = next(each for each in results if each["label"] == "plain" and each["clients"] == 16)
    for part in SUBSET_PARTS if given.subset else PARTS:
        one(None, round(part * plain["requests_per_second"], 2))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    parser.add_argument("--gguf", type=Path, help="the same model for llama-server")
    parser.add_argument("--subset", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of sending, for each load and server")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if "plain" not in given.ways:
        parser.error("the rates of the open loop need the way plain")
    slots = max(SUBSET_CLIENTS if given.subset else CLIENTS)
    options = [given.model, "--max-num-seqs", str(slots), "--max-model-len", str(LENGTH)]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for label in given.ways:
            config = ["--speculative-config", json.dumps(WAYS[label])] if WAYS[label] else []
            server = served(*options, *config, environment={"OMP_NUM_THREADS": threads})
            urls[label] = stack.enter_context(server).url
        if given.gguf:
            urls["llama-server"] = stack.enter_context(llama_server(given.gguf, slots))
        results = run(given, urls)
    if given.json:
        settings = {key: str(value) for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({**conditions(), **settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
