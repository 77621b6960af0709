"""What a request may ask for depends on the model and its tokenizer: checked when it comes, for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, RequestError, SamplingParams
from outrider.sampling.processors import BadWords, Ids

GREEDY = SamplingParams(temperature=0, max_tokens=6)
GOOD = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """Vocabulary 300, context 256, no tokenizer."""
    return LLM(str(tiny), max_num_seqs=4, seed=0)


@pytest.fixture(scope="module")
def speaking() -> LLM:
    return LLM("builtin", max_num_seqs=4, max_model_len=64, seed=0)


def explode(output: list[int], logits: Any) -> Any:
    if len(output) == 3:
        raise ValueError("enough")
    return logits


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_token_ids": [5, 300]}, "allowed_token_ids: token id 300"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: token id -1"),
        ({"stop_token_ids": [5, 300]}, "stop_token_ids: token id 300"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: token id -1"),
        ({"logit_bias": {300: 1}}, "logit_bias: token id 300"),
        ({"logit_bias": {-1: 1}}, "logit_bias: token id -1"),
        ({"bad_words": ["a"]}, "bad_words need a tokenizer"),
        (
            {"allowed_token_ids": [5], "logits_processors": [lambda output, logits: logits - float("inf")]},
            "forbids every token",
        ),
        ({"logits_processors": [explode]}, "logits_processors: explode raised ValueError: enough"),
        ({"logits_processors": [lambda output, logits: logits[:7]]}, "shape"),
    ],
    ids=lambda given: str(given)[:40],
)
@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
def test_a_request_that_cannot_be_served_fails_alone(
    method: str, given: dict[str, Any], said: str, llm: LLM, tiny: Path
) -> None:
    config: dict[str, Any] = (
        {"method": method, "model": str(tiny), "siblings": 2}
        if method == "draft_model"
        else {"method": method}
    )
    llm.use(config)
    before = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids
    outputs = llm.generate([GOOD, GOOD, GOOD], [GREEDY, SamplingParams(temperature=0, **given), GREEDY])
    assert isinstance(outputs[1].error, RequestError) and said in str(outputs[1].error)
    assert [o.outputs[0].token_ids for o in (outputs[0], outputs[2])] == [before, before]
    llm.engine.check()
    assert not llm.engine.busy


def test_what_was_said_before_a_function_failed_is_kept(llm: LLM) -> None:
    llm.use({"method": "ngram"})
    outputs = llm.generate([GOOD, GOOD], [GREEDY, SamplingParams(temperature=0, logits_processors=[explode])])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert (
        outputs[1].outputs[0].token_ids
        == outputs[0].outputs[0].token_ids[: len(outputs[1].outputs[0].token_ids)]
    )


# ---- bad words


def sequences(llm: LLM, words: list[str]) -> list[list[int]]:
    return llm._reader._bad_words(SamplingParams(bad_words=words))


def test_bad_words_are_read_as_vllm_reads_them(speaking: LLM) -> None:
    """As they are and with a space before, where that is another token and no longer; a space of the word's own does not count."""
    encode = speaking.tokenizer.encode
    for word in ("little", "the", "girl", "Zanzibar", "x"):
        plain, spaced = encode(word), encode(f" {word}")
        expected = [plain, spaced] if plain[0] != spaced[0] and len(plain) == len(spaced) else [plain]
        assert sequences(speaking, [word]) == sequences(speaking, [f"  {word}"]) == expected
    assert len(sequences(speaking, ["the"])) == 2 and len(encode("Zanzibar")) > 1
    with pytest.raises(RequestError, match="bad_words"):
        sequences(speaking, ["  "])


def test_a_bad_word_is_not_said(speaking: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    text = speaking.generate("Once upon a time", params)[0].outputs[0].text
    words = [word for word in text.replace(".", " ").replace(",", " ").split() if len(word) > 2][:3]
    cleaned = speaking.generate("Once upon a time", SamplingParams(**{**vars(params), "bad_words": words}))[
        0
    ].outputs[0]
    assert cleaned.text != text
    found = [
        ids
        for ids in sequences(speaking, words)
        for i in range(30)
        if cleaned.token_ids[i : i + len(ids)] == ids
    ]
    assert not found
    assert BadWords(0, [[1, 2], [3]])(Ids([1]), torch.zeros(5)).tolist() == [
        0,
        0,
        float("-inf"),
        float("-inf"),
        0,
    ]


# ---- the end of a prompt


def test_truncate_prompt_tokens(llm: LLM) -> None:
    """The last so many tokens, as if there had been no others; -1 leaves room for max_tokens."""
    ids = [(i * 7) % 300 for i in range(400)]
    params = SamplingParams(temperature=0, max_tokens=6, truncate_prompt_tokens=20)
    output = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert output.prompt_token_ids == ids[-20:]
    assert (
        output.outputs[0].token_ids
        == llm.generate({"prompt_token_ids": ids[-20:]}, GREEDY)[0].outputs[0].token_ids
    )
    assert llm.generate(GOOD, params)[0].prompt_token_ids == GOOD["prompt_token_ids"]
    whole = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=6, truncate_prompt_tokens=-1)
    )[0]
    assert (
        whole.prompt_token_ids == ids[-250:]
        and whole.outputs[0].finish_reason == "length"
        and len(whole.outputs[0].token_ids) == 6
    )
    with pytest.raises(RequestError, match="256"):
        llm.generate({"prompt_token_ids": ids}, SamplingParams(truncate_prompt_tokens=300))
