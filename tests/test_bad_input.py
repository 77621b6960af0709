"""Invalid input raises one sentence that names it, for its own request only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from healthy import GOOD, GREEDY, answer, assert_well

from outrider import (
    LLM,
    CapacityError,
    ConfigError,
    ModelError,
    OutriderError,
    RequestError,
    SamplingParams,
)
from outrider.checkpoints.heads import folder_of as head_folder
from outrider.checkpoints.hub import read_tokenizer
from outrider.checkpoints.peft import PeftAdapter
from outrider.core.validate import text_of
from outrider.draft import detect
from outrider.inspect.heads import head_card


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """A tiny model without a tokenizer: vocabulary 300, context 256."""
    return LLM(str(tiny), max_num_seqs=4, seed=0)


@pytest.fixture(scope="module")
def speaking(tiny: Path) -> LLM:
    return LLM("builtin", max_num_seqs=4, max_model_len=64, seed=0)


# ---- prompts

LONG = list(range(256))
BAD_PROMPTS = [
    ({"prompt_token_ids": []}, "empty"),
    ({"prompt_token_ids": LONG}, "256 tokens"),
    ({"prompt_token_ids": LONG * 9}, "2304 tokens"),
    ({"prompt_token_ids": [1, 300]}, "300"),
    ({"prompt_token_ids": [-1]}, "-1"),
    ({"prompt_token_ids": [1, "2"]}, "'2'"),
    ({"prompt_token_ids": [1.0]}, "1.0"),
    ({"prompt_token_ids": [None]}, "None"),
    ({"prompt_token_ids": "abc"}, "list"),
    ({"prompt_token_ids": 5}, "list"),
    ({}, "prompt"),
    ({"text": "hello"}, "prompt_token_ids"),
    ({"prompt_token_ids": [5], "promt": 3}, "Did you mean 'prompt'"),
    ({"prompt_token_ids": [5], "multi_modal_data": {}}, "multi_modal_data"),
    (b"ab", "b'ab'"),
    (5, "5"),
    (None, "None"),
    ("hello", "no tokenizer"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda x: str(x)[:40])
def test_a_bad_prompt_among_good_ones_fails_alone(llm: LLM, prompt: Any, message: str) -> None:
    outputs = llm.generate([GOOD, prompt, GOOD], GREEDY)
    good = answer(llm)
    assert [o.error is None for o in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, RequestError) and message in str(outputs[1].error)
    assert outputs[1].finished and outputs[1].outputs == []
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == good
    assert_well(llm)


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": []}, {"prompt_token_ids": [300]}, "no tokenizer here"], ids=str
)
def test_a_bad_prompt_alone_raises(llm: LLM, prompt: Any) -> None:
    for form in (prompt, [prompt]):
        with pytest.raises(RequestError):
            llm.generate(form, GREEDY)
    assert_well(llm)


@pytest.mark.parametrize("prompt", [5, None, b"ab", 1.5], ids=str)
def test_what_is_no_prompt_is_one_bad_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=f"a prompt must be a string.* got {prompt!r}"):
        llm.generate(prompt, GREEDY)
    (output,) = llm.stream(prompt, GREEDY)
    assert isinstance(output.error, RequestError) and repr(prompt) in str(output.error)
    assert_well(llm)


def test_whole_numbers_of_any_kind_are_token_ids(llm: LLM) -> None:
    import numpy as np

    output = llm.generate({"prompt_token_ids": list(np.array([5, 6, 7]))}, GREEDY)[0]
    assert output.outputs[0].token_ids == answer(llm)
    assert all(type(token) is int for token in output.prompt_token_ids)
    with pytest.raises(RequestError, match="token id 300 does not exist"):
        llm.generate({"prompt_token_ids": list(np.array([5, 300]))}, GREEDY)


def test_ids_go_before_the_text_beside_them(speaking: LLM) -> None:
    """As in vLLM: the text is only shown."""
    output = speaking.generate({"prompt": "shown", "prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
    assert output.prompt == "shown" and output.prompt_token_ids == [5, 6, 7]


def test_too_long_prompt_prints_one_error_with_the_cure(
    speaking: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither a warning of the tokenizer's, which knows another length than the engine."""
    import logging

    monkeypatch.setattr(speaking.tokenizer, "model_max_length", 64)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens \(at most 63\).*max_model_len"):
        speaking.generate("word " * 100, GREEDY)
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        speaking.chat([{"role": "user", "content": "word " * 100}], GREEDY)
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_context_that_is_the_models_own_cannot_be_raised(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate({"prompt_token_ids": LONG}, GREEDY)
    assert "truncate_prompt_tokens" in str(caught.value) and "max_model_len" not in str(caught.value)


def test_a_bad_prompt_in_a_stream_comes_first_and_the_others_go_on(llm: LLM) -> None:
    seen = list(llm.stream([GOOD, {"prompt_token_ids": [999]}], GREEDY))
    assert isinstance(seen[0].error, RequestError)
    assert seen[-1].finished and seen[-1].outputs[0].token_ids == answer(llm)
    assert_well(llm)


@pytest.mark.parametrize(
    "prompt",
    ["", {"prompt": ""}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]}, "word " * 100],
    ids=lambda p: str(p)[:20],
)
def test_a_bad_text_among_good_ones_fails_alone(speaking: LLM, prompt: Any) -> None:
    outputs = speaking.generate(["Once upon", prompt], GREEDY)
    assert outputs[0].error is None and outputs[0].outputs[0].text
    assert isinstance(outputs[1].error, RequestError)
    assert_well(speaking)


