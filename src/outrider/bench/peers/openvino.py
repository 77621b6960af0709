"""OpenVINO GenAI on converted folders: plain, prompt look-up, and with the draft model."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from outrider.bench.peers.base import Answer, Job, Peer
from outrider.checkpoints.hub import locate
from outrider.errors import ConfigError
from outrider.outputs import CompletionOutput

NGRAM = 3  # tokens that have to agree before it copies what followed
CACHE = 1  # gigabytes of K/V


def _check(model: str) -> None:
    folder = locate(model)
    if not (folder / "openvino_model.xml").is_file():
        raise ConfigError(
            f"openvino reads converted models, and {model!r} has no openvino_model.xml: optimum-cli export "
            f"openvino --task text-generation-with-past -m {folder} {folder}"
        )


def _modes(job: Job) -> dict[str, Answer]:
    import openvino_genai as genai

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "KV_CACHE_PRECISION": "f16"}
    found = {
        "openvino": _mode(job, options),
        "openvino lookup": _mode(job, {**options, "prompt_lookup": True}),
    }
    if job.draft is not None:
        draft = genai.draft_model(locate(job.draft), "CPU", **options)
        found["openvino draft"] = _mode(job, {**options, "draft_model": draft})
    return found


def _mode(job: Job, options: dict[str, Any]) -> Answer:
    """Load the model with these options, which include those of speculation."""
    import openvino
    import openvino_genai as genai

    config, drafts = genai.GenerationConfig(), "prompt_lookup" in options or "draft_model" in options
    if drafts:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE, False
        options, config.num_assistant_tokens = {**options, "scheduler_config": scheduler}, job.depth
    if "prompt_lookup" in options:
        config.max_ngram_size = NGRAM
    pipe = genai.LLMPipeline(locate(job.model), "CPU", **options)
    config.max_new_tokens, config.do_sample = job.params.max_tokens, job.params.temperature > 0
    config.ignore_eos, config.stop_token_ids = not job.ending, set(job.ending)
    config.eos_token_id = next(iter(job.ending), -1)
    if config.do_sample:
        config.rng_seed = job.params.seed or 0
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

    def answer(ids: list[int]) -> CompletionOutput:
        clock = Clock()
        told = pipe.generate(openvino.Tensor(np.array([ids], np.int64)), config, clock)
        tokens = list(told.tokens[0])
        return CompletionOutput(0, "", tokens, token_times=clock.times[: len(tokens)])

    return answer


PEER = Peer("openvino-genai", "openvino_genai", _modes, _check)
