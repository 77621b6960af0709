"""The same tokens under every condition: cache, memory, chunks, switches, streams, other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import pairwise
from helpers import answer, token_prompts, unpaced

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
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
DRAFTERS = ("ngram", "draft_model", "tree", "random_draft", "window", "self")


def params_of(sampling: dict[str, Any], count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, **{"max_tokens": 24, "ignore_eos": True, **sampling, **more})
        for i in range(count)
    ]


def use_drafter(llm: LLM, drafter: str, known: KnownTexts, random_draft: str, **options: Any) -> None:
    """Put one of `DRAFTERS` to work.

    ngram; draft_model: a copy of the target; tree: the correct path within a random tree; random_draft and
    window: a draft model that is nearly always wrong, with all K/V and with little; self: the target as its
    own draft with little K/V.
    """
    model = {"method": "draft_model", "model": random_draft, "num_speculative_tokens": 3}
    configs: dict[str, dict[str, Any]] = {
        "tree": {
            "method": "scripted",
            "script": Scripts(known).hidden,
            "nodes": 40,
            "num_speculative_tokens": 6,
        },
        "random_draft": {**model, "siblings": 2},
        "window": {**model, "draft_kv_budget": 9, "draft_kv_sink": 3},
        "self": {**model, "model": "self", "siblings": 2, "draft_kv_budget": 24},
    }
    if drafter in configs:
        llm.use({**configs[drafter], **options})
    else:
        use_example(llm, drafter, **options)


def plain_outputs(
    plain: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[Any], KnownTexts]:
    """Visible parts of plain decoding of each prompt alone, and the texts for scripts."""
    truth, out = KnownTexts(), []
    for prompt, p in zip(prompts, params):
        outputs = answer(plain, prompt, p).outputs
        truth.learn(prompt, p.seed or 0, outputs)
        out.append(visible_parts(outputs))
    return out, truth


def accepted(outputs: list[Any]) -> int:
    return sum(output.speculation.accepted for output in outputs)


each_sampling = pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
each_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


# ---- prefix cache


@pairwise(drafter=DRAFTERS, sampling=SAMPLING, caching=[True, False])
def test_prefix_cache_leaves_tokens_unchanged(
    caching: bool, drafter: str, sampling: dict[str, Any], llama: str, plain: LLM, random_draft: str
) -> None:
    """Prompts that share a prefix, answered twice: K/V is computed or comes from the prefix cache."""
    llm = LLM(llama, max_num_seqs=4, enable_prefix_caching=caching)
    common = random_prompts(1, seed=2, longest=40)[0] * 3
    prompts = [[*common, *tail] for tail in PROMPTS]
    params = params_of(sampling, len(prompts))
    expected, truth = plain_outputs(plain, prompts, params)
    use_drafter(llm, drafter, truth, random_draft)
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


@each_sampling
@each_drafter
def test_preempted_rows_emit_the_same_tokens(
    drafter: str, sampling: dict[str, Any], llama: str, plain: LLM, random_draft: str
) -> None:
    """Rows are preempted and computed again: K/V memory for little more than one request."""
    params = params_of(sampling, max_tokens=60)
    expected, truth = plain_outputs(plain, PROMPTS, params)
    tight = LLM(llama, max_num_seqs=4, max_model_len=128)
    use_drafter(tight, drafter, truth, random_draft)
    engine = tight.engine
    one = -(-(engine.max_len + engine.scheduler.hooks.draft_nodes(1)) // PAGE)
    slot = engine.decoder.slot_bytes + engine.drafter.footprint(engine.device).total()
    small = LLM(llama, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=one * PAGE * slot)
    use_drafter(small, drafter, truth, random_draft)
    assert small.engine.cache.pages == one
    outputs = run_staggered(small, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    check_statistics([sample for o in outputs for sample in o.outputs])
    assert small.engine.scheduler.preemptions > 0
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    check_idle(small)


# ---- chunks of prompts and the step's budget


@pairwise(drafter=DRAFTERS, chunk=[8, 16, 64, 512], sampling=SAMPLING)
def test_chunked_prompts_give_the_same_tokens(
    chunk: int, drafter: str, sampling: dict[str, Any], llama: str, plain: LLM, random_draft: str
) -> None:
    """Prompts in chunks of every size, beside decoding rows and draft tokens in the same step."""
    llm = LLM(llama, max_num_seqs=min(chunk, 4), max_num_batched_tokens=chunk)
    params = params_of(sampling)
    expected, truth = plain_outputs(plain, PROMPTS, params)
    use_drafter(llm, drafter, truth, random_draft)
    assert [visible_parts(o.outputs) for o in run_staggered(llm, PROMPTS, params)] == expected
    check_idle(llm)


@each_sampling
@each_drafter
def test_full_batch_beside_a_long_prompt(
    drafter: str, sampling: dict[str, Any], llama: str, plain: LLM, random_draft: str
) -> None:
    """As many seats as a step has tokens: decoding rows leave none for the chunks of a long prompt."""
    llm = LLM(llama, max_num_seqs=8, max_num_batched_tokens=8)
    prompts = [*([i] for i in range(10, 17)), *random_prompts(5, seed=3, longest=30)]
    params = params_of(sampling, len(prompts))
    expected, truth = plain_outputs(plain, prompts, params)
    use_drafter(llm, drafter, truth, random_draft)
    assert [visible_parts(o.outputs) for o in llm.generate(token_prompts(prompts), params)] == expected
    check_idle(llm)


@each_sampling
@each_drafter
def test_texts_fill_the_context(
    drafter: str, sampling: dict[str, Any], llama: str, random_draft: str
) -> None:
    """Texts that fill the context, one from a prompt that leaves room for one token."""
    plain, llm = LLM(llama, max_model_len=48), LLM(llama, max_num_seqs=4, max_model_len=48)
    prompts = [*PROMPTS[:3], list(range(20, 67))]
    params = params_of(sampling, len(prompts), max_tokens=None)
    expected, truth = plain_outputs(plain, prompts, params)
    assert all(
        len(prompt) + len(samples[0][0]) == 48 and samples[0][2] == "length"
        for prompt, samples in zip(prompts, expected)
    )
    use_drafter(llm, drafter, truth, random_draft)
    assert [visible_parts(o.outputs) for o in run_staggered(llm, prompts, params)] == expected
    check_idle(llm)


# ---- who speculates, and when


@each_sampling
@each_drafter
def test_speculate_false_drafts_nothing(
    drafter: str, sampling: dict[str, Any], fast: LLM, plain: LLM, random_draft: str
) -> None:
    """Every second request has speculate=False: nothing is drafted for it, and no tokens change."""
    params = [
        SamplingParams(**{**vars(p), "speculate": bool(i % 2)}) for i, p in enumerate(params_of(sampling))
    ]
    expected, truth = plain_outputs(plain, PROMPTS, params)
    use_drafter(fast, drafter, truth, random_draft)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert all(o.speculation.drafted == 0 for o in outputs[::2])
    assert drafter == "ngram" or all(o.speculation.drafted > 0 for o in outputs[1::2])
    check_idle(fast)


@pairwise(
    drafter=DRAFTERS,
    sampling=SAMPLING,
    options={
        "disable_by_batch_size": {"disable_by_batch_size": 2},
        "per_batch_size": {
            "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 2, 1], [3, 3, 2], [4, 9, 0]]
        },
    },
)
def test_speculation_switches_with_the_batch_size(
    options: dict[str, Any], drafter: str, sampling: dict[str, Any], fast: LLM, plain: LLM, random_draft: str
) -> None:
    """The batch grows and shrinks: rows switch from speculation to plain decoding and back within a text."""
    params = [
        SamplingParams(**{**vars(p), "max_tokens": 8 + 12 * i}) for i, p in enumerate(params_of(sampling))
    ]
    expected, truth = plain_outputs(plain, PROMPTS, params)
    use_drafter(fast, drafter, truth, random_draft, **options)
    unpaced(fast)  # so that the batch fills up however slow the machine is
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
    assert True in decisions[decisions.index(False) :], "speculation should have stopped and begun again"
    assert not any(guessing for rows, guessing in asked if rows > 3)


# ---- streams, samples, ids, aborts


@each_sampling
@each_drafter
def test_stream_equals_generate(
    drafter: str, sampling: dict[str, Any], fast: LLM, plain: LLM, random_draft: str
) -> None:
    """The last output of a stream equals that of generate; each earlier one is a prefix of the next."""
    params = params_of(sampling)
    expected, truth = plain_outputs(plain, PROMPTS, params)
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
def test_samples_differ_by_their_index_only(drafter: str, fast: LLM, plain: LLM, random_draft: str) -> None:
    """Sample i of n = 4 equals sample i of n = 1 and n = 2, and that of a row that runs by itself."""
    sampling = {"temperature": 0.8}
    params = params_of(sampling, n=4)
    expected, truth = plain_outputs(plain, PROMPTS, params)
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
def test_text_and_ids_are_the_same_prompt(drafter: str, fast: LLM, plain: LLM, random_draft: str) -> None:
    """A prompt as text, in a dict, or as the ids of its tokens."""
    text = "It rained on the tin roof, and the old dog dreamt on."
    ids = fast.get_tokenizer().encode(text)
    params = params_of(SAMPLING["sampled"], 1)
    expected, truth = plain_outputs(plain, [ids], params)
    use_drafter(fast, drafter, truth, random_draft)
    for prompt in (text, {"prompt": text}, {"prompt_token_ids": ids}):
        assert visible_parts(fast.generate(prompt, params)[0].outputs) == expected[0]
    check_idle(fast)


@each_drafter
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_abort_frees_pages_and_leaves_others_unchanged(
    step: int, drafter: str, fast: LLM, plain: LLM, random_draft: str
) -> None:
    """All requests but one are aborted while waiting, prefilling or decoding; the one is unchanged."""
    params = params_of(SAMPLING["sampled"], n=2)
    expected, truth = plain_outputs(plain, PROMPTS, params)
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


def test_closing_a_stream_aborts(fast: LLM, plain: LLM, random_draft: str) -> None:
    """A closed stream leaves no rows or pages; later requests get the same tokens."""
    params = params_of(SAMPLING["greedy"])
    expected, truth = plain_outputs(plain, PROMPTS, params)
    use_drafter(fast, "tree", truth, random_draft)
    stream = fast.stream(token_prompts(PROMPTS), params)
    next(stream)
    assert fast.engine.busy
    stream.close()
    check_idle(fast)
    assert [visible_parts(o.outputs) for o in fast.generate(token_prompts(PROMPTS), params)] == expected


# ---- other models


@pairwise(drafter=DRAFTERS, model=["mistral", "qwen3"], sampling=SAMPLING)
def test_sliding_windows_and_query_norms(
    model: str,
    drafter: str,
    sampling: dict[str, Any],
    random_draft: str,
    request: pytest.FixtureRequest,
    window: int = 8,
) -> None:
    """A sliding window of eight tokens, shorter than prefix and path together; norms of queries and keys."""
    path = request.getfixturevalue(model)
    plain, fast = LLM(path), LLM(path, max_num_seqs=4)
    params = params_of(sampling)
    expected, truth = plain_outputs(plain, PROMPTS, params)
    use_drafter(fast, drafter, truth, random_draft)
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    if model == "mistral":
        assert set(fast.engine.decoder.spec.windows) == {window}
    check_idle(fast)


@pairwise(
    sampling=SAMPLING,
    siblings=[1, 3],
    config={
        "short": {"max_position_embeddings": 32},
        "fewer_ids": {"vocab_size": 200},
        "more_ids": {"vocab_size": 340},
    },
)
def test_drafts_with_another_context_or_vocabulary(
    config: dict[str, int],
    siblings: int,
    sampling: dict[str, Any],
    fast: LLM,
    plain: LLM,
    checkpoints: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A draft model whose context ends within a text, and ones with fewer or more token ids."""
    folder = checkpoints / f"misfit-{request.node.callspec.id}"
    params = params_of(sampling, max_tokens=40)
    expected, _ = plain_outputs(plain, PROMPTS, params)
    fast.use({
        "method": "draft_model", "model": tiny_checkpoint(folder, seed=2, **config), "siblings": siblings,
        "vocab_mismatch": "allow",
        "num_speculative_tokens": 4,
    })  # fmt: skip
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert sum(o.speculation.drafted for o in outputs) > 0
    check_idle(fast)


# ---- without a compiler


@each_sampling
@each_drafter
def test_torch_kernels_give_the_same_tokens(
    drafter: str, sampling: dict[str, Any], llama: str, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels, which serve every device but the CPU, with chains and trees."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    plain, fast = LLM(llama), LLM(llama, max_num_seqs=4)
    assert plain.engine.decoder.backend.name.startswith("torch")
    params = params_of(sampling, 4)
    expected, truth = plain_outputs(plain, PROMPTS[:4], params)
    use_drafter(fast, drafter, truth, random_draft)
    outputs = run_staggered(fast, PROMPTS[:4], params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    check_idle(fast)
