"""Reading of prompts: priorities, arrays, endless texts, words that none can forbid, and forked processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, AsyncLLM, EngineError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def speaking() -> LLM:
    return LLM("builtin", max_num_seqs=4, max_model_len=64, seed=0)


def test_prompts_start_in_the_order_of_their_priorities(tiny: Path) -> None:
    alone = LLM(tiny, max_num_seqs=1, seed=0)
    first, second = alone.generate([[5, 6], [7, 8]], GREEDY, priority=[1, 0])
    assert second.queued_seconds < first.queued_seconds
    with pytest.raises(RequestError, match="2 prompts and 1 priorities"):
        alone.generate([[5, 6], [7, 8]], GREEDY, priority=[1])


PREFIX = [*range(30, 80)]
HELLO = {
    "messages": [
        {"role": "user", "content": "What do plants need in order to grow in a garden that is dry and cold?"}
    ]
}


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": PREFIX}, {"prompt": "one two three " * 12}, HELLO], ids=str
)
def test_prompts_share_cached_pages_with_those_of_their_salt_alone(
    speaking: LLM, prompt: dict[str, Any]
) -> None:
    speaking.engine.forget_prefixes()
    salts = (None, "a", "b", "b", "a", None)
    outputs = [speaking.generate({**prompt, "cache_salt": salt}, GREEDY)[0] for salt in salts]
    cached = [output.num_cached_tokens or 0 for output in outputs]
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] == cached[5] > 0
    assert len({output.outputs[0].text for output in outputs}) == 1


def test_the_samples_of_a_salted_prompt_share_its_pages(speaking: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=20, seed=1)
    plain, salted = speaking.generate(
        [{"prompt_token_ids": PREFIX}, {"prompt_token_ids": PREFIX, "cache_salt": "x"}], params
    )
    assert [sample.token_ids for sample in salted.outputs] == [sample.token_ids for sample in plain.outputs]


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_a_salt_is_a_text(speaking: LLM, salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a string that is not empty") as error:
        speaking.generate({"prompt_token_ids": PREFIX, "cache_salt": salt})
    assert error.value.param == "cache_salt"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_is_refused_with_the_cure(kind: str, several: bool, speaking: LLM) -> None:
    """Its numbers are not taken for prompts that fail one by one."""
    prompt: Any = np.array([5, 6, 7]) if kind == "numpy" else torch.tensor([5, 6, 7])
    with pytest.raises(RequestError, match=r"pass \.tolist\(\)"):
        speaking.generate([prompt] if several else prompt)


@pytest.fixture
def tokenized(speaking: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that the tokenizer gets."""
    lengths: list[int] = []
    own = speaking.tokenizer.encode
    monkeypatch.setattr(
        speaking.tokenizer, "encode", lambda text, **k: lengths.append(len(text)) or own(text, **k)
    )
    return lengths


def test_of_an_endless_prompt_only_the_beginning_is_tokenized(speaking: LLM, tokenized: list[int]) -> None:
    with pytest.raises(RequestError, match=r"of 500000 characters has more than the 64 tokens"):
        speaking.generate("x" * 500_000)
    with pytest.raises(RequestError, match=r"characters has more than the 64 tokens"):
        speaking.chat([{"role": "user", "content": "x" * 500_000}])
    assert tokenized == [64 * 64] * 2
    (output,) = speaking.generate("x" * 50_000, SamplingParams(truncate_prompt_tokens=8, max_tokens=1))
    assert len(output.prompt_token_ids) == 8


def test_of_an_endless_prediction_only_the_beginning_is_tokenized(
    speaking: LLM, tokenized: list[int]
) -> None:
    speaking.generate([5, 6], SamplingParams(prediction="x" * 500_000, max_tokens=1))
    assert tokenized == [64 * 64]


def test_a_bad_word_of_whitespace(speaking: LLM) -> None:
    with pytest.raises(RequestError, match=r"bad_words: '\\n' is only whitespace, which is cut"):
        speaking.generate("x", SamplingParams(bad_words=["\n"]))


def status_in_child(call: Callable[[], int]) -> int:
    """What a call returns in a fork; 17 for the EngineError of forks."""
    if not (child := os.fork()):
        status = 1
        try:
            status = call()
        except EngineError as error:
            status = 17 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_while_requests_run_is_refused(speaking: LLM) -> None:
    """The thread that drives the engine is missing in the child, which would wait for ever."""

    def tokens() -> int:
        return len(speaking.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids)

    stream = speaking.stream([5, 6, 7], GREEDY)
    next(stream)
    assert status_in_child(tokens) == 17
    list(stream)
    assert status_in_child(tokens) == tokens()


def test_a_forked_process_has_no_asynchronous_engine(tiny: Path) -> None:
    engine = AsyncLLM(tiny, max_num_seqs=1)
    assert status_in_child(lambda: len(asyncio.run(engine.complete([5, 6], GREEDY)).outputs)) == 17
    engine.shutdown()
