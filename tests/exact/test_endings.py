"""What a text is where it ends, and that a stream never takes back what it has shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import answer, token_prompts
from torch import Tensor

from outrider import LLM, RequestError, SamplingParams
from outrider.testing import KnownTexts, Scripts, check_idle, random_prompts

PROMPTS = random_prompts(4, seed=6)
FREE = SamplingParams(temperature=0, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def answers(plain: LLM) -> list[list[int]]:
    return [answer(plain, prompt, FREE).outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture(params=["off", "right"])
def llm(request: pytest.FixtureRequest, fast: LLM, plain: LLM) -> LLM:
    """Without drafts, and with a drafter that is always right."""
    truth = KnownTexts()
    for prompt in PROMPTS:
        truth.learn(prompt, 5, answer(plain, prompt, FREE).outputs)
    fast.use(
        None
        if request.param == "off"
        else {"method": "scripted", "script": Scripts(truth).right, "num_speculative_tokens": 6}
    )
    return fast


@pytest.mark.parametrize("streaming", [False, True], ids=["generate", "stream"])
def test_a_token_that_ends_the_text_is_not_part_of_it(
    streaming: bool, llm: LLM, answers: list[list[int]]
) -> None:
    """A stop token is among token_ids, but its text is not in the text: as with EOS, and as in vLLM."""
    params = [SamplingParams(**{**vars(FREE), "stop_token_ids": [tokens[10]]}) for tokens in answers]
    prompts: Any = token_prompts(PROMPTS)
    outputs = (
        [o for o in llm.stream(prompts, params) if o.finished] if streaming else llm.generate(prompts, params)
    )
    for output in outputs:
        sample = output.outputs[0]
        assert sample.finish_reason == "stop"
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids[:-1], skip_special_tokens=True)
    check_idle(llm)


def test_a_stream_never_retracts_text(llm: LLM, answers: list[list[int]]) -> None:
    """What might be the beginning of a stop string is held back until that is decided."""
    params = []
    for tokens in answers:
        text = llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
        params.append(SamplingParams(**{**vars(FREE), "stop": [text[8:14]]}))
    shown: dict[str, str] = {}
    for output in llm.stream(token_prompts(PROMPTS), params):
        text = output.outputs[0].text
        assert text.startswith(shown.get(output.request_id, ""))
        shown[output.request_id] = text
    check_idle(llm)


def texts(llm: LLM, streaming: bool, params: list[SamplingParams]) -> list[str]:
    """The final texts; a stream may not take back what it has shown on the way."""
    prompts: Any = token_prompts(PROMPTS)
    if not streaming:
        return [output.outputs[0].text for output in llm.generate(prompts, params)]
    shown: dict[str, str] = {}
    for output in llm.stream(prompts, params):
        text = output.outputs[0].text
        assert text.startswith(shown.get(output.request_id, ""))
        shown[output.request_id] = text
    return [shown[key] for key in sorted(shown, key=int)]


both = pytest.mark.parametrize("streaming", [False, True], ids=["generate", "stream"])


@both
def test_what_ended_the_text_can_stay_in_it(streaming: bool, llm: LLM, answers: list[list[int]]) -> None:
    """include_stop_str_in_output: the text ends with the stop string, or with the stop token's text."""
    decode = llm.get_tokenizer().decode
    whole = [decode(tokens, skip_special_tokens=True) for tokens in answers]
    strings = [
        SamplingParams(**{**vars(FREE), "stop": ["never", text[8:12]], "include_stop_str_in_output": True})
        for text in whole
    ]
    assert texts(llm, streaming, strings) == [text[: text.index(text[8:12]) + 4] for text in whole]
    ids = [
        SamplingParams(**{**vars(FREE), "stop_token_ids": [tokens[10]], "include_stop_str_in_output": True})
        for tokens in answers
    ]
    emitted = [tokens[: tokens.index(tokens[10]) + 1] for tokens in answers]
    assert texts(llm, streaming, ids) == [decode(tokens, skip_special_tokens=True) for tokens in emitted]
    check_idle(llm)


