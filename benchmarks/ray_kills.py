"""Ray Serve under load while one replica after another is killed: every reply has to be the offline API's.

    python benchmarks/ray_kills.py [--replicas 3] [--seconds 120] [--every 20] [--json OUT]

First a trace of conversations without kills: how many of the prompt tokens that one engine finds in its
cache the chosen replicas find in theirs, which has to be 80 % at least.  Then streams of the same requests,
with a kill every `--every` seconds.  On a busy machine set RAY_worker_niceness=0: Ray's workers run at the
lowest priority otherwise, and its time limits for their start pass.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from command_line import parser_of, write

os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")  # read when ray is imported

import httpx
import ray
from ray import serve

from outrider import LLM, SamplingParams
from outrider.serve.options import ServerOptions
from outrider.serve.ray import deployment

MODEL, PORT, CLIENTS, TURNS = "builtin-draft", 18765, 3, 4
URL = f"http://127.0.0.1:{PORT}/v1/completions"
CONFIG = {"method": "ngram"}
OPTIONS = {"max_model_len": 512}
TEXTS = (
    "The future of AI is",
    "Anna walked through the village",
    "A letter to the mayor:",
    "Once, in the north,",
    "The most important rule of cooking",
    "The river rose because",
)


@dataclass(frozen=True)
class Turn:
    """A request and what one engine answers.  cached: prompt tokens that it found in its cache."""

    prompt: str
    seed: int
    text: str
    cached: int

    def body(self, **more: Any) -> dict[str, Any]:
        given = {"prompt": self.prompt, "seed": self.seed, "temperature": 0.8, "max_tokens": 48}
        return {**given, "ignore_eos": True, **more}


def conversations() -> list[list[Turn]]:
    """Each turn continues the text so far."""
    llm, found = LLM(MODEL, **OPTIONS), list[list[Turn]]()
    for seed, prompt in enumerate(TEXTS):
        turns = list[Turn]()
        for i in range(TURNS):
            params = SamplingParams(temperature=0.8, seed=seed, max_tokens=48, ignore_eos=True)
            output = llm.generate([prompt], params)[0]
            turns.append(Turn(prompt, seed, output.outputs[0].text, output.num_cached_tokens))
            prompt += f"{output.outputs[0].text} And then, in part {i}, everything changed."
        found.append(turns)
    return found


def talk(turns: list[Turn]) -> tuple[int, int]:
    """Cached prompt tokens and wrong replies of a conversation."""
    cached = wrong = 0
    for turn in turns:
        answer = httpx.post(URL, json=turn.body(), timeout=300).json()
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        wrong += answer["choices"][0]["text"] != turn.text
    return cached, wrong


def stream(turn: Turn) -> bool:
    """Whether a streamed reply is right."""
    text = ""
    with httpx.stream("POST", URL, json=turn.body(stream=True), timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text == turn.text


class Clients:
    """Threads that stream requests until told to stop."""

    def __init__(self, turns: list[Turn], clients: int = CLIENTS) -> None:
        self.turns, self.over = turns, threading.Event()
        self.seconds, self.wrong = list[float](), 0
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.over.is_set():
            began = time.perf_counter()
            try:
                right = stream(rng.choice(self.turns))
            except Exception as error:
                print("failed:", repr(error)[:200], flush=True)
                right = False
            self.seconds.append(time.perf_counter() - began)
            self.wrong += not right

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def start(name: str, replicas: int | dict[str, Any]) -> None:
    """Start Ray and an application of this name."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    serve.start(http_options={"port": PORT})
    app = deployment(
        MODEL,
        speculative_config=CONFIG,
        replicas=replicas,
        threads=1,
        server=ServerOptions(),
        actor={"num_cpus": 0.1},
        **OPTIONS,
    )
    serve.run(app, name=name)


def replicas() -> list[int]:
    """Process ids."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ServeReplica:kills:Model" in line]


def kill_while(clients: Clients, seconds: float, every: float) -> int:
    """Kill a replica every so many seconds.  Returns how many."""
    rng, kills, end = random.Random(0), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(every)
        if running := replicas():
            os.kill(rng.choice(running), signal.SIGKILL)
            kills += 1
    clients.stop()
    return kills


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=20)
    given = parser.parse_args()
    talks = conversations()
    start("kills", given.replicas)
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(talk, talks))
    possible = sum(turn.cached for turns in talks for turn in turns)
    clients = Clients([turn for turns in talks for turn in turns])
    kills = kill_while(clients, given.seconds, given.every)
    times = sorted(clients.seconds)
    result = {
        "replicas": given.replicas,
        "conversations": {
            "replies": len(talks) * TURNS,
            "wrong": sum(wrong for _, wrong in found),
            "cached_of_possible": sum(cached for cached, _ in found) / possible,
        },
        "kills": kills,
        "streams": len(times),
        "wrong": clients.wrong,
        "median_seconds": median(times),
        "longest_seconds": times[-1],
    }
    print(json.dumps(result, indent=1))
    write(given.json, result)
    serve.shutdown()
    ray.shutdown()
    wrong, share = clients.wrong + sum(wrong for _, wrong in found), sum(cached for cached, _ in found)
    raise SystemExit(bool(wrong or share < 0.8 * possible))


if __name__ == "__main__":
    main()
