"""llama.cpp on GGUF files: plain, n-gram look-up, and with the draft model.  It tells no times of steps."""

from __future__ import annotations

import json
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

from outrider.bench.peers.worker import Answer, Job, Mode, Modes


def modes(job: Job) -> Modes:
    import xllamacpp

    kinds = xllamacpp.common_speculative_type
    found: Modes = {
        "llama.cpp": partial(_mode, job, None),
        "llama.cpp lookup": partial(_mode, job, kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE),
    }
    if job.draft is not None:
        kind = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        found["llama.cpp draft"] = partial(_mode, job, kind, job.draft)
    return found


def _mode(job: Job, kind: Any, draft: str | None = None) -> Mode:
    """Start a server with this kind of speculation."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.verbosity = 1  # errors
    given.model.path, given.n_parallel, given.n_ctx = job.model, 1, job.context
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = job.threads
    if kind is not None:
        speculative = given.speculative
        speculative.types, speculative.draft.n_max = [kind], job.depth
        speculative.ngram_simple.size_m = job.depth
        if draft is not None:
            speculative.draft.mparams.path = draft
    server = xllamacpp.Server(given)
    asked: dict[str, Any] = {
        **job.sampling, "top_k": max(0, job.sampling["top_k"]), "n_predict": job.tokens, "seed": job.seed,
        "samplers": ["top_k", "top_p", "min_p", "temperature"], "ignore_eos": not job.ending,
        "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip

    def answer(ids: list[int]) -> Answer:
        body = json.dumps({**asked, "prompt": ids}).encode()
        url = f"{server.listening_address}/completion"
        with urlopen(Request(url, body, {"Content-Type": "application/json"})) as reply:
            told = json.load(reply)
        first, rest = (told["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
        return told["tokens"], [first, *[first + rest] * (len(told["tokens"]) - 1)]

    return answer
