"""transformers in our dtype: plain, prompt look-up, and assisted by the draft model."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from outrider.bench.peers.worker import Answer, Job, Mode, Modes


class _Clock:
    """A streamer that records the arrival of tokens; its first call carries the prompt."""

    def __init__(self) -> None:
        self.began, self.times, self.prompt = time.perf_counter(), [0.0] * 0, True

    def put(self, value: Any) -> None:
        if not self.prompt:
            self.times += [time.perf_counter() - self.began] * value.numel()
        self.prompt = False

    def end(self) -> None: ...


def modes(job: Job) -> Modes:
    found: Modes = {
        "transformers": partial(_mode, job),
        "transformers lookup": partial(_mode, job, prompt_lookup_num_tokens=job.depth),
    }
    if job.draft is not None:
        found["transformers assisted"] = partial(_mode, job, job.draft)
    return found


def _mode(job: Job, draft: str | None = None, **options: Any) -> Mode:
    """Load the model, and its draft."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(job.threads)

    def loaded(name: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, job.dtype))
        return model.to(job.device).eval()

    model, sampled = loaded(job.model), job.sampling["temperature"] > 0
    options |= {"do_sample": sampled, "max_new_tokens": job.tokens, **(job.sampling if sampled else {})}
    model.generation_config.eos_token_id = job.ending or None
    model.generation_config.pad_token_id = 0
    if draft is not None:
        options["assistant_model"] = assistant = loaded(draft)
        assistant.generation_config.num_assistant_tokens = job.depth

    def answer(ids: list[int]) -> Answer:
        torch.manual_seed(job.seed)
        given, clock = torch.tensor([ids], device=job.device), _Clock()
        with torch.inference_mode():
            output = model.generate(given, attention_mask=torch.ones_like(given), streamer=clock, **options)
        return output[0, len(ids) :].tolist(), clock.times

    return answer
