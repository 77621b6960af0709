"""STAND: what its memory keeps, and that its draft tokens are sampled with the target's noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.core.params import DistributionParams
from outrider.draft.stand import LONGEST, RANKS, NgramMemory, Stand
from outrider.testing import make_row, random_prompts, tiny_checkpoint


def test_the_mean_distribution_after_the_longest_ngram() -> None:
    memory = NgramMemory(100)
    memory.observe([1, 2, 3], [7, 8], [math.log(3), 0.0])
    memory.observe([1, 2, 3], [8, 9], [0.0, 0.0])
    memory.observe([5, 3], [6], [1.0])
    n, probs = memory.find([1, 2, 3])
    assert n == 3 and probs == pytest.approx({8: 3 / 8, 7: 3 / 8, 9: 1 / 4})
    n, probs = memory.find([4, 3])
    assert n == 1 and probs == pytest.approx({6: 1 / 3, 8: 1 / 4, 7: 1 / 4, 9: 1 / 6})
    assert memory.find([4]) == (0, {})


def test_logits_far_below_the_largest_are_no_estimates() -> None:
    """exp(100 - 1000) is 0.0, whose logarithm is none."""
    for logits in ([1000.0, 100.0], [3.0, -math.inf], [3.0, math.nan]):
        memory = NgramMemory(100)
        memory.observe([1, 2], [5, 6], logits)
        assert memory.find([1, 2]) == (2, {5: 1.0})
        row = make_row([1, 2], distribution=DistributionParams(0.8))
        assert Stand._ranked(memory, row, [1, 2], 2) == (2, [5])


def test_estimates_that_sink_to_zero_are_dropped() -> None:
    memory = NgramMemory(100)
    memory.observe([1], [5, 6], [745.0, 0.0])
    assert memory.find([1])[1][6] > 0  # the least number, whose half is 0
    memory.observe([1], [5], [1.0])
    assert [*memory.find([1])[1]] == [5]


def test_nothing_is_observed_without_a_finite_logit() -> None:
    memory = NgramMemory(100)
    for logits in ([-math.inf, -math.inf], [math.nan, 1.0]):
        memory.observe([1], [5, 6], logits)
    assert all(set(probs) == {6} for _, probs in memory.after.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_of_great_range_are_drafted_from(temperature: float, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    file = next(Path(folder).glob("*.safetensors"))
    weights = load_file(file)
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.norm.weight"
    weights[name] *= 5000
    save_file(weights, file, metadata={"format": "pt"})
    llm = LLM(folder, dtype="float32", device="cpu", speculative_config={"method": "stand"})
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8] * 2}]
    drafted = llm.generate(prompts, params)[0].outputs[0].token_ids
    assert drafted == llm.variant(None).generate(prompts, params)[0].outputs[0].token_ids


def test_the_least_recently_observed_ngram_goes_first() -> None:
    memory = NgramMemory(2)
    for context in ([1], [2], [1], [3]):
        memory.observe(context, [5], [0.0])
    assert [*memory.after] == [(1,), (3,)]


def test_the_memory_has_the_targets_logits(tmp_path: Path) -> None:
    """After a request without drafts: softmax over the largest logits at every place of the output."""
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32", speculative_config={"method": "stand"})
    prompt = random_prompts(1, seed=2)[0]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=RANKS)
    output = answer(llm, prompt, params).outputs[0]
    memory = llm.engine.drafter.memory
    text = [*prompt, *output.token_ids]
    assert output.logprobs is not None
    for i, entries in enumerate(output.logprobs):
        at = len(prompt) + i
        seen, probs = memory.after[tuple(text[at - LONGEST : at])]
        best = sorted(entries, key=lambda token: -entries[token].logprob)[:RANKS]
        values = torch.tensor([entries[token].logprob for token in best]).softmax(0).tolist()
        assert seen == 1
        assert [probs[token] for token in best] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_a_known_text_is_drafted_with_the_noise_of_its_seed(temperature: float, tmp_path: Path) -> None:
    """What a seed picked after a text, it picks again: a memory of the distributions gives the same token."""
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32", speculative_config=None)
    params = SamplingParams(temperature=temperature, top_k=RANKS, seed=3, max_tokens=32, ignore_eos=True)
    prompt = random_prompts(1, seed=2)[0]
    llm.use({"method": "stand", "num_speculative_tokens": 3, "min_token_prob": 0.0, "nodes": 3})
    first = answer(llm, prompt, params)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Stand)
    for ranks in drafter.memory.acceptance[1:]:
        ranks[:] = [0.9, *[0.0] * (RANKS - 1)]  # chains of the first rank
    again = answer(llm, prompt, params)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.speculation.acceptance > 0.9
    assert again.speculation.tokens_per_step > 3


def test_salts_have_memories_of_their_own(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32", speculative_config={"method": "stand"})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([{"prompt_token_ids": random_prompts(1, seed=2)[0], "cache_salt": "a"}], params)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Stand)
    assert not drafter.memory.after and drafter.salted.kept["a"].after
