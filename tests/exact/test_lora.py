"""LoRA adapters: the same bits in any batch, with any drafter and cache state."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrized
from helpers import answer, token_prompts, write_adapter

from outrider import LLM, LoRARequest, RequestError, SamplingParams, draft
from outrider.cache.pages import Cache
from outrider.core.block_table import PAGE, ROOT
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    tiny_checkpoint,
    use_example,
    visible_parts,
)

PROMPTS = random_prompts(6, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ODD = {"hidden_size": 60, "intermediate_size": 90, "head_dim": 14}  # no whole vectors
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def loras(llama: str, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """All projections; attention only, rank 7; two projections of rank 16, stabilised."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", llama, 1)
    write_adapter(folder / "b", llama, 2, "q k v o", r=7, lora_alpha=14)
    write_adapter(folder / "c", llama, 3, "gate v", r=16, lora_alpha=4, use_rslora=True)
    return [LoRARequest(name, i + 1, str(folder / name)) for i, name in enumerate("abc")]


@pytest.fixture(scope="module")
def llm(llama: str) -> LLM:
    return LLM(llama, max_num_seqs=4, enable_lora=True, max_loras=3)


@pytest.fixture(scope="module")
def alone(llama: str) -> Callable[..., Any]:
    """Plain output of a prompt with an adapter, alone; memoized."""
    plain, known = LLM(llama, max_num_seqs=4, enable_prefix_caching=False, enable_lora=True, max_loras=3), {}

    def ask(prompt: list[int], params: SamplingParams, lora: LoRARequest | None) -> Any:
        key = tuple(prompt), params, lora
        if key not in known:
            known[key] = plain.generate({"prompt_token_ids": prompt}, params, lora_request=lora)[0].outputs
        return known[key]

    return ask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_is_bit_identical_in_any_batch(dtype: str, tmp_path: Path) -> None:
    """Hidden states of rows with three adapters and none: in one forward, alone, and without LoRA."""
    model = tiny_checkpoint(tmp_path / "model", **ODD)
    llm = LLM(model, dtype=dtype, enable_lora=True, max_loras=3)
    engine, bare = llm.engine, LLM(model, dtype=dtype).engine
    assert engine.adapters is not None
    adapters: list[Any] = [None]
    for i, projections in enumerate(["q k v o gate up down", "q v", "k o down"], start=1):
        write_adapter(tmp_path / str(i), model, i, projections, r=3 * i)
        lora = LoRARequest(str(i), i, str(tmp_path / str(i)))
        engine.adapters.check(lora)
        adapters.append(engine.adapters.take(lora, set()))
    mixed, pool, tables = StepInput(), engine.decoder.pool(512), []
    lengths = [5, 9, 1, 6, 3, 17, 2]
    for i, length in enumerate(lengths):
        first = mixed.length
        tables.append(array("i", range(i * 32, i * 32 + 32)))
        mixed.chain(tables[-1], 0, list(range(5 + i, 5 + i + length)))
        if (adapter := adapters[i % 4]) is not None:
            mixed.adapt(first, adapter)
    together, first = engine.decoder.forward(mixed.build(), pool).clone(), 0
    for i, length in enumerate(lengths):
        for decoder in [engine.decoder, bare.decoder] if i % 4 == 0 else [engine.decoder]:
            pool = decoder.pool(512)
            for start in range(length):  # token by token
                step_input = StepInput()
                step_input.chain(tables[i], start, [5 + i + start])
                if (adapter := adapters[i % 4]) is not None:
                    step_input.adapt(0, adapter)
                assert torch.equal(decoder.forward(step_input.build(), pool)[0], together[first + start]), (
                    i,
                    start,
                )
        first += length


DRAFTERS = ["tree", "chain", "union", *(name for name in draft.names() if name != "union")]
SAMPLING = {"greedy": GREEDY, "sampled": SAMPLED}
# Chains, trees and a union with both; the other methods, which see as little of an adapter, in turns.
SELECTED = {
    (name, way) for i, name in enumerate(DRAFTERS) for j, way in enumerate(SAMPLING) if i < 3 or i % 2 == j
}


