"""The same tokens under every condition that the engine may meet: cache, memory, chunks, switches, streams, other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import answer, token_prompts

from outrider import LLM, SamplingParams
from outrider.core.block_table import PAGE
from outrider.testing import (
    EngineDriver,
    KnownTexts,
    Scripts,
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    tiny_checkpoint,
    use_example,
    visible_parts,
)

PROMPTS = random_prompts(6, seed=1)
LAWS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}]
DRAFTERS = ("ngram", "draft_model", "tree", "stranger", "window", "self")


def params_of(distribution: dict[str, Any], count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, **{"max_tokens": 24, "ignore_eos": True, **distribution, **more})
        for i in range(count)
    ]


def put_to_work(llm: LLM, drafter: str, truth: KnownTexts, stranger: str, **options: Any) -> None:
    """ngram; a copy of the target as draft; a bush that hides the truth; a draft model that is always wrong, with all of the context and
    with little of it; the target as its own draft within a budget."""
    if drafter == "tree":
        llm.use(
            {
                "method": "scripted",
                "script": Scripts(truth).hidden,
                "nodes": 40,
                "num_speculative_tokens": 6,
                **options,
            }
        )
    elif drafter == "stranger":
        llm.use(
            {
                "method": "draft_model",
                "model": stranger,
                "siblings": 2,
                "num_speculative_tokens": 3,
                **options,
            }
        )
    elif drafter == "window":
        budget = {"draft_kv_budget": 9, "draft_kv_sink": 3}
        llm.use(
            {"method": "draft_model", "model": stranger, "num_speculative_tokens": 3, **budget, **options}
        )
    elif drafter == "self":
        llm.use(
            {
                "method": "draft_model",
                "model": "self",
                "siblings": 2,
                "num_speculative_tokens": 3,
                "draft_kv_budget": 24,
                **options,
            }
        )
    else:
        use_example(llm, drafter, **options)


def expected_of(
    plain: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[Any], KnownTexts]:
    """What plain decoding says to each prompt alone, and the same as a truth for scripts."""
    truth, out = KnownTexts(), []
    for prompt, p in zip(prompts, params):
        outputs = answer(plain, prompt, p).outputs
        truth.learn(prompt, p.seed or 0, outputs)
        out.append(visible_parts(outputs))
    return out, truth


def accepted(outputs: list[Any]) -> int:
    return sum(output.speculation.accepted for output in outputs)


probs_of = pytest.mark.parametrize("distribution", LAWS, ids=["greedy", "sampled"])
drafter_of = pytest.mark.parametrize("drafter", DRAFTERS)


# ---- prefix cache


@probs_of
@drafter_of
@pytest.mark.parametrize("caching", [True, False])
def test_prefix_cache(
    caching: bool, drafter: str, distribution: dict[str, Any], llama: str, plain: LLM, stranger: str
) -> None:
    """Asking twice, then for continuations that share a beginning: same tokens, computed again or taken from the cache."""
    llm = LLM(llama, max_num_seqs=4, enable_prefix_caching=caching)
    common = random_prompts(1, seed=2, longest=40)[0] * 3
    prompts = [[*common, *tail] for tail in PROMPTS]
    params = params_of(distribution, len(prompts))
    expected, truth = expected_of(plain, prompts, params)
    put_to_work(llm, drafter, truth, stranger)
    hits: list[int] = []
    match = llm.engine.cache.match

    def listening(*given: Any) -> int:
        hits.append(match(*given))
        return hits[-1]

    llm.engine.cache.match = listening  # type: ignore[method-assign]
    for _ in range(2):
        hits.clear()
        assert [visible_parts(o.outputs) for o in run_staggered(llm, prompts, params)] == expected
        check_idle(llm)
        assert len(hits) >= len(prompts)
    if caching:
        assert min(hits) >= len(common) // PAGE * PAGE, (
            "the second time every prompt should have been in the cache"
        )
        assert llm.engine.cache.index
    else:
        assert max(hits) == 0
        assert not llm.engine.cache.index


# ---- little memory


@probs_of
@drafter_of
def test_preemption(
    drafter: str, distribution: dict[str, Any], llama: str, plain: LLM, stranger: str
) -> None:
    """Rows lose their cache midway and compute it again, with guesses around; memory for little more than one request."""
    params = params_of(distribution, max_tokens=60)
    expected, truth = expected_of(plain, PROMPTS, params)
    tight = LLM(llama, max_num_seqs=4, max_model_len=128)
    put_to_work(tight, drafter, truth, stranger)
    engine = tight.engine
    one = -(-(engine.max_len + engine.scheduler.draft_tree(1)) // PAGE)
    slot = engine.decoder.slot_bytes + engine.drafter.slot_bytes
    small = LLM(llama, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=one * PAGE * slot)
    put_to_work(small, drafter, truth, stranger)
    assert small.engine.cache.pages == one
    outputs = run_staggered(small, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    check_statistics([sample for o in outputs for sample in o.outputs])
    assert small.engine.scheduler.preemptions > 0
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    check_idle(small)


# ---- chunks of prompts and the step's budget


@probs_of
@drafter_of
@pytest.mark.parametrize("chunk", [8, 16, 64, 512])
def test_chunks(
    chunk: int, drafter: str, distribution: dict[str, Any], llama: str, plain: LLM, stranger: str
) -> None:
    """Prompts cut into chunks of every size, beside decodes and guesses that share the step's budget."""
    llm = LLM(llama, max_num_seqs=min(chunk, 4), max_num_batched_tokens=chunk)
    params = params_of(distribution)
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(llm, drafter, truth, stranger)
    assert [visible_parts(o.outputs) for o in run_staggered(llm, PROMPTS, params)] == expected
    check_idle(llm)


