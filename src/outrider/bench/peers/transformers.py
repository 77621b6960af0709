"""transformers in our dtype: plain, prompt look-up, and assisted by the draft model."""

from __future__ import annotations

import time
from typing import Any

import torch

from outrider.bench.peers.base import Answer, Job, Peer, readable
from outrider.outputs import CompletionOutput


class _Clock:
    """A streamer that records the arrival of tokens; its first call carries the prompt."""

    def __init__(self) -> None:
        self.began, self.times, self.prompt = time.perf_counter(), [0.0] * 0, True

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt:
            self.times += [time.perf_counter() - self.began] * value.numel()
        self.prompt = False

    def end(self) -> None: ...


def _modes(job: Job) -> dict[str, Answer]:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = job.llm.engine.device

    def loaded(name: str) -> Any:
        with readable(name) as folder:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=job.llm.engine.decoder.dtype)
            return model.to(device).eval()

    model, sampled = loaded(job.model), job.params.temperature > 0
    sampling = {
        "do_sample": sampled,
        "max_new_tokens": job.params.max_tokens,
        **(job.sampling if sampled else {}),
    }
    model.generation_config.eos_token_id = job.ending or None
    model.generation_config.pad_token_id = 0

    def mode(**options: Any) -> Answer:
        def answer(ids: list[int]) -> CompletionOutput:
            torch.manual_seed(job.params.seed or 0)
            given, clock = torch.tensor([ids], device=device), _Clock()
            with torch.inference_mode():
                told = model.generate(
                    given, attention_mask=torch.ones_like(given), streamer=clock, **sampling, **options
                )
            return CompletionOutput(0, "", told[0, len(ids) :].tolist(), token_times=clock.times)

        return answer

    found = {"transformers": mode(), "transformers lookup": mode(prompt_lookup_num_tokens=job.depth)}
    if job.draft is not None:
        assistant = loaded(job.draft)
        assistant.generation_config.num_assistant_tokens = job.depth
        found["transformers assisted"] = mode(assistant_model=assistant)
    return found


PEER = Peer("transformers", "transformers", _modes)
