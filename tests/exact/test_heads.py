"""Trained heads over transformers' own code and after prefix hits: tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafter_cases import PlainOutputs
from helpers import token_prompts

from outrider import LLM, SamplingParams, draft
from outrider.core.block_table import PAGE
from outrider.heads.base import HeadDrafter
from outrider.testing import check_idle, random_prompts, tiny_checkpoint, use_example, visible_parts

HEADS = [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]
WHOLE = [name for name in HEADS if name != "kangaroo"]  # that one runs a part of the target's layers
PROMPTS = random_prompts(5, seed=11)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["GPTNeoX", "VaultGemma"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PlainOutputs, LLM]:
    """Plain outputs and a fast engine over transformers' own code of a family."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("family"), request.param)
    return PlainOutputs(LLM(folder, dtype="float32")), LLM(folder, dtype="float32")


@pytest.mark.parametrize("method", WHOLE)
def test_over_transformers_own_code(pair: tuple[PlainOutputs, LLM], method: str) -> None:
    plain, fast = pair
    use_example(fast, method)
    outputs = fast.generate(token_prompts(PROMPTS), SAMPLED, use_tqdm=False)
    assert [visible_parts(output.outputs) for output in outputs] == [
        visible_parts(plain(prompt, SAMPLED).outputs) for prompt in PROMPTS
    ]
    assert sum(output.speculation.drafted for output in outputs) > 0
    check_idle(fast)


@pytest.mark.parametrize("method", HEADS)
def test_the_prompt_of_a_request_that_ends_at_once_is_shared(method: str, tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32")
    use_example(llm, method)
    prompt = {"prompt_token_ids": random_prompts(1, seed=3, longest=41)[0] * 3}
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first, again = (llm.generate([prompt], params, use_tqdm=False)[0] for params in (once, GREEDY))
    room = (len(prompt["prompt_token_ids"]) - 1) // PAGE * PAGE
    assert (
        not first.num_cached_tokens and again.num_cached_tokens == room - llm.engine.drafter.needs.lookbehind
    )
    llm.engine.forget_prefixes()
    alone = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert visible_parts(again.outputs) == visible_parts(alone.outputs)
    assert again.speculation.accepted == alone.speculation.accepted, "what is shared is what would be read"
    check_idle(llm)


@pytest.mark.parametrize("method", HEADS)
def test_states_come_back_after_a_prefix_hit(method: str, tmp_path: Path) -> None:
    """The second time the prompt is cached; the drafts are the same."""
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32")
    use_example(llm, method)
    prompt = {"prompt_token_ids": random_prompts(1, seed=3, longest=41)[0] * 3}
    first = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    again = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert visible_parts(first.outputs) == visible_parts(again.outputs)
    assert again.num_cached_tokens
    assert again.speculation.drafted > 0 and again.speculation.accepted == first.speculation.accepted
    check_idle(llm)