def test_the_longest_prompt_still_gets_one_token(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": LONG[:255]}, SamplingParams(temperature=0, max_tokens=50))[
        0
    ].outputs[0]
    assert len(output.token_ids) == 1 and output.finish_reason == "length"


@pytest.mark.parametrize("given", [{}, {"prompts": None}, {"prompts": [[5, 6]]}])
def test_token_ids_in_their_old_place_are_refused_with_the_cure(given: dict[str, Any], llm: LLM) -> None:
    cure = r"prompt_token_ids is no argument of generate: .*: call generate\(\[\[1, 2, 3\]"
    with pytest.raises(RequestError, match=cure):
        llm.generate(**{**given, "sampling_params": GREEDY, "prompt_token_ids": [[5, 6, 7]]})
    with pytest.raises(RequestError, match="a prompt must be a string, a list of token ids"):
        llm.generate(sampling_params=GREEDY)


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert list(llm.stream([], GREEDY)) == []


# ---- parameters


def test_parameters_must_be_sampling_params(llm: LLM) -> None:
    for wrong in ({"temperature": 0}, ["greedy"], 5, "greedy"):
        with pytest.raises(RequestError):
            llm.generate(GOOD, wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts and 3"):
        llm.generate([GOOD, GOOD], [GREEDY] * 3)
    assert_well(llm)


@pytest.mark.parametrize(
    "given", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 2}, {"temprature": 1}], ids=str
)
def test_bad_parameters_never_reach_the_engine(llm: LLM, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        llm.generate(GOOD, SamplingParams(**given))
    assert_well(llm)


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not(llm: LLM) -> None:
    good = answer(llm)
    outputs = llm.generate(
        [GOOD, GOOD], [SamplingParams(stop="x"), SamplingParams(temperature=0, stop_token_ids=[good[2]])]
    )
    assert "stop_token_ids" in str(outputs[0].error)
    assert outputs[1].outputs[0].token_ids == good[:3] and outputs[1].outputs[0].stop_reason == good[2]
    assert_well(llm)


def test_a_request_without_an_allowed_token_fails_alone(llm: LLM) -> None:
    """min_tokens forbids all stop tokens; where these are the whole vocabulary nothing is left to say."""
    outputs = llm.generate(
        [GOOD, GOOD], [GREEDY, SamplingParams(min_tokens=2, stop_token_ids=list(range(300)))]
    )
    assert outputs[0].error is None and outputs[0].outputs[0].token_ids == answer(llm)
    assert isinstance(outputs[1].error, RequestError) and "min_tokens" in str(outputs[1].error)
    assert_well(llm)


def test_without_a_tokenizer_ids_are_enough(llm: LLM) -> None:
    output = llm.generate(GOOD, GREEDY)[0]
    assert output.prompt is None and output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 6
    assert llm.get_tokenizer() is None


# ---- options of the engine and of speculation


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modellen": 5}, "Did you mean 'max_model_len'"),
        ({"max_model_len": 257}, "256"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "toaster"}, "toaster"),
        ({"speculative_config": {"method": "ngramm"}}, "Did you mean 'ngram'"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_mux": 3}},
            "Did you mean 'prompt_lookup_max'",
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": -3}}, "-3"),
        ({"speculative_config": {"method": "ngram", "verification": "block?"}}, "block?"),
        (
            {
                "speculative_config": {
                    "model": "builtin-draft",
                    "vocab_mismatch": "allow",
                    "draft_dtype": "int3",
                }
            },
            "int3",
        ),
    ],
    ids=str,
)
def test_a_bad_option_is_refused(tiny: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny), **given)
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would work")
def test_a_device_that_is_not_there(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        LLM(str(tiny), device="cuda")


def test_a_tokenizer_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"no tokenizer folder .*nothing.*: give a folder or a hub id"):
        LLM(str(tiny), tokenizer=str(tmp_path / "nothing"))
    with pytest.raises(OutriderError, match=r"no tokenizer folder 'nothing'"):  # and nothing is downloaded
        LLM(str(tiny), tokenizer="nothing")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~/x/y/z"], ids=["long", "nul", "home"])
