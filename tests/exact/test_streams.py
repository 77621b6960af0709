"""Streams, samples, ids and aborts: the same tokens as plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
from conditions import PROMPTS, SAMPLING, each_drafter, each_sampling, params_of, plain_outputs, use_drafter
from drafter_cases import PlainOutputs
from helpers import token_prompts

from outrider import LLM, SamplingParams
from outrider.testing import EngineDriver, KnownTexts, check_idle, run_staggered, visible_parts


@each_sampling
@each_drafter
def test_stream_equals_generate(
    drafter: str, sampling: dict[str, Any], fast: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """The last output of a stream equals that of generate; each earlier one is a prefix of the next."""
    params = params_of(sampling)
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
    use_drafter(fast, drafter, truth, random_draft)
    outputs = fast.generate(token_prompts(PROMPTS), params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    last: dict[str, Any] = {}
    for output in fast.stream(token_prompts(PROMPTS), params):
        if output.request_id in last:
            before, now = last[output.request_id].outputs[0], output.outputs[0]
            assert now.token_ids[: len(before.token_ids)] == before.token_ids
            assert now.text.startswith(before.text)
        last[output.request_id] = output
    assert [visible_parts(last[key].outputs) for key in sorted(last, key=int)] == expected
    assert all(output.finished for output in last.values())
    check_idle(fast)


@each_drafter
def test_samples_differ_by_their_index_only(
    drafter: str, fast: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """Sample i of n = 4 equals sample i of n = 1 and n = 2, and that of a row that runs by itself."""
    sampling = {"temperature": 0.8}
    params = params_of(sampling, n=4)
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
    assert all(len({str(sample) for sample in samples}) == 4 for samples in expected), "samples should differ"
    use_drafter(fast, drafter, truth, random_draft)
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params)] == expected
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params_of(sampling))] == [
        samples[:1] for samples in expected
    ]
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params_of(sampling, n=2))] == [
        samples[:2] for samples in expected
    ]
    driver = EngineDriver(fast)
    for number in range(3):  # sample 3 as a lone row, which shares no prompt
        row = driver.make_request(PROMPTS[number], params[number]).rows[3]
        row.source = None
        fast.engine.add(row)
        while row.finish_reason is None:
            fast.engine.step()
        assert row.output == expected[number][3][0]
    check_idle(fast)


@each_drafter
def test_unseeded_requests_use_the_engine_seed(drafter: str, llama: str, random_draft: str) -> None:
    """Requests without a seed derive one from the engine's seed and their order, with any drafter."""
    params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    same, other = (
        [o.outputs[0].token_ids for o in LLM(llama, seed=s).generate(token_prompts(PROMPTS), params)]
        for s in (11, 12)
    )
    assert same != other
    llm = LLM(llama, max_num_seqs=4, seed=11)
    use_drafter(llm, drafter, KnownTexts(), random_draft)
    assert [o.outputs[0].token_ids for o in llm.generate(token_prompts(PROMPTS), params)] == same


@each_drafter
def test_text_and_ids_are_the_same_prompt(
    drafter: str, fast: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """A prompt as text, in a dict, or as the ids of its tokens."""
    text = "It rained on the tin roof, and the old dog dreamt on."
    ids = fast.get_tokenizer().encode(text)
    params = params_of(SAMPLING["sampled"], 1)
    expected, truth = plain_outputs(outputs_of, [ids], params)
    use_drafter(fast, drafter, truth, random_draft)
    for prompt in (text, {"prompt": text}, {"prompt_token_ids": ids}):
        assert visible_parts(fast.generate(prompt, params)[0].outputs) == expected[0]
    check_idle(fast)


@each_drafter
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_abort_frees_pages_and_leaves_others_unchanged(
    step: int, drafter: str, fast: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """All requests but one are aborted while waiting, prefilling or decoding; the one is unchanged."""
    params = params_of(SAMPLING["sampled"], n=2)
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
    use_drafter(fast, drafter, truth, random_draft)
    driver = EngineDriver(fast)
    requests = [driver.add_request(prompt, p) for prompt, p in zip(PROMPTS, params)]
    for _ in range(step):
        driver.step()
    for request in requests[1:]:
        driver.abort_request(request)
        fast.engine.check()
    for request, samples in zip(requests[1:], expected[1:]):
        for mine, theirs in zip(driver.finish(request).outputs, samples):
            assert mine.finish_reason == "abort" or step == 5
            assert mine.token_ids == theirs[0][: len(mine.token_ids)]
    while not requests[0].finished:
        driver.step()
    assert visible_parts(driver.finish(requests[0]).outputs) == expected[0]
    check_idle(fast)


def test_closing_a_stream_aborts(fast: LLM, outputs_of: PlainOutputs, random_draft: str) -> None:
    """A closed stream leaves no rows or pages; later requests get the same tokens."""
    params = params_of(SAMPLING["greedy"])
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
    use_drafter(fast, "tree", truth, random_draft)
    stream = fast.stream(token_prompts(PROMPTS), params)
    next(stream)
    assert fast.engine.busy
    stream.close()
    check_idle(fast)
    assert [visible_parts(o.outputs) for o in fast.generate(token_prompts(PROMPTS), params)] == expected
