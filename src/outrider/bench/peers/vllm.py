"""vLLM: plain, n-gram look-up, and with the draft model."""

from __future__ import annotations

import itertools
import os
import time
from functools import partial
from typing import Any

from outrider.bench.peers.worker import Answer, Job, Mode, Modes

NGRAM = 3  # tokens that have to agree before it copies what followed
CACHE = 1  # gigabytes of K/V


def modes(job: Job) -> Modes:
    lookup = {"method": "ngram", "prompt_lookup_max": NGRAM, "prompt_lookup_min": NGRAM}
    found: Modes = {"vllm": partial(_mode, job, None), "vllm lookup": partial(_mode, job, lookup)}
    if job.draft is not None:
        found["vllm draft"] = partial(_mode, job, {"method": "draft_model", "model": job.draft})
    return found


def _mode(job: Job, speculation: dict[str, Any] | None) -> Mode:
    """Start an engine with this speculation."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE))
    import vllm

    if speculation is not None:
        speculation = {**speculation, "num_speculative_tokens": job.depth}
    engine = vllm.LLM(
        model=job.model,
        dtype=job.dtype,
        max_model_len=job.context,
        max_num_seqs=1,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE << 30,
        speculative_config=speculation,
    ).llm_engine
    asked = vllm.SamplingParams(
        **job.sampling,
        max_tokens=job.tokens,
        seed=job.seed,
        detokenize=False,
        stop_token_ids=job.ending,
        ignore_eos=not job.ending,
    )
    numbers = itertools.count()

    def answer(ids: list[int]) -> Answer:
        tokens, times, began = list[int](), list[float](), time.perf_counter()
        engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                times += [time.perf_counter() - began] * (len(tokens) - len(times))
        return tokens, times

    return answer
