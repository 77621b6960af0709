"""OpenVINO GenAI on converted folders: plain, prompt look-up, and with the draft model."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from outrider.bench.peers.worker import Answer, Job, Mode, Modes

NGRAM = 3  # tokens that have to agree before it copies what followed
CACHE = 1  # gigabytes of K/V


def modes(job: Job) -> Modes:
    found: Modes = {
        "openvino": partial(_mode, job, {}),
        "openvino lookup": partial(_mode, job, {"prompt_lookup": True}),
    }
    if job.draft is not None:
        found["openvino draft"] = partial(_mode, job, {}, job.draft)
    return found


def _mode(job: Job, speculation: dict[str, Any], draft: str | None = None) -> Mode:
    """Load the model with options of speculation, or with this draft."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "KV_CACHE_PRECISION": "f16"}
    if draft is not None:
        speculation = {"draft_model": genai.draft_model(draft, "CPU", **options)}
    config = genai.GenerationConfig()
    if speculation:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE, False
        options, config.num_assistant_tokens = {**options, "scheduler_config": scheduler}, job.depth
    if "prompt_lookup" in speculation:
        config.max_ngram_size = NGRAM
    pipe = genai.LLMPipeline(job.model, "CPU", **options, **speculation)
    config.max_new_tokens, config.do_sample = job.tokens, job.sampling["temperature"] > 0
    config.ignore_eos, config.stop_token_ids = not job.ending, set(job.ending)
    config.eos_token_id = next(iter(job.ending), -1)
    if config.do_sample:
        config.rng_seed = job.seed
        for name, value in job.sampling.items():
            if name != "top_k" or value > 0:  # all tokens, by default
                setattr(config, name, value)

    class Clock(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.began, self.times = time.perf_counter(), [0.0] * 0

        def write(self, tokens: Any) -> Any:
            self.times += [time.perf_counter() - self.began] * np.size(tokens)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    def answer(ids: list[int]) -> Answer:
        clock = Clock()
        result = pipe.generate(openvino.Tensor(np.array([ids], np.int64)), config, clock)
        tokens = list(result.tokens[0])
        return tokens, clock.times[: len(tokens)]

    return answer
