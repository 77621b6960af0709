"""Every processor against a naive definition, at any node, on a copy of the logits."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider import RequestError, SamplingParams
from outrider.backends.torch.backend import TorchBackend
from outrider.core.params import DistributionParams
from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.sampling.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    Penalties,
    UserProcessor,
    processors_of,
)
from outrider.sampling.sampler import Sampler

V = 40
NEVER = float("-inf")
TOKENS = st.lists(st.integers(0, 11), max_size=12)  # few different ones, so that they come again


def logits_of(seed: int, size: int = V) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def made(prompt: int, **given: Any) -> list[Any]:
    return list(processors_of(SamplingParams(max_tokens=None, **given), prompt, 500, [1, 2], []))


# ---- penalties


def naive(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> list[float]:
    values = logits.tolist()
    for token in {*prompt, *output}:
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token in set(output):
        values[token] -= frequency * output.count(token) + presence
    return values


PENALTIES = st.tuples(
    st.sampled_from([1.0, 0.5, 1.3, 2.5]),
    st.sampled_from([0.0, -2.0, 0.7]),
    st.sampled_from([0.0, 1.5, -0.3]),
)


@settings(max_examples=150, deadline=None)
@given(prompt=TOKENS, output=TOKENS, path=TOKENS, penalties=PENALTIES, seed=st.integers(0, 99))
def test_penalties_are_the_naive_ones(
    prompt: list[int], output: list[int], path: list[int], penalties: tuple[float, float, float], seed: int
) -> None:
    repetition, frequency, presence = penalties
    processor = Penalties(
        len(prompt),
        100,
        SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence),
    )
    logits = logits_of(seed)
    kept = logits.clone()
    got = processor(Ids([*prompt, *output], path), logits)
    assert got.tolist() == pytest.approx(
        naive(kept, prompt, [*output, *path], repetition, frequency, presence), abs=1e-5
    )
    assert torch.equal(logits, kept), "the logits belong to the forward"


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), penalties=PENALTIES)
def test_penalties_are_a_function_of_the_ids(
    steps: list[tuple[list[int], list[int]]], penalties: tuple[float, float, float]
) -> None:
    """A growing row with many paths equals, bit for bit, a fresh processor over certain tokens."""
    params = SamplingParams(
        repetition_penalty=penalties[0], frequency_penalty=penalties[1], presence_penalty=penalties[2]
    )
    tokens, one, logits = [3, 5, 3], Penalties(2, 100, params), logits_of(0)
    for accepted, rejected in steps:
        for path in (rejected, [], accepted, rejected[:2]):
            whole = [*tokens, *path]
            assert torch.equal(one(Ids(tokens, path), logits), Penalties(2, 100, params)(Ids(whole), logits))
        tokens.extend(accepted)
    other = [7, 7, 8]  # another row is counted from its beginning
    assert torch.equal(one(Ids(other), logits), Penalties(2, 100, params)(Ids(other), logits))


@pytest.mark.parametrize("penalty", [0.3, 1.0001, 1.7, 12.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    for seed in range(5):
        ids = torch.randint(0, V, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
        logits = logits_of(seed)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[None].clone())[0]
        (processor,) = made(12, repetition_penalty=penalty)
        assert torch.allclose(processor(Ids(ids[:20], ids[20:]), logits), expected, rtol=1e-6)


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    (processor,) = made(3, presence_penalty=1.0, frequency_penalty=0.5)
    assert not processor.active(3) and processor.active(4)
    got = processor(Ids([4, 4, 5, 6], [6, 7]), torch.zeros(V))
    assert {i: x for i, x in enumerate(got.tolist()) if x} == {6: -2.0, 7: -1.5}


# ---- forbidden tokens


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=5),
    prompt=st.lists(st.integers(0, 3), max_size=3),
    output=st.lists(st.integers(0, 3), max_size=4),
    path=st.lists(st.integers(0, 3), max_size=4),
)
def test_bad_words_are_never_completed(
    words: list[list[int]], prompt: list[int], output: list[int], path: list[int]
) -> None:
    """A token is masked exactly where it completes a bad word within the output."""
    processor, message = BadWords(len(prompt), words), [*output, *path]
    forbidden = {
        t
        for t in range(V)
        for word in words
        if len(message) + 1 >= len(word) and [*message, t][-len(word) :] == word
    }
    ids = Ids([*prompt, *output], path)
    got = processor(ids, torch.zeros(V)) if processor.active(len(ids)) else torch.zeros(V)
    assert {i for i, x in enumerate(got.tolist()) if x == NEVER} == forbidden


def test_allowed_tokens_and_bias() -> None:
    logits = logits_of(1)
    (allowed,) = made(1, allowed_token_ids=[7, 3, 7])
    assert {i: x for i, x in enumerate(allowed(Ids([1]), logits).tolist()) if x > NEVER} == {
        3: float(logits[3]),
        7: float(logits[7]),
    }
    (bias,) = made(1, logit_bias={3: 1.5, "7": -1000, 9: 1e9})
    difference = bias(Ids([1]), logits) - logits
    assert {i: round(x, 3) for i, x in enumerate(difference.tolist()) if x} == {3: 1.5, 7: -100.0, 9: 100.0}
    assert torch.equal(logits, logits_of(1))


def test_a_draft_may_know_fewer_tokens() -> None:
    """Ids past its vocabulary are ignored, from a parameter or from the row."""
    logits = logits_of(2, 20)
    assert AllowedTokens([3, 30])(Ids([1]), logits).isfinite().nonzero().flatten().tolist() == [3]
    assert (LogitBias({3: 1.0, 30: 1.0})(Ids([1]), logits) - logits).nonzero().flatten().tolist() == [3]
    assert torch.equal(BadWords(0, [[30]])(Ids([1]), logits), logits)
    (penalties,) = made(0, presence_penalty=1.0)
    assert (penalties(Ids([3, 30], [31, 4]), logits) - logits).nonzero().flatten().tolist() == [3, 4]


# ---- functions of the user's


def test_functions_get_what_their_signature_asks_for() -> None:
    heard: list[Any] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        heard.append(output)
        return logits + 1

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        heard.append((prompt, output))
        logits[0] = 99  # theirs to write to
        return logits

    logits = logits_of(3)
    first, second = made(2, logits_processors=[two, three])
    assert torch.equal(first(Ids([1, 2, 3], [4]), logits), logits + 1)
    assert second(Ids([1, 2, 3], [4]), logits)[0] == 99
    assert heard == [[3, 4], ([1, 2], [3, 4])] and torch.equal(logits, logits_of(3))
    half = UserProcessor(0, lambda output, logits: logits.double().flip(0))(Ids([1]), logits)
    assert half.dtype == torch.float32 and half.is_contiguous()
    assert UserProcessor(0, torch.nn.Identity().forward).whole is False


def boom(output: list[int], logits: Tensor) -> Tensor:
    raise KeyError("no such state")


def leave(output: list[int], logits: Tensor) -> Tensor:
    raise SystemExit("no more of this")


def give_up(output: list[int], logits: Tensor) -> Tensor:
    raise asyncio.CancelledError


def short(output: list[int], logits: Tensor) -> Tensor:
    return logits[:5]


def nothing(output: list[int], logits: Tensor) -> None:
    logits[0] = 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (boom, "KeyError"),
        (leave, "SystemExit"),
        (give_up, "CancelledError"),
        (short, "shape"),
        (nothing, "NoneType"),
    ],
)
def test_a_function_that_fails_is_named(function: Any, message: str) -> None:
    with pytest.raises(RequestError, match=rf"logits_processors: {function.__name__}.*{message}"):
        UserProcessor(0, function)(Ids([1]), logits_of(0))


def test_an_interrupt_is_no_fault_of_a_function() -> None:
    def interrupted(output: list[int], logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        UserProcessor(0, interrupted)(Ids([1]), logits_of(0))


@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 1e39, 1e300])
def test_a_penalty_beyond_float32_makes_no_logit_infinite(penalty: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.0, 2.0])
    (processor,) = made(3, repetition_penalty=penalty)
    first, second, third, other = processor(Ids([0, 1, 2]), logits).tolist()
    assert math.isfinite(first) and math.isfinite(second)
    assert (first > 1e9, second > -1e-9) == (penalty < 1, penalty < 1)
    assert (third, other) == (0.0, 2.0)


# ---- all together


def row_of(tokens: list[int], prompt: int, **given: Any) -> Row:
    params = SamplingParams(temperature=0, max_tokens=None, **given)
    return Row(
        id="0",
        index=0,
        tokens=tokens,
        prompt=prompt,
        params=params,
        distribution=DistributionParams(0.0),
        seed=0,
        limit=100,
        ending=frozenset(),
        processors=processors_of(params, prompt, 100, [1], [[2]] if params.bad_words else []),
    )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(TorchBackend(torch.device("cpu"), torch.float32))


def test_the_order_is_that_of_vllm(sampler: Sampler) -> None:
    """Order of all processors: a bias is penalised, and a masked token stays masked."""
    row = row_of(
        [3, 4],
        1,
        allowed_token_ids=[1, 2, 3, 4, 5],
        bad_words=["x"],
        min_tokens=5,
        logit_bias={1: 50, 2: 50, 3: 4, 4: 4.5},
        logits_processors=[lambda output, logits: logits * 2],
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    expected = [NEVER, NEVER, NEVER, 2 * 4 / 2, 2 * 4.5 / 2 - 1, 0.0, *[NEVER] * (V - 6)]
    assert sampler.values(row, [], torch.zeros(V), "processed_logits").tolist() == expected
    assert sampler.pick(row, [], torch.zeros(V)) == 3
    assert sampler.pick(row, [3], torch.zeros(V)) == 4, "3 has been emitted now"
    assert sampler.top(row, [3], torch.zeros(V), 9)[0] == [4, 3, 5]


def test_request_that_masks_every_token_is_refused(sampler: Sampler) -> None:
    row = row_of([3], 1, allowed_token_ids=[2], bad_words=["x"])
    with pytest.raises(RequestError, match="allowed_token_ids, bad_words"):
        sampler.pick(row, [], torch.zeros(V))
    assert sampler.top(row, [], torch.zeros(V), 3) == ([], [])


def test_failing_processor_drafts_nothing(sampler: Sampler) -> None:
    """The drafter goes on without; the target's own pick raises the error."""
    row = row_of([3], 1, logits_processors=[boom])
    assert sampler.top(row, [], torch.zeros(V), 3) == ([], [])
    with pytest.raises(RequestError, match="boom"):
        sampler.pick(row, [], torch.zeros(V))


