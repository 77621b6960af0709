"""What a text is where it ends, and that a stream never takes back what it has shown."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Scripts, Truth, answer, prompts_of, settled, tiny_prompts

from outrider import LLM, SamplingParams

PROMPTS = tiny_prompts(4, seed=6)
FREE = SamplingParams(temperature=0, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def told(plain: LLM) -> list[list[int]]:
    return [answer(plain, prompt, FREE).outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture(params=["off", "right"])
def llm(request: pytest.FixtureRequest, fast: LLM, plain: LLM) -> LLM:
    """Without guesses, and with a drafter that is always right."""
    truth = Truth()
    for prompt in PROMPTS:
        truth.learn(prompt, 5, answer(plain, prompt, FREE).outputs)
    fast.use(None if request.param == "off" else {"method": "scripted", "script": Scripts(truth).right, "num_speculative_tokens": 6})
    return fast


@pytest.mark.parametrize("streaming", [False, True], ids=["generate", "stream"])
def test_a_token_that_ends_the_text_is_not_part_of_it(streaming: bool, llm: LLM, told: list[list[int]]) -> None:
    """A stop token is among token_ids, but its text is not in the text: as with EOS, and as in vLLM."""
    params = [SamplingParams(**{**vars(FREE), "stop_token_ids": [tokens[10]]}) for tokens in told]
    prompts: Any = prompts_of(PROMPTS)
    outputs = [o for o in llm.stream(prompts, params) if o.finished] if streaming else llm.generate(prompts, params)
    for output in outputs:
        sample = output.outputs[0]
        assert sample.finish_reason == "stop"
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids[:-1], skip_special_tokens=True)
    settled(llm)


def test_a_stream_takes_nothing_back(llm: LLM, told: list[list[int]]) -> None:
    """What might be the beginning of a stop string is held back until that is decided."""
    params = []
    for tokens in told:
        text = llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
        params.append(SamplingParams(**{**vars(FREE), "stop": [text[8:14]]}))
    shown: dict[str, str] = {}
    for output in llm.stream(prompts_of(PROMPTS), params):
        text = output.outputs[0].text
        assert text.startswith(shown.get(output.request_id, ""))
        shown[output.request_id] = text
    settled(llm)
