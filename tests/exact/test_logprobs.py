"""Log-probabilities are those of the model, with the same numbers in every engine state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import answer, token_prompts
from scene import outcome
from torch import Tensor

from outrider import LLM, ConfigError, Logprob, RequestOutput, SamplingParams
from outrider.core.block_table import PAGE
from outrider.core.logprobs import Logprobs
from outrider.core.processor import Ids
from outrider.core.step_input import StepInput
from outrider.engine.runner import SLICE
from outrider.sampling.sampler import Sampler
from outrider.testing import (
    EngineDriver,
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
    use_example,
)

PROMPTS = [*random_prompts(5, seed=8), random_prompts(1, seed=9, longest=40)[0] * 3]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 20, "ignore_eos": True}
DRAFTERS = ("ngram", "draft_model", "tree", "random_draft")


def asking(count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**{"seed": i, "logprobs": 3, "prompt_logprobs": 2, **SAMPLED, **more})
        for i in range(count)
    ]


def put_to_work(llm: LLM, drafter: str, expected: list[RequestOutput], random_draft: str) -> None:
    truth = KnownTexts()
    for seed, output in enumerate(expected):
        truth.learn(output.prompt_token_ids, seed, output.outputs)
    if drafter == "tree":
        llm.use(
            {"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6}
        )
    elif drafter == "random_draft":
        llm.use({"method": "draft_model", "model": random_draft, "siblings": 2, "num_speculative_tokens": 3})
    else:
        use_example(llm, drafter)


def answers(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return [answer(llm, prompt, p) for prompt, p in zip(PROMPTS, params)]


# ---- against transformers


def whole(folder: str, tokens: list[int]) -> Tensor:
    """float32 [n, V]: the logits of transformers after each of these tokens."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([tokens])
        ).logits[0]
    return logits


def assert_entry(entry: dict[int, Logprob], token: int, values: Tensor, count: int) -> None:
    """The token first, then the best ones in order, all with their values and ranks."""
    assert next(iter(entry)) == token
    order = values.argsort(descending=True).tolist()
    assert set(entry) == {token, *order[:count]} and len(entry) <= count + 1
    for other, one in entry.items():
        assert one.logprob == pytest.approx(float(values[other]), abs=1e-4)
        assert one.rank == order.index(other) + 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_the_model(temperature: float, plain: LLM, llama: str) -> None:
    params = SamplingParams(
        **{**SAMPLED, "temperature": temperature, "logprobs": 3, "prompt_logprobs": 2, "seed": 1}
    )
    output = answer(plain, PROMPTS[0], params)
    sample = output.outputs[0]
    assert sample.logprobs is not None and output.prompt_logprobs is not None
    assert len(sample.logprobs) == len(sample.token_ids) and len(output.prompt_logprobs) == len(PROMPTS[0])
    tokens, start = [*PROMPTS[0], *sample.token_ids], len(PROMPTS[0])
    values = whole(llama, tokens).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    for at, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert_entry(entry, tokens[at], values[at - 1], 2)
    for at, entry in enumerate(sample.logprobs, start=start):
        assert_entry(entry, tokens[at], values[at - 1], 3)
        assert all(one.decoded_token == plain.tokenizer.decode([token]) for token, one in entry.items())
    sums = sum(float(values[at - 1, tokens[at]]) for at in range(start, len(tokens)))
    assert sample.cumulative_logprob == pytest.approx(sums, abs=1e-3)


def test_logprobs_of_no_token_and_of_the_whole_vocabulary(plain: LLM, llama: str) -> None:
    """0 is the token alone, -1 the whole vocabulary."""
    output = answer(
        plain, PROMPTS[1], SamplingParams(**{**SAMPLED, "logprobs": 0, "prompt_logprobs": 0, "seed": 1})
    )
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    assert [list(entry) for entry in output.outputs[0].logprobs] == [
        [token] for token in output.outputs[0].token_ids
    ]
    assert [entry and list(entry) for entry in output.prompt_logprobs] == [
        None,
        *([token] for token in PROMPTS[1][1:]),
    ]
    every = answer(
        plain, PROMPTS[1], SamplingParams(**{**SAMPLED, "logprobs": -1, "max_tokens": 2, "seed": 1})
    ).outputs[0]
    assert every.logprobs is not None and [len(entry) for entry in every.logprobs] == [300, 300]
    nothing = answer(
        plain, PROMPTS[1], SamplingParams(**{**SAMPLED, "logprobs": 0, "detokenize": False, "seed": 1})
    ).outputs[0]
    assert nothing.text == "" and nothing.logprobs is not None
    assert {one.decoded_token for entry in nothing.logprobs for one in entry.values()} == {None}


