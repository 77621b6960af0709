"""What a request may ask for depends on the model and its tokenizer: checked when it comes, for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, ConfigError, RequestError, SamplingParams
from outrider.core.noise import mix
from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.core.tree import Budget, DraftTree
from outrider.errors import shortened
from outrider.sampling.processors import BadWords

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
    ("given", "message"),
    [
        ({"allowed_token_ids": [5, 300]}, "allowed_token_ids: token id 300"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: token id -1"),
        ({"stop_token_ids": [5, 300]}, "stop_token_ids: token id 300"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: token id -1"),
        ({"logit_bias": {300: 1}}, "logit_bias: token id 300"),
        ({"logit_bias": {-1: 1}}, "logit_bias: token id -1"),
        ({"bad_words": ["a"]}, "bad_words: the checkpoint has no tokenizer: use logit_bias"),
        (
            {"allowed_token_ids": [5], "logits_processors": [lambda output, logits: logits - float("inf")]},
            "forbids every token",
        ),
        ({"logits_processors": [explode]}, "logits_processors: explode raised ValueError: enough"),
        ({"logits_processors": [lambda output, logits: logits[:7]]}, "shape"),
        ({"logits_processors": [lambda output, logits: logits.to_sparse()]}, "got a sparse_coo tensor"),
        ({"logits_processors": [lambda output, logits: logits.to("meta")]}, "got a meta tensor"),
        (
            {"logits_processors": [lambda output, logits: logits.to(torch.complex64)]},
            "got a complex64 tensor",
        ),
        ({"logits_processors": [lambda output, logits: None]}, "got NoneType"),
        ({"logits_processors": [lambda output, logits: logits * float("nan")]}, "got nan among them"),
        (
            {
                "logits_processors": [
                    lambda output, logits: logits.index_fill(0, torch.tensor(3), float("nan"))
                ]
            },
            "nan",
        ),
        ({"logits_processors": [lambda output, logits: logits + float("inf")]}, "got inf among them"),
        ({"stop_token_ids": [10**400]}, "stop_token_ids: token id 1000"),
        ({"stop_token_ids": [10**5000]}, "stop_token_ids: token id <int that cannot be shown>"),
    ],
    ids=lambda given: shortened(given, 40),
)
@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
def test_a_request_that_cannot_be_served_fails_alone(
    method: str, given: dict[str, Any], message: str, llm: LLM, tiny: Path
) -> None:
    config: dict[str, Any] = (
        {"method": method, "model": str(tiny), "siblings": 2}
        if method == "draft_model"
        else {"method": method}
    )
    llm.use(config)
    before = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids
    outputs = llm.generate([GOOD, GOOD, GOOD], [GREEDY, SamplingParams(temperature=0, **given), GREEDY])
    assert isinstance(outputs[1].error, RequestError) and message in str(outputs[1].error)
    assert [o.outputs[0].token_ids for o in (outputs[0], outputs[2])] == [before, before]
    llm.engine.check()
    assert not llm.engine.busy


def test_output_before_a_processor_failed_is_kept(llm: LLM) -> None:
    llm.use({"method": "ngram"})
    outputs = llm.generate([GOOD, GOOD], [GREEDY, SamplingParams(temperature=0, logits_processors=[explode])])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert (
        outputs[1].outputs[0].token_ids
        == outputs[0].outputs[0].token_ids[: len(outputs[1].outputs[0].token_ids)]
    )


class Fickle:
    """A processor that fails when it is asked for the second time, as log-probabilities do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: list[int], logits: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise ValueError("enough")
        return logits


def test_a_function_that_fails_for_log_probabilities_fails_alone(tiny: Path) -> None:
    llm = LLM(str(tiny), seed=0, logprobs_mode="processed_logprobs")
    before = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids
    bad = SamplingParams(temperature=0, logprobs=1, logits_processors=[Fickle()])
    outputs = llm.generate([GOOD, GOOD, GOOD], [GREEDY, bad, GREEDY])
    assert "Fickle" in str(outputs[1].error) and outputs[1].outputs[0].finish_reason == "error"
    assert [o.outputs[0].token_ids for o in (outputs[0], outputs[2])] == [before, before]
    llm.engine.check()


class Strange:
    """Raises in every operation."""

    def __index__(self) -> int:
        raise RuntimeError("not today")

    def __repr__(self) -> str:
        raise RuntimeError("not even this")