@probs_of
@drafter_of
def test_every_seat_taken(
    drafter: str, distribution: dict[str, Any], llama: str, plain: LLM, stranger: str
) -> None:
    """As many seats as a step has tokens: decodes and their share of guesses leave nothing for the chunks of a long prompt."""
    llm = LLM(llama, max_num_seqs=8, max_num_batched_tokens=8)
    prompts = [*([i] for i in range(10, 17)), *random_prompts(5, seed=3, longest=30)]
    params = params_of(distribution, len(prompts))
    expected, truth = expected_of(plain, prompts, params)
    put_to_work(llm, drafter, truth, stranger)
    assert [visible_parts(o.outputs) for o in llm.generate(token_prompts(prompts), params)] == expected
    check_idle(llm)


@probs_of
@drafter_of
def test_up_to_the_last_position(
    drafter: str, distribution: dict[str, Any], llama: str, stranger: str
) -> None:
    """Texts that fill the context to its last token, one from a prompt that leaves room for a single one."""
    plain, llm = LLM(llama, max_model_len=48), LLM(llama, max_num_seqs=4, max_model_len=48)
    prompts = [*PROMPTS[:3], list(range(20, 67))]
    params = params_of(distribution, len(prompts), max_tokens=None)
    expected, truth = expected_of(plain, prompts, params)
    assert all(
        len(prompt) + len(samples[0][0]) == 48 and samples[0][2] == "length"
        for prompt, samples in zip(prompts, expected)
    )
    put_to_work(llm, drafter, truth, stranger)
    assert [visible_parts(o.outputs) for o in run_staggered(llm, prompts, params)] == expected
    check_idle(llm)


# ---- who speculates, and when


@probs_of
@drafter_of
def test_speculate_false(
    drafter: str, distribution: dict[str, Any], fast: LLM, plain: LLM, stranger: str
) -> None:
    """Every second request declines to speculate: nothing is drafted for it, and nobody's tokens change."""
    params = [
        SamplingParams(**{**vars(p), "speculate": bool(i % 2)}) for i, p in enumerate(params_of(distribution))
    ]
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, drafter, truth, stranger)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert all(o.speculation.drafted == 0 for o in outputs[::2])
    assert drafter == "ngram" or all(o.speculation.drafted > 0 for o in outputs[1::2])
    check_idle(fast)


@probs_of
@drafter_of
@pytest.mark.parametrize(
    "options",
    [
        {"disable_by_batch_size": 2},
        {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 2, 1], [3, 3, 2], [4, 9, 0]]},
    ],
    ids=["disable_by_batch_size", "per_batch_size"],
)
def test_switching_with_the_batch(
    options: dict[str, Any], drafter: str, distribution: dict[str, Any], fast: LLM, plain: LLM, stranger: str
) -> None:
    """The batch grows and shrinks, so that rows go from guessing to plain decoding and back in the middle of a text."""
    params = [
        SamplingParams(**{**vars(p), "max_tokens": 8 + 12 * i}) for i, p in enumerate(params_of(distribution))
    ]
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, drafter, truth, stranger, **options)
    fast.engine.scheduler.chunk = lambda: (
        1 << 20
    )  # prompts at once, so that the batch fills up however slow the machine is
    asked: list[tuple[int, bool]] = []
    budget = fast.engine.controller.budget

    def listening(batch: Any) -> Any:
        granted = budget(batch)
        asked.append((len(batch), any(b.nodes for b in granted)))
        return granted

    fast.engine.controller.budget = listening  # type: ignore[method-assign]
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params)] == expected
    check_idle(fast)
    decisions = [guessing for rows, guessing in asked]
    assert True in decisions[decisions.index(False) :], "guessing should have stopped and begun again"
    assert not any(guessing for rows, guessing in asked if rows > 3)


# ---- streams, samples, ids, aborts


@probs_of
@drafter_of
def test_stream_equals_generate(
    drafter: str, distribution: dict[str, Any], fast: LLM, plain: LLM, stranger: str
) -> None:
    """The last output of a stream is that of generate, text included; what came before only grows towards it."""
    params = params_of(distribution)
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, drafter, truth, stranger)
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