def test_a_name_that_is_no_path(name: str) -> None:
    with pytest.raises(ModelError, match="there is no checkpoint folder"):
        LLM(name)


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user/x"])
def test_a_name_that_cannot_be_a_path_is_no_draft_tokenizer_adapter_or_template(name: str) -> None:
    spec: Any = None
    for read in (detect, head_folder, read_tokenizer, lambda path: PeftAdapter.open(path, spec, 8)):
        with pytest.raises(ModelError, match="there is no"):
            read(name)
    assert head_card(name) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        text_of(name, "chat_template")


def test_a_builtin_model_gives_its_tokenizer(tiny: Path) -> None:
    assert LLM(tiny, tokenizer="builtin-draft").tokenizer.encode("The sea") == LLM(
        "builtin"
    ).tokenizer.encode("The sea")


def test_more_memory_than_the_machine_has_is_refused(tiny: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_cache_memory_bytes 1,000,000,000,000,000 is more than the"):
        LLM(tiny, kv_cache_memory_bytes=10**15)


def test_too_little_memory_for_one_request_is_refused(tiny: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        LLM(str(tiny), kv_cache_memory_bytes=100_000)
    assert (
        "100,000" in str(caught.value)
        and "kv_cache_memory_bytes" in str(caught.value)
        and "max_model_len" in str(caught.value)
    )
    assert_well(LLM(str(tiny), kv_cache_memory_bytes=100_000, max_model_len=64))


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("length", [2, 8, 17])
def test_a_very_short_context_works(
    tiny: Path, llm: LLM, length: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    short = LLM(str(tiny), max_model_len=length, speculative_config={"method": "ngram"})
    assert short.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=None))[
        0
    ].outputs[0].token_ids == (
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=length - 1))[0]
        .outputs[0]
        .token_ids
    )
    short.engine.check()


def test_the_drafter_cannot_change_while_requests_run(tiny: Path) -> None:
    llm = LLM(str(tiny))
    stream = llm.stream(GOOD, GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="running"):
        llm.use({"method": "ngram"})
    stream.close()
    assert_well(llm)
    with pytest.raises(ConfigError):
        llm.use({"method": "nothing of the kind"})
    assert_well(llm)