STRANGE = [
    ({"prompt_token_ids": torch.tensor([5, 6])}, r"got Tensor: pass .tolist\(\)"),
    ({"prompt_token_ids": np.array([5, 6])}, r"got ndarray: pass .tolist\(\)"),
    ({"prompt_token_ids": [torch.tensor([5, 6])]}, "token id tensor"),
    ({"prompt_token_ids": [torch.tensor(5.0)]}, "token id tensor"),
    ({"prompt_token_ids": [Strange()]}, "token id <Strange that cannot be shown>"),
    ({"prompt_token_ids": [10**5000]}, "token id <int that cannot be shown>"),
    ({"prompt_token_ids": [True]}, "token id True"),
    ([5, 300], "token id 300"),
    ([5, "a"], "token id 'a'"),
    ([], "the prompt is empty"),
]


@pytest.mark.parametrize(("prompt", "message"), STRANGE, ids=range(len(STRANGE)))
def test_a_prompt_of_strange_ids_fails_alone(prompt: Any, message: str, llm: LLM) -> None:
    llm.use(None)
    outputs = llm.generate([GOOD, prompt, GOOD], GREEDY)
    assert [o.error is None for o in outputs] == [True, False, True]
    with pytest.raises(RequestError, match=message):
        raise outputs[1].error  # type: ignore[misc]
    llm.engine.check()


def test_anything_that_a_tokenizer_raises_is_an_error_of_the_request(
    speaking: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    surrogate = SamplingParams(bad_words=["\ud800"], max_tokens=4)
    good, bad = speaking.generate(["a", "a"], [SamplingParams(max_tokens=4), surrogate])
    assert good.error is None
    with pytest.raises(RequestError, match="bad_words: the tokenizer cannot read"):
        raise bad.error  # type: ignore[misc]

    def broken(*_: Any) -> Any:
        raise LookupError("no such piece")

    monkeypatch.setattr("outrider.requests.processors_of", broken)
    with pytest.raises(RequestError, match="LookupError: no such piece"):
        speaking.generate("a")


def test_lists_of_ids_are_prompts(llm: LLM) -> None:
    """As in vLLM: a list of whole numbers is one prompt, a list of lists several."""
    llm.use(None)
    expected = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids
    other = llm.generate({"prompt_token_ids": [9, 8]}, GREEDY)[0].outputs[0].token_ids
    for one in ([5, 6, 7], (5, 6, 7), [[5, 6, 7]], [np.int64(5), np.int32(6), 7]):
        (output,) = llm.generate(one, GREEDY)
        assert output.outputs[0].token_ids == expected and output.prompt_token_ids == [5, 6, 7]
    several = llm.generate([[5, 6, 7], {"prompt_token_ids": [9, 8]}, [9, 8]], GREEDY)
    assert [o.outputs[0].token_ids for o in several] == [expected, other, other]
    assert llm.generate([], GREEDY) == []
    *_, last = llm.stream([5, 6, 7], GREEDY)
    assert last.outputs[0].token_ids == expected


def test_whole_numbers_of_numpy_are_token_ids(llm: LLM) -> None:
    llm.use(None)
    first = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids[0]
    plain: dict[str, Any] = {
        "stop_token_ids": [first],
        "allowed_token_ids": [first, 9],
        "logit_bias": {first: 5.0},
    }
    numpys: dict[str, Any] = {
        "stop_token_ids": [np.int64(first)],
        "allowed_token_ids": [np.int32(first), np.uint16(9)],
        "logit_bias": {np.int64(first): np.float32(5.0)},
        "max_tokens": np.int64(6),
        "temperature": np.float32(0),
    }
    params = SamplingParams(**numpys)
    assert params == SamplingParams(temperature=0, max_tokens=6, **plain)
    assert type(params.stop_token_ids[0]) is int and type(params.max_tokens) is int  # type: ignore[index]
    output = llm.generate(GOOD, params)[0].outputs[0]
    assert (output.token_ids, output.stop_reason) == ([first], first)


def test_ids_of_requests_are_any_string(llm: LLM) -> None:
    """Requests without a seed derive one from their id; that of a number is what it always was."""
    params = SamplingParams(max_tokens=4)

    def seed(id: str) -> int:
        request: Any = llm.reader.request(id, GOOD, params)
        return int(request.rows[0].seed)

    assert seed("7") == mix(llm.seed + 7)
    seeds = [seed(id) for id in ("7", "cmpl-7", "chat é", "", "9" * 5000, "\ud800", "٧", "cmpl-7 ")]
    assert len({*seeds}) == len(seeds) and seed("cmpl-7") == seeds[1]


# ---- a script of the scripted drafter


def raising(row: Row, budget: Budget) -> DraftTree:
    if row.prompt == 2:
        raise ZeroDivisionError("of the script")
    return DraftTree.chain([5] * budget.depth, [0.5] * budget.depth)


def returning(made: Any) -> Any:
    return lambda row, budget: made if row.prompt == 2 else DraftTree([], [], [])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (raising, "ZeroDivisionError: of the script"),
        (returning(None), "must return a DraftTree, got NoneType"),
        (returning([5, 6]), "must return a DraftTree, got list"),
        (returning(DraftTree([5, 6], [-1], [0.5])), r"equally long, got \(2, 1, 1\)"),
        (returning(DraftTree([5.5], [-1], [0.5])), "TypeError"),  # type: ignore[list-item]
        (returning(DraftTree([5], ["a"], [0.5])), "TypeError"),  # type: ignore[list-item]
        (returning(DraftTree(None, [-1], [0.5])), "TypeError"),  # type: ignore[arg-type]
        (returning(DraftTree([5], [-1], ["x"])), "ValueError"),  # type: ignore[list-item]
    ],
)
def test_a_script_that_fails_ends_its_row(script: Any, message: str, llm: LLM) -> None:
    llm.use({"method": "scripted", "script": script})
    expected = llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids
    outputs = llm.generate([GOOD, {"prompt_token_ids": [9, 8]}, GOOD], GREEDY)
    assert [o.outputs[0].token_ids for o in (outputs[0], outputs[2])] == [expected, expected]
    with pytest.raises(ConfigError, match=f"script of the scripted drafter: .*{message}"):
        raise outputs[1].error  # type: ignore[misc]
    llm.engine.check()
    assert not llm.engine.busy