# ---- the same with and without speculation


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_no_log_probability(
    drafter: str, fast: LLM, plain: LLM, random_draft: str
) -> None:
    """Bit for bit, in ragged batches, with n = 2, beside requests with other log-probabilities."""
    params = asking(n=2)
    params[1] = SamplingParams(**{**vars(params[1]), "logprobs": None, "prompt_logprobs": None})
    params[2] = SamplingParams(**{**vars(params[2]), "logprobs": None})
    params[3] = SamplingParams(**{**vars(params[3]), "prompt_logprobs": None})
    expected = answers(plain, params)
    assert expected[1].prompt_logprobs is None and expected[1].outputs[0].cumulative_logprob is None
    put_to_work(fast, drafter, expected, random_draft)
    got = run_staggered(fast, PROMPTS, params)
    assert list(map(outcome, got)) == list(map(outcome, expected))
    assert [[s.cumulative_logprob for s in o.outputs] for o in got] == [
        [s.cumulative_logprob for s in o.outputs] for o in expected
    ]
    check_idle(fast)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_prefix_cache_hides_no_prompt(drafter: str, llama: str, plain: LLM, random_draft: str) -> None:
    """The second request finds the prompt cached; prompt_logprobs computes it again, others do not."""
    llm = LLM(llama, max_num_seqs=4)
    expected = answers(plain, asking())
    put_to_work(llm, drafter, expected, random_draft)
    for _ in range(2):
        assert list(map(outcome, run_staggered(llm, PROMPTS, asking()))) == list(map(outcome, expected))
        check_idle(llm)
    hits: list[int] = []
    match = llm.engine.cache.match
    llm.engine.cache.match = lambda *given: (hits.append(match(*given)), hits[-1])[1]
    answer(llm, PROMPTS[-1], asking()[-1])
    answer(llm, PROMPTS[-1], asking(prompt_logprobs=None)[-1])
    assert hits == [0, (len(PROMPTS[-1]) - 1) // PAGE * PAGE]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_chunked_prefill_gives_the_same_log_probabilities(
    chunk: int, drafter: str, llama: str, plain: LLM, random_draft: str
) -> None:
    llm = LLM(llama, max_num_seqs=4, max_num_batched_tokens=chunk)
    expected = answers(plain, asking())
    put_to_work(llm, drafter, expected, random_draft)
    assert list(map(outcome, run_staggered(llm, PROMPTS, asking()))) == list(map(outcome, expected))
    check_idle(llm)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preempted_rows_keep_their_logprobs(drafter: str, llama: str, plain: LLM, random_draft: str) -> None:
    """Preempted rows recompute tokens: recorded entries are kept, and none is recorded twice."""
    params = asking(max_tokens=60)
    expected = answers(plain, params)
    tight = LLM(llama, max_num_seqs=4, max_model_len=192)
    put_to_work(tight, drafter, expected, random_draft)
    slot = (
        tight.engine.decoder.footprint.total() + tight.engine.drafter.footprint(tight.engine.device).total()
    )
    small = LLM(
        llama, max_num_seqs=4, max_model_len=192, max_num_batched_tokens=16, kv_cache_memory_bytes=192 * slot
    )
    put_to_work(small, drafter, expected, random_draft)
    assert list(map(outcome, run_staggered(small, PROMPTS, params))) == list(map(outcome, expected))
    assert small.engine.scheduler.preemptions > 0
    check_idle(small)


def test_preempted_amid_the_prompt(llama: str, plain: LLM) -> None:
    """Abort after each step of the prompt: cached pages must not hide positions still to be scored."""
    prompt, params = PROMPTS[-1], asking()[-1]
    expected = outcome(answer(plain, prompt, params))
    for when in range(1, 9):
        llm = LLM(llama, max_num_seqs=2, max_num_batched_tokens=16)
        driver = EngineDriver(llm)
        request = driver.add_request(prompt, params)
        for _ in range(when):
            driver.step()
        llm.engine.scheduler._preempt(request.rows[0])
        assert llm.engine.cache.index, "there are pages to be reused"
        while not request.finished:
            driver.step()
        assert outcome(driver.finish(request)) == expected
        check_idle(llm)


def test_an_end_inside_a_path(fast: LLM, plain: LLM, random_draft: str) -> None:
    """There are as many entries as tokens, although the last step emitted more."""
    free = answers(plain, asking())
    params = asking(prompt_logprobs=None)
    for i, output in enumerate(free):
        params[i] = SamplingParams(**{**vars(params[i]), "stop_token_ids": [output.outputs[0].token_ids[9]]})
    truth = KnownTexts()
    for seed, output in enumerate(free):
        truth.learn(output.prompt_token_ids, seed, output.outputs)
    fast.use({"method": "scripted", "script": Scripts(truth).right, "num_speculative_tokens": 8})
    expected = answers(plain, params)
    got = fast.generate(token_prompts(PROMPTS), params)
    assert list(map(outcome, got)) == list(map(outcome, expected))
    for output in got:
        sample = output.outputs[0]
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids) <= 10
        assert sample.cumulative_logprob == sum(
            e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids)
        )


