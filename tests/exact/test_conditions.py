"""The same tokens under every condition: cache, memory, chunks, switches, streams, other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conditions import (
    DRAFTERS,
    PROMPTS,
    SAMPLING,
    accepted,
    each_drafter,
    each_sampling,
    params_of,
    plain_outputs,
    same_outputs,
    use_drafter,
)
from covering import pairwise, parametrized
from drafter_cases import PlainOutputs
from helpers import token_prompts, unpaced

from outrider import LLM, SamplingParams
from outrider.core.block_table import PAGE
from outrider.testing import (
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    tiny_checkpoint,
    visible_parts,
)

# ---- prefix cache


@pairwise(drafter=DRAFTERS, sampling=SAMPLING, caching=[True, False])
def test_prefix_cache_leaves_tokens_unchanged(
    caching: bool,
    drafter: str,
    sampling: dict[str, Any],
    llama: str,
    outputs_of: PlainOutputs,
    random_draft: str,
) -> None:
    """Prompts that share a prefix, answered twice: K/V is computed or comes from the prefix cache."""
    llm = LLM(llama, max_num_seqs=4, enable_prefix_caching=caching)
    common = random_prompts(1, seed=2, longest=40)[0] * 3
    prompts = [[*common, *tail] for tail in PROMPTS]
    params = params_of(sampling, len(prompts))
    expected, truth = plain_outputs(outputs_of, prompts, params)
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
    drafter: str, sampling: dict[str, Any], llama: str, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """Rows are preempted and computed again: K/V memory for little more than one request."""
    params = params_of(sampling, max_tokens=60)
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
    tight = LLM(llama, max_num_seqs=4, max_model_len=128)
    use_drafter(tight, drafter, truth, random_draft)
    engine = tight.engine
    one = -(-(engine.max_len + engine.scheduler.hooks.draft_nodes(1)) // PAGE)
    slot = engine.decoder.footprint.total() + engine.drafter.footprint(engine.device).total()
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
    chunk: int,
    drafter: str,
    sampling: dict[str, Any],
    llama: str,
    outputs_of: PlainOutputs,
    random_draft: str,
) -> None:
    """Prompts in chunks of every size, beside decoding rows and draft tokens in the same step."""
    llm = LLM(llama, max_num_seqs=min(chunk, 4), max_num_batched_tokens=chunk)
    same_outputs(llm, drafter, params_of(sampling), outputs_of, random_draft)


@each_sampling
@each_drafter
def test_full_batch_beside_a_long_prompt(
    drafter: str, sampling: dict[str, Any], llama: str, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """As many seats as a step has tokens: decoding rows leave none for the chunks of a long prompt."""
    llm = LLM(llama, max_num_seqs=8, max_num_batched_tokens=8)
    prompts = [*([i] for i in range(10, 17)), *random_prompts(5, seed=3, longest=30)]
    params = params_of(sampling, len(prompts))
    expected, truth = plain_outputs(outputs_of, prompts, params)
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
    outputs = same_outputs(llm, drafter, params, PlainOutputs(plain), random_draft, prompts)
    for prompt, output in zip(prompts, outputs):
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output.outputs[0].token_ids) == 48


# ---- who speculates, and when


@each_sampling
@each_drafter
def test_speculate_false_drafts_nothing(
    drafter: str, sampling: dict[str, Any], fast: LLM, outputs_of: PlainOutputs, random_draft: str
) -> None:
    """Every second request has speculate=False: nothing is drafted for it, and no tokens change."""
    params = [
        SamplingParams(**{**vars(p), "speculate": bool(i % 2)}) for i, p in enumerate(params_of(sampling))
    ]
    outputs = same_outputs(fast, drafter, params, outputs_of, random_draft)
    assert all(o.speculation.drafted == 0 for o in outputs[::2])
    assert drafter == "ngram" or all(o.speculation.drafted > 0 for o in outputs[1::2])


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
    options: dict[str, Any],
    drafter: str,
    sampling: dict[str, Any],
    fast: LLM,
    outputs_of: PlainOutputs,
    random_draft: str,
) -> None:
    """The batch grows and shrinks: rows switch from speculation to plain decoding and back within a text."""
    params = [
        SamplingParams(**{**vars(p), "max_tokens": 8 + 12 * i}) for i, p in enumerate(params_of(sampling))
    ]
    expected, truth = plain_outputs(outputs_of, PROMPTS, params)
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
    decisions = [drafting for rows, drafting in asked]
    assert True in decisions[decisions.index(False) :], "speculation should have stopped and begun again"
    assert not any(drafting for rows, drafting in asked if rows > 3)


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
    outputs = same_outputs(fast, drafter, params_of(sampling), PlainOutputs(plain), random_draft)
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
    if model == "mistral":
        assert set(fast.engine.decoder.spec.windows) == {window}


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
    outputs_of: PlainOutputs,
    checkpoints: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A draft model whose context ends within a text, and ones with fewer or more token ids."""
    folder = checkpoints / f"misfit-{request.node.callspec.id}"
    params = params_of(sampling, max_tokens=40)
    expected, _ = plain_outputs(outputs_of, PROMPTS, params)
    fast.use(
        {
            "method": "draft_model",
            "model": tiny_checkpoint(folder, seed=2, **config),
            "siblings": siblings,
            "vocab_mismatch": "allow",
            "num_speculative_tokens": 4,
        }
    )
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert sum(o.speculation.drafted for o in outputs) > 0
    check_idle(fast)


# ---- without a compiler


@parametrized(
    {"drafter": DRAFTERS, "sampling": [*SAMPLING]},
    {(drafter, [*SAMPLING][i % 2]) for i, drafter in enumerate(DRAFTERS)},
)
def test_torch_kernels_give_the_same_tokens(
    drafter: str, sampling: str, llama: str, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels, which serve every device but the CPU, with chains and trees."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    plain, fast = LLM(llama), LLM(llama, max_num_seqs=4)
    assert plain.engine.decoder.backend.name.startswith("torch")
    params = params_of(SAMPLING[sampling], 4)
    outputs = same_outputs(fast, drafter, params, PlainOutputs(plain), random_draft, PROMPTS[:4])
    if drafter in ("draft_model", "tree", "self"):
        assert accepted(outputs) > 0