# ---- parameters


HUGE = 10**400
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
]


@pytest.mark.parametrize("value", [HUGE, -HUGE, 10**5000, Strange()], ids=range(4))
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_any_float_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be"):
        SamplingParams(**{name: value})


def test_whole_numbers_may_be_huge(llm: LLM) -> None:
    llm.use(None)
    params = SamplingParams(
        temperature=0, max_tokens=HUGE, top_k=HUGE, truncate_prompt_tokens=HUGE, seed=HUGE, logprobs=HUGE
    )
    output = llm.generate(GOOD, params)[0].outputs[0]
    assert output.finish_reason == "length" and output.logprobs is not None and len(output.logprobs[0]) == 300
    assert SamplingParams(logit_bias={5: HUGE, 6: -HUGE}).logit_bias == {5: 100.0, 6: -100.0}
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias={5: float("nan")})


def test_parameters_without_a_name_are_refused() -> None:
    with pytest.raises(RequestError, match=r"must be named.*got 0.8, 0.95 without a name"):
        SamplingParams(0.8, 0.95)


# ---- bad words


def sequences(llm: LLM, words: list[str]) -> list[list[int]]:
    return llm.reader._bad_words(SamplingParams(bad_words=words))


def test_bad_words_are_read_as_vllm_reads_them(speaking: LLM) -> None:
    """Bad words as given, and with a leading space if that is another first token and the same length."""
    encode = speaking.tokenizer.encode
    for word in ("little", "the", "girl", "Zanzibar", "x"):
        plain, spaced = encode(word), encode(f" {word}")
        expected = [plain, spaced] if plain[0] != spaced[0] and len(plain) == len(spaced) else [plain]
        assert sequences(speaking, [word]) == sequences(speaking, [f"  {word}"]) == expected
    assert len(sequences(speaking, ["the"])) == 2 and len(encode("Zanzibar")) > 1
    with pytest.raises(RequestError, match="bad_words"):
        sequences(speaking, ["  "])


def test_a_bad_word_is_never_emitted(speaking: LLM) -> None:
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


def test_truncate_prompt_tokens_keeps_the_last_tokens(llm: LLM) -> None:
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
