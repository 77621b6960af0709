"""llama.cpp on GGUF files: plain, n-gram look-up, and with the draft model; without times of single steps.

OUTRIDER_LLAMA_CPP is a folder with its `llama-server`, built for this processor.  Without it the server of
the wheel `xllamacpp` runs, which is built for any processor with AVX2.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from outrider.bench.peers.worker import Answer, Job, Mode, Modes

LOOKUP, DRAFT = "ngram-simple", "draft-simple"
POLL = 0.1  # seconds


def modes(job: Job) -> Modes:
    folder = os.environ.get("OUTRIDER_LLAMA_CPP")
    serve = partial(_binary, Path(folder)) if folder else _wheel
    found: Modes = {
        "llama.cpp": partial(_mode, job, serve, None),
        "llama.cpp lookup": partial(_mode, job, serve, LOOKUP),
    }
    if job.draft is not None:
        found["llama.cpp draft"] = partial(_mode, job, serve, DRAFT)
    return found


def _binary(folder: Path, job: Job, kind: str | None) -> str:
    """The address of a `llama-server`, which ends with this process's group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "-m": job.model, "--port": port, "-np": 1, "-c": job.context, "-t": job.threads, "-tb": job.threads,
        "-lv": 1,
    }  # fmt: skip
    if kind is not None:
        options |= {"--spec-type": kind, "--spec-draft-n-max": job.depth}
        options |= {"--spec-ngram-simple-size-m": job.depth} if kind == LOOKUP else {"-md": job.draft}
    words = [str(word) for option in options.items() for word in option]
    process = subprocess.Popen([str(folder / "llama-server"), *words], stdout=sys.stderr)
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            with urlopen(f"{address}/health"):
                return address
        except OSError:  # also a status other than 200
            if process.poll() is not None:
                sys.exit(process.returncode)  # its last line is the error
            time.sleep(POLL)


def _wheel(job: Job, kind: str | None) -> Any:
    """The server of xllamacpp."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.verbosity = 1  # errors
    given.model.path, given.n_parallel, given.n_ctx = job.model, 1, job.context
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = job.threads
    if kind is not None:
        kinds, speculative = xllamacpp.common_speculative_type, given.speculative
        name = f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}"
        speculative.types, speculative.draft.n_max = [getattr(kinds, name)], job.depth
        speculative.ngram_simple.size_m = job.depth
        if kind == DRAFT:
            speculative.draft.mparams.path = job.draft
    return xllamacpp.Server(given)


def _mode(job: Job, serve: Any, kind: str | None) -> Mode:
    """Start a server with this kind of speculation."""
    server = serve(job, kind)
    asked: dict[str, Any] = {
        **job.sampling,
        "top_k": max(0, job.sampling["top_k"]),
        "n_predict": job.tokens,
        "seed": job.seed,
        "samplers": ["top_k", "top_p", "min_p", "temperature"],
        "ignore_eos": not job.ending,
        "cache_prompt": False,
        "return_tokens": True,
    }

    def answer(ids: list[int]) -> Answer:
        body = json.dumps({**asked, "prompt": ids}).encode()
        address = server if isinstance(server, str) else server.listening_address  # keeps the server
        url = f"{address}/completion"
        with urlopen(Request(url, body, {"Content-Type": "application/json"})) as reply:
            result = json.load(reply)
        first, rest = (result["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
        return result["tokens"], [first, *[first + rest] * (len(result["tokens"]) - 1)]

    return answer