def test_default_parameters_need_no_processor() -> None:
    neutral: dict[str, Any] = {
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": [],
    }
    assert made(3) == made(3, **neutral) == []


def test_log_probability_values_follow_the_mode(sampler: Sampler) -> None:
    row, logits = row_of([3, 4], 1, logit_bias={5: 2.0}), logits_of(4)
    row.distribution = DistributionParams(0.5, 0.0, 3, 1.0)
    raw, whole = (
        sampler.values(row, [], logits, "raw_logprobs"),
        sampler.values(row, [], logits, "processed_logprobs"),
    )
    assert raw.tolist() == pytest.approx(
        [x - math.log(sum(math.exp(y) for y in logits.tolist())) for x in logits.tolist()], abs=1e-5
    )
    biased = logits.clone()
    biased[5] += 2
    kept = (biased / 0.5).topk(3)
    assert whole.isfinite().nonzero().flatten().tolist() == sorted(kept.indices.tolist())
    assert whole[kept.indices].tolist() == pytest.approx(kept.values.log_softmax(-1).tolist(), abs=1e-5)
    assert torch.equal(sampler.values(row, [], logits, "raw_logits"), logits)
    assert sampler.values(row, [], logits, "processed_logits")[kept.indices].tolist() == pytest.approx(
        kept.values.tolist()
    )


# ---- ids


@given(tokens=TOKENS, path=TOKENS, start=st.integers(0, 30))
def test_ids_are_the_tokens_and_then_the_path(tokens: list[int], path: list[int], start: int) -> None:
    ids, whole = Ids(tokens, path), [*tokens, *path]
    assert len(ids) == len(whole) and ids.since(start) == whole[start:]
    for count in range(len(whole) + 1):
        assert ids.tail(count) == tuple(whole[len(whole) - count :])