@parametrized({"drafter": DRAFTERS, "sampling": [*SAMPLING]}, SELECTED)
def test_every_drafter_keeps_the_text_of_each_adapter(
    drafter: str,
    sampling: str,
    llm: LLM,
    loras: list[LoRARequest],
    alone: Callable[..., Any],
    llama: str,
) -> None:
    """Six prompts with three adapters and none, above max_num_seqs; the second round hits the cache."""
    params = SAMPLING[sampling]
    chosen = [loras[0], None, loras[1], loras[2], loras[0], None]
    expected, truth = [], KnownTexts()
    for prompt, lora in zip(PROMPTS, chosen):
        outputs = alone(prompt, params, lora)
        truth.learn(prompt, params.seed or 0, outputs)
        expected.append(visible_parts(outputs))
    if drafter == "tree":
        known = truth.continuation
        truth.continuation = lambda row, count: known(_seeded(row, params), count)
        llm.use(
            {"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6}
        )
    elif drafter == "chain":
        llm.use({"method": "draft_model", "model": llama, "num_speculative_tokens": 3})
    else:
        use_example(llm, drafter)
    for _ in range(2):
        outputs = llm.generate(token_prompts(PROMPTS), params, lora_request=chosen)
        assert [visible_parts(o.outputs) for o in outputs] == expected
        check_idle(llm)
    if drafter in ("tree", "chain"):
        assert sum(o.speculation.accepted for o in outputs) > 0


def _seeded(row: Row, params: SamplingParams) -> Row:
    """Greedy requests draw a seed of their own, which the truth does not know."""
    row.seed = params.seed or 0
    return row


def test_without_an_adapter_nothing_changes(llm: LLM, plain: LLM, loras: list[LoRARequest]) -> None:
    """Prompts without adapter, beside prompts with one, get the output of an engine without LoRA."""
    llm.use(None)
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED, lora_request=[loras[0], None] * 3)
    for prompt, output in list(zip(PROMPTS, outputs))[1::2]:
        assert visible_parts(output.outputs) == visible_parts(answer(plain, prompt, SAMPLED).outputs)


def test_on_weights_of_few_bits(llama: str, loras: list[LoRARequest]) -> None:
    """The base in 4 bits, K/V in 8, the adapters in float32."""
    chosen = [loras[i % 3] for i in range(len(PROMPTS))]
    bits = {"quantization": "int4", "kv_cache_dtype": "int8"}
    plain = LLM(llama, enable_lora=True, max_loras=3, enable_prefix_caching=False, **bits)
    expected = [
        plain.generate(prompt, SAMPLED, lora_request=lora)[0]
        for prompt, lora in zip(token_prompts(PROMPTS), chosen)
    ]
    llm = LLM(
        llama,
        max_num_seqs=4,
        enable_lora=True,
        max_loras=3,
        speculative_config={"model": llama, "siblings": 2},
        **bits,
    )
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED, lora_request=chosen)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o.outputs) for o in expected]


def test_samples_of_a_stream_use_the_adapter(
    llm: LLM, loras: list[LoRARequest], alone: Callable[..., Any]
) -> None:
    """Further samples fork from the first, adapter and all."""
    llm.use({"method": "ngram"})
    params = SamplingParams(**{**vars(SAMPLED), "n": 3})
    streamed = {}
    for output in llm.stream(token_prompts(PROMPTS), params, lora_request=loras[1]):
        if output.finished:
            streamed[tuple(output.prompt_token_ids)] = output.outputs
    for prompt in PROMPTS:
        assert visible_parts(streamed[tuple(prompt)]) == visible_parts(alone(prompt, params, loras[1]))
    check_idle(llm)


def test_chat_applies_the_adapter_of_each_conversation(llm: LLM, loras: list[LoRARequest]) -> None:
    llm.use(None)
    talks = [[{"role": "user", "content": text}] for text in ("one", "two")]
    given: dict[str, Any] = {"chat_template": "{{ messages[0]['content'] }}: "}
    adapted, plain, both = (
        llm.chat(talks, SAMPLED, **given, lora_request=lora) for lora in (loras[0], None, [loras[0], None])
    )
    assert [visible_parts(o.outputs) for o in both] == [
        visible_parts(adapted[0].outputs),
        visible_parts(plain[1].outputs),
    ]
    assert visible_parts(adapted[0].outputs) != visible_parts(plain[0].outputs)


def test_preempted_rows_take_up_their_adapter(
    llama: str, loras: list[LoRARequest], alone: Callable[..., Any]
) -> None:
    """Rows lose cache and adapter midway and take both up again."""
    slot = LLM(llama).engine.decoder.footprint.total()
    params = SamplingParams(**{**vars(SAMPLED), "max_tokens": 60})
    small = LLM(
        llama,
        max_num_seqs=4,
        max_model_len=128,
        kv_cache_memory_bytes=8 * PAGE * slot,
        enable_lora=True,
        max_loras=2,
    )
    chosen = [loras[i % 3] for i in range(len(PROMPTS))]
    outputs = small.generate(token_prompts(PROMPTS), params, lora_request=chosen)
    assert small.engine.scheduler.preemptions > 0
    for prompt, lora, output in zip(PROMPTS, chosen, outputs):
        assert visible_parts(output.outputs) == visible_parts(alone(prompt, params, lora))
    check_idle(small)


# ---- the prefix cache