def test_a_stream_shows_them_as_they_come(fast: LLM, plain: LLM, random_draft: str) -> None:
    expected = answers(plain, asking())
    put_to_work(fast, "tree", expected, random_draft)
    last: dict[str, RequestOutput] = {}
    for output in fast.stream(token_prompts(PROMPTS), asking()):
        for sample in output.outputs:
            assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
        last[output.request_id] = output
    assert [outcome(last[key]) for key in sorted(last, key=int)] == list(map(outcome, expected))


# ---- modes


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_each_mode_reports_the_same_values_with_speculation(mode: str, llama: str, random_draft: str) -> None:
    """Processed log-probabilities are those of the sampling distribution, with and without speculation."""
    params = asking(repetition_penalty=1.3, top_k=4, logit_bias={9: 3.0})
    plain = LLM(llama, logprobs_mode=mode, enable_prefix_caching=False)
    expected = answers(plain, params)
    llm = LLM(llama, max_num_seqs=4, logprobs_mode=mode)
    put_to_work(llm, "tree", expected, random_draft)
    assert list(map(outcome, run_staggered(llm, PROMPTS, params))) == list(map(outcome, expected))
    output = expected[0]
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    first, scored = output.outputs[0].logprobs[0], output.prompt_logprobs[1]
    raw = whole(llama, PROMPTS[0])
    shares = sum(2.718281828459045**one.logprob for one in first.values())
    if mode == "processed_logprobs":
        assert len(first) <= 4 and 0.5 < shares <= 1 + 1e-6
        assert scored is not None and scored[PROMPTS[0][1]].logprob == pytest.approx(
            float(raw[0].log_softmax(-1)[PROMPTS[0][1]]), abs=1e-4
        )
    else:
        assert scored is not None and scored[PROMPTS[0][1]].logprob == pytest.approx(
            float(raw[0, PROMPTS[0][1]]), abs=1e-4
        )
        token = output.outputs[0].token_ids[0]
        assert (first[token].logprob == pytest.approx(float(raw[-1, token]), abs=1e-4)) == (
            mode == "raw_logits"
        )


def test_an_unknown_mode_is_refused_with_the_nearest(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"logprobs_mode 'raw_logprob'.*Did you mean 'raw_logprobs'"):
        LLM(llama, logprobs_mode="raw_logprob")


# ---- what it costs


def test_who_asks_for_nothing_pays_nothing(
    fast: LLM, plain: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No processor, no view of the ids, no log-softmax and no logits of a prompt's rows."""
    params = [SamplingParams(**{**SAMPLED, "seed": i}) for i in range(len(PROMPTS))]
    expected = answers(plain, params)
    put_to_work(fast, "draft_model", expected, random_draft)

    def never(*given: Any) -> Any:
        raise AssertionError("nobody asked")

    scored: list[int] = []
    count_logits(fast, scored, monkeypatch)
    monkeypatch.setattr(Sampler, "values", never)
    monkeypatch.setattr(Logprobs, "__init__", never)
    monkeypatch.setattr(Ids, "__init__", never)
    steps = fast.engine.steps
    got = run_staggered(fast, PROMPTS, params)
    assert list(map(outcome, got)) == list(map(outcome, expected))
    assert len(scored) == fast.engine.steps - steps and max(scored) < 40


def count_logits(llm: LLM, scored: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows of logits are computed at once."""
    decoder = llm.engine.decoder
    forward_step, head_logits = decoder.forward_step, decoder.head_logits
    monkeypatch.setattr(decoder, "head_logits", lambda x: (scored.append(len(x)), head_logits(x))[1])

    def counting(step_input: StepInput, *given: Any) -> Any:
        scored.append(len(step_input.logits_rows))
        return forward_step(step_input, *given)

    monkeypatch.setattr(decoder, "forward_step", counting)


def test_prompt_logits_are_computed_in_slices(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, each once, and only for the request that asks."""
    scored: list[int] = []
    count_logits(plain, scored, monkeypatch)
    asks, silent = asking()[-1], SamplingParams(**SAMPLED)
    plain.generate(token_prompts([PROMPTS[-1], PROMPTS[-1]]), [asks, silent])
    assert max(scored) <= SLICE
    assert sum(scored) == len(PROMPTS[-1]) - 1 + 2 * 20
