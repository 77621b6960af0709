"""STAND: what its memory keeps, and that its draft tokens are sampled with the target's noise."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import answer

from outrider import LLM, SamplingParams
from outrider.draft.stand import LONGEST, RANKS, NgramMemory, Stand
from outrider.testing import random_prompts, tiny_checkpoint


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