def differences(
    llm: LLM, prompts: list[list[int]], loras: list[LoRARequest], alone: Callable[..., Any]
) -> int:
    """Every prompt with every adapter and with none, one after the other: how many come out differently."""
    wrong = 0
    for prompt in prompts:
        for lora in [*loras, None, *loras]:
            got = llm.generate({"prompt_token_ids": prompt}, GREEDY, lora_request=lora)[0]
            wrong += visible_parts(got.outputs) != visible_parts(alone(prompt, GREEDY, lora))
    return wrong


def test_prefixes_are_shared_within_an_adapter_only(
    llama: str, loras: list[LoRARequest], alone: Callable[..., Any]
) -> None:
    llm = LLM(llama, enable_lora=True, max_loras=1)
    long = [[*random_prompts(1, seed=8, longest=40)[0] * 3, 7]]
    hits, match = [], llm.engine.cache.match

    def listening(*given: Any) -> int:
        hits.append(match(*given))
        return hits[-1]

    llm.engine.cache.match = listening  # type: ignore[method-assign]
    assert differences(llm, long, loras, alone) == 0
    assert hits[:4] == [0, 0, 0, 0]
    assert all(hit >= (len(long[0]) - 1) // PAGE * PAGE > PAGE for hit in hits[4:]), (
        "the second time it should have been cached"
    )


def test_a_shared_prefix_index_is_noticed(
    llama: str, loras: list[LoRARequest], alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_table = Cache.open
    monkeypatch.setattr(Cache, "open", lambda self, root=ROOT: open_table(self))
    long = [[*random_prompts(1, seed=8, longest=40)[0] * 3, 7]]
    assert differences(LLM(llama, enable_lora=True), long, loras, alone) > 0


# ---- memory


def test_more_adapters_than_fit_take_turns(
    llama: str, loras: list[LoRARequest], alone: Callable[..., Any]
) -> None:
    """One adapter in memory: rows of another wait in order, and an adapter in use is never evicted."""
    llm = LLM(llama, max_num_seqs=4, enable_lora=True, max_loras=1, speculative_config={"method": "ngram"})
    engine = llm.engine
    chosen = [loras[0], loras[0], None, loras[1], loras[2], loras[0]]
    begun: list[LoRARequest | None] = []
    forward = engine.runner.begin

    def listening(batch: Any, needs: Any) -> Any:
        assert engine.adapters is not None
        used = {row.lora.lora_int_id for row in batch.rows if row.lora}
        assert used <= set(engine.adapters.loaded) and len(engine.adapters.loaded) <= 1
        begun.extend(step.row.lora for step in batch if step.start == 0)
        return forward(batch, needs)

    engine.runner.begin = listening  # type: ignore[method-assign]
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED, lora_request=chosen)
    assert begun == chosen
    for prompt, lora, output in zip(PROMPTS, chosen, outputs):
        assert visible_parts(output.outputs) == visible_parts(alone(prompt, SAMPLED, lora))


def test_the_adapter_unused_for_longest_goes(llm: LLM, llama: str, loras: list[LoRARequest]) -> None:
    two = LLM(llama, enable_lora=True, max_loras=2)
    for lora in (loras[0], loras[1], loras[0], loras[2]):
        two.generate({"prompt_token_ids": [5, 6]}, GREEDY, lora_request=lora)
    assert two.engine.adapters is not None
    assert list(two.engine.adapters.loaded) == [1, 3]


def test_a_dropped_adapter_leaves_no_weights(llama: str, loras: list[LoRARequest]) -> None:
    one = LLM(llama, enable_lora=True)
    one.generate({"prompt_token_ids": [5, 6]}, GREEDY, lora_request=loras[0])
    adapters = one.engine.adapters
    assert adapters is not None and adapters.loaded
    adapters.drop(loras[0])
    assert not adapters.loaded and not adapters.known
    with pytest.raises(RequestError, match="has been unloaded"):
        adapters.take(loras[0], set())


def test_an_adapter_that_vanishes_fails_its_own_rows_only(
    llama: str, loras: list[LoRARequest], tmp_path: Path
) -> None:
    """The file was there when the request was accepted, and is gone when it is read."""
    llm = LLM(llama, enable_lora=True, max_loras=2)
    gone = tmp_path / "gone"
    shutil.copytree(loras[0].lora_path, gone)
    llm.generate(token_prompts(PROMPTS[:1]), GREEDY, lora_request=LoRARequest("gone", 9, str(gone)))
    for lora in loras[:2]:
        llm.generate(token_prompts(PROMPTS[:1]), GREEDY, lora_request=lora)
    shutil.rmtree(gone)
    asked = [None, LoRARequest("gone", 9, str(gone)), loras[0]]
    outputs = llm.generate(token_prompts(PROMPTS[:3]), GREEDY, lora_request=asked)
    assert isinstance(outputs[1].error, RequestError) and "gone" in str(outputs[1].error)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    streamed = list(llm.stream(token_prompts(PROMPTS[:1]), GREEDY, lora_request=asked[1]))
    assert len(streamed) == 1 and streamed[0].error is not None
    check_idle(llm)