@drafter_of
def test_samples(drafter: str, fast: LLM, plain: LLM, stranger: str) -> None:
    """n = 4 is four runs that differ in their sample index alone: the first is the one of n = 1, and each can be had by itself."""
    distribution = {"temperature": 0.8}
    params = params_of(distribution, n=4)
    expected, truth = expected_of(plain, PROMPTS, params)
    assert all(len({str(sample) for sample in samples}) == 4 for samples in expected), "samples should differ"
    put_to_work(fast, drafter, truth, stranger)
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params)] == expected
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params_of(distribution))] == [
        samples[:1] for samples in expected
    ]
    assert [visible_parts(o.outputs) for o in run_staggered(fast, PROMPTS, params_of(distribution, n=2))] == [
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


@drafter_of
def test_seed_of_the_engine(drafter: str, llama: str, stranger: str) -> None:
    """Requests without a seed take theirs from the engine's, in the order in which they came: speculation changes nothing."""
    params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    same, other = (
        [o.outputs[0].token_ids for o in LLM(llama, seed=s).generate(token_prompts(PROMPTS), params)]
        for s in (11, 12)
    )
    assert same != other
    llm = LLM(llama, max_num_seqs=4, seed=11)
    put_to_work(llm, drafter, KnownTexts(), stranger)
    assert [o.outputs[0].token_ids for o in llm.generate(token_prompts(PROMPTS), params)] == same


@drafter_of
def test_text_and_ids_are_the_same_prompt(drafter: str, fast: LLM, plain: LLM, stranger: str) -> None:
    """A prompt as text, in a dict, or as the ids of its tokens."""
    text = "It rained on the tin roof, and the old dog dreamt on."
    ids = fast.get_tokenizer().encode(text)
    params = params_of(LAWS[1], 1)
    expected, truth = expected_of(plain, [ids], params)
    put_to_work(fast, drafter, truth, stranger)
    for prompt in (text, {"prompt": text}, {"prompt_token_ids": ids}):
        assert visible_parts(fast.generate(prompt, params)[0].outputs) == expected[0]
    check_idle(fast)


@drafter_of
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_abort_leaks_nothing(step: int, drafter: str, fast: LLM, plain: LLM, stranger: str) -> None:
    """All requests but one are aborted after some step, waiting, prefilling or guessing: the one goes on unmoved."""
    params = params_of(LAWS[1], n=2)
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, drafter, truth, stranger)
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


def test_closing_a_stream_aborts(fast: LLM, plain: LLM, stranger: str) -> None:
    """A reader that walks away leaves nothing behind, and the next one gets the same tokens."""
    params = params_of(LAWS[0])
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, "tree", truth, stranger)
    stream = fast.stream(token_prompts(PROMPTS), params)
    next(stream)
    assert fast.engine.busy
    stream.close()
    check_idle(fast)
    assert [visible_parts(o.outputs) for o in fast.generate(token_prompts(PROMPTS), params)] == expected


# ---- other models


@probs_of
@drafter_of
@pytest.mark.parametrize("model", ["mistral", "qwen3"])
def test_other_models(
    model: str,
    drafter: str,
    distribution: dict[str, Any],
    stranger: str,
    request: pytest.FixtureRequest,
    window: int = 8,
) -> None:
    """A sliding window of eight tokens, shorter than path and prefix together; and norms of queries and keys."""
    path = request.getfixturevalue(model)
    plain, fast = LLM(path), LLM(path, max_num_seqs=4)
    params = params_of(distribution)
    expected, truth = expected_of(plain, PROMPTS, params)
    put_to_work(fast, drafter, truth, stranger)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    if model == "mistral":
        assert set(fast.engine.decoder.spec.windows) == {window}
    check_idle(fast)


@probs_of
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize(
    "config",
    [{"max_position_embeddings": 32}, {"vocab_size": 200}, {"vocab_size": 340}],
    ids=["short", "fewer_ids", "more_ids"],
)
def test_drafts_that_fit_badly(
    config: dict[str, int],
    siblings: int,
    distribution: dict[str, Any],
    fast: LLM,
    plain: LLM,
    checkpoints: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A draft whose context ends in the middle of a text, and drafts that lack some of the target's ids or have others."""
    folder = checkpoints / f"misfit-{request.node.callspec.id}"
    params = params_of(distribution, max_tokens=40)
    expected, _ = expected_of(plain, PROMPTS, params)
    fast.use({
        "method": "draft_model", "model": tiny_checkpoint(folder, seed=2, **config), "siblings": siblings, "vocab_mismatch": "allow",
        "num_speculative_tokens": 4,
    })  # fmt: skip
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert sum(o.speculation.drafted for o in outputs) > 0
    check_idle(fast)


# ---- without a compiler


@probs_of
@drafter_of
def test_torch_kernels(
    drafter: str, distribution: dict[str, Any], llama: str, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels, which every other device uses, alone and in company, chains and trees."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    plain, fast = LLM(llama), LLM(llama, max_num_seqs=4)
    assert plain.engine.decoder.kernels.name.startswith("torch")
    params = params_of(distribution, 4)
    expected, truth = expected_of(plain, PROMPTS[:4], params)
    put_to_work(fast, drafter, truth, stranger)
    outputs = run_staggered(fast, PROMPTS[:4], params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    check_idle(fast)