@both
def test_special_tokens_can_be_shown(streaming: bool, fast: LLM) -> None:
    """skip_special_tokens=False shows them, also where one ended the text, if that is to stay."""
    forced = {
        **vars(FREE),
        "temperature": 0.8,
        "allowed_token_ids": [2, 60, 61, 62],
        "skip_special_tokens": False,
    }
    fast.use({"method": "ngram"})
    decode = fast.get_tokenizer().decode
    free = fast.generate(token_prompts(PROMPTS), SamplingParams(**forced))
    for output, text in zip(
        free, texts(fast, streaming, [SamplingParams(**forced)] * len(PROMPTS)), strict=True
    ):
        assert text == decode(output.outputs[0].token_ids, skip_special_tokens=False) and "<|pad|>" in text
    hidden = texts(
        fast, streaming, [SamplingParams(**{**forced, "skip_special_tokens": True})] * len(PROMPTS)
    )
    assert hidden == [decode(output.outputs[0].token_ids, skip_special_tokens=True) for output in free]
    for keep in (True, False):
        ended = SamplingParams(**{**forced, "stop_token_ids": [2], "include_stop_str_in_output": keep})
        for text in texts(fast, streaming, [ended] * len(PROMPTS)):
            assert text.count("<|pad|>") == keep and text.endswith("<|pad|>") == keep
    check_idle(fast)


@both
def test_detokenize_false_gives_no_text(streaming: bool, llm: LLM, answers: list[list[int]]) -> None:
    params = [SamplingParams(**{**vars(FREE), "detokenize": False})] * len(PROMPTS)
    assert texts(llm, streaming, params) == [""] * len(PROMPTS)
    assert [output.outputs[0].token_ids for output in llm.generate(token_prompts(PROMPTS), params)] == answers


def until(count: int) -> Callable[[list[int], Tensor], Tensor]:
    """A logits processor that knows what to do for so many tokens only."""

    def known(output: list[int], logits: Tensor) -> Tensor:
        if len(output) >= count:
            raise IndexError(f"no token {count}")
        return logits

    return known


@pytest.mark.parametrize("verification", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("ending", ["token", "string"])
def test_a_processor_is_not_missed_behind_the_end_of_the_text(
    ending: str, verification: str, plain: LLM, fast: LLM, answers: list[list[int]]
) -> None:
    """Draft tokens reach behind the end, where the processor fails: plain decoding never gets there."""
    truth, params = KnownTexts(), []
    for prompt, tokens in zip(PROMPTS, answers):
        truth.learn(prompt, 5, answer(plain, prompt, FREE).outputs)
        text = plain.get_tokenizer().decode(tokens[:10], skip_special_tokens=True).strip("\ufffd")
        keys: dict[str, Any] = (
            {"stop_token_ids": [tokens[10]]} if ending == "token" else {"stop": [text[-2:]]}
        )
        params.append(SamplingParams(**{**vars(FREE), "logits_processors": [until(11)], **keys}))
    config = {"method": "scripted", "script": Scripts(truth).right, "num_speculative_tokens": 6}
    fast.use({**config, "verification": verification})
    for prompt, p in zip(PROMPTS, params):
        expected, output = answer(plain, prompt, p), answer(fast, prompt, p)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "stop" and output.speculation.accepted > 0
    check_idle(fast)


def test_a_request_that_fails_has_the_tokens_before_its_error(llm: LLM, answers: list[list[int]]) -> None:
    params = SamplingParams(**{**vars(FREE), "logits_processors": [until(9)]})
    for output, tokens in zip(llm.generate(token_prompts(PROMPTS), params), answers):
        assert isinstance(output.error, RequestError) and "no token 9" in str(output.error)
        assert output.outputs[0].token_ids == tokens[:9]
    check_idle(llm)
