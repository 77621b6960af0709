"""llama.cpp on GGUF files: plain, n-gram look-up, and with the draft model.  It tells no times of steps."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import torch

from outrider.bench.peers.base import Answer, Job, Peer
from outrider.checkpoints.hub import locate
from outrider.errors import ConfigError
from outrider.outputs import CompletionOutput


def _check(model: str) -> None:
    if not model.endswith(".gguf"):
        raise ConfigError(f"llama.cpp reads GGUF files, and {model!r} is none: leave out --peer llama.cpp.")


def _modes(job: Job) -> dict[str, Answer]:
    import xllamacpp

    kinds = xllamacpp.common_speculative_type
    found = {
        "llama.cpp": _mode(job, None),
        "llama.cpp lookup": _mode(job, kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE),
    }
    if job.draft is not None:
        found["llama.cpp draft"] = _mode(job, kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE, job.draft)
    return found


def _mode(job: Job, kind: Any, draft: str | None = None) -> Answer:
    """Start a server with this kind of speculation."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.verbosity = 1  # errors
    given.model.path, given.n_parallel, given.n_ctx = str(locate(job.model)), 1, job.llm.engine.max_len
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = torch.get_num_threads()
    if kind is not None:
        speculative = given.speculative
        speculative.types, speculative.draft.n_max = [kind], job.depth
        speculative.ngram_simple.size_m = job.depth
        if draft is not None:
            speculative.draft.mparams.path = str(locate(draft))
    server = xllamacpp.Server(given)
    asked: dict[str, Any] = {
        **job.sampling, "top_k": max(0, job.params.top_k), "n_predict": job.params.max_tokens,
        "seed": job.params.seed or 0, "samplers": ["top_k", "top_p", "min_p", "temperature"],
        "ignore_eos": job.params.ignore_eos, "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip

    def answer(ids: list[int]) -> CompletionOutput:
        body = json.dumps({**asked, "prompt": ids}).encode()
        url = f"{server.listening_address}/completion"
        with urlopen(Request(url, body, {"Content-Type": "application/json"})) as reply:
            told = json.load(reply)
        first, rest = (told["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
        times = [first, *[first + rest] * (len(told["tokens"]) - 1)]
        return CompletionOutput(0, told["content"], told["tokens"], token_times=times)

    return answer


PEER = Peer("xllamacpp", "xllamacpp", _modes, _check)
