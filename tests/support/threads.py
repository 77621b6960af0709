"""Callers of one model in several threads, and what they ask for."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from outrider import LLM, SamplingParams
from outrider.testing import random_prompts

PROMPTS = random_prompts(12, seed=4)
METHODS = ["off", "ngram", "suffix", "draft_model"]


def params_of(i: int, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8 * (i % 3 > 0), "seed": i, "max_tokens": 8 + i % 9, "ignore_eos": True, **given}
    )


PARAMS = [params_of(i) for i in range(len(PROMPTS))]


def config(method: str, model: str) -> dict[str, Any]:
    return {"method": method, **({"model": model} if method == "draft_model" else {})}


def together(*tasks: Callable[[], None], limit: float = 120) -> None:
    """Run each task in a thread of its own; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def caller(llm: LLM, texts: list[list[int]], seed: int, rounds: int = 6) -> Callable[[], None]:
    """Random calls of every kind, each compared with the text of a call alone."""

    def generate(rng: random.Random, i: int) -> None:
        picked = [i, *rng.sample(range(len(PROMPTS)), rng.randint(0, 2))]
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPTS[j]} for j in picked], [PARAMS[j] for j in picked]
        )
        assert [output.outputs[0].token_ids for output in outputs] == [texts[j] for j in picked]

    def stream(rng: random.Random, i: int) -> None:
        stop, before = rng.choice([2, 1000]), 0
        for count, output in enumerate(llm.stream({"prompt_token_ids": PROMPTS[i]}, PARAMS[i])):
            ids = output.outputs[0].token_ids
            assert ids == texts[i][: len(ids)] and len(ids) >= before
            before = len(ids)
            assert not output.finished or ids == texts[i]
            if count == stop:
                break

    def aborted(rng: random.Random, i: int) -> None:
        for output in llm.stream({"prompt_token_ids": PROMPTS[i]}, PARAMS[i]):
            ids = output.outputs[0].token_ids
            assert ids == texts[i][: len(ids)]
            threading.Thread(target=llm.abort, args=(output.request_id,)).start()

    def run() -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            rng.choice([generate, generate, stream, aborted])(rng, rng.randrange(len(PROMPTS)))

    return run
