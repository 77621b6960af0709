"""thinking_token_budget: the end marker is forced at the budget, at any node, and nothing before or after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import LLM, RequestError, SamplingParams
from outrider.core.processor import Ids
from outrider.core.reasoning import ReasoningMarkers
from outrider.sampling.thinking import ThinkingBudget

# spellings of the markers
PIECES = ["a", "b", "c", "<t", "h>", "</", "t", "h>d", "\n<", "<th>", "</th>", "<call>", "<ca", "ll>"]
MARKERS, END = ReasoningMarkers("<th>", "</th>", ("<call>",)), [5, 6, 4]
V = len(PIECES)
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0))
CASES = [  # output, whether the prompt has opened a reasoning, budget, the forced token
    ([3, 4], False, 0, 5),
    ([9], False, 0, 5),
    ([3, 4, 5], False, 0, 6),
    ([3, 4, 5, 6], False, 0, 4),
    ([3, 4, 5, 6, 4], False, 0, None),
    ([9, 0], False, 2, None),
    ([9, 0, 1], False, 2, 5),
    ([9, 0, 1, 5], False, 2, 6),
    ([9, 0, 5], False, 2, None),  # the end may begin by itself
    ([9, 0, 5, 2], False, 2, 5),
    ([9, 0, 5, 6, 7, 1, 1, 1], False, 2, None),  # it may end in a token with more than it
    ([9, 0, 10, 1, 1, 1], False, 2, None),
    ([8, 6, 4, 0, 1], False, 2, 5),  # as may the beginning
    ([0, 1, 2, 0], False, 2, None),  # no reasoning
    ([0], True, 2, None),
    ([0, 1], True, 2, 5),
    ([], True, 0, 5),
    ([10, 0, 1, 2], True, 2, None),
    ([9, 0, 9, 1], False, 2, 5),  # a begin within it is part of it
    ([9, 0, 10, 1, 9, 2, 2], False, 2, None),  # one in the answer is a part of it
    ([0, 9, 2, 2, 2], False, 2, None),
    ([10, 9, 2, 2, 2], True, 2, None),
    ([9, 0, 11, 1, 1], False, 2, None),  # a call ends it
    ([0, 12, 13, 1, 1], True, 4, None),
]


def made(opened: bool, budget: int) -> ThinkingBudget:
    markers = MARKERS._replace(begin="") if opened else MARKERS
    return ThinkingBudget(2, markers, END, budget, PIECES.__getitem__)


@pytest.mark.parametrize(("output", "opened", "budget", "expected"), CASES)
def test_the_end_is_forced_at_the_budget(
    output: list[int], opened: bool, budget: int, expected: int | None
) -> None:
    for drafted in range(len(output) + 1):
        processor, kept = made(opened, budget), len(output) - drafted
        tokens = [9, 0, *output[:kept]]
        for _ in range(2):  # what is known of earlier tokens changes nothing
            ids = Ids(tokens, output[kept:])
            edited = processor(ids, LOGITS) if processor.active(len(ids)) else LOGITS
            found = edited.isfinite().nonzero().flatten().tolist()
            assert found == ([expected] if expected is not None else [*range(V)])
            assert expected is not None or torch.equal(edited, LOGITS)
            processor(Ids(tokens, [9, 1, 1]), LOGITS)  # another path changes nothing


def test_what_other_processors_forbid_is_forced_all_the_same() -> None:
    masked = LOGITS.index_fill(0, torch.tensor([5]), float("-inf"))
    assert made(True, 0)(Ids([0, 0]), masked)[5] == 0


@pytest.mark.parametrize(
    "given",
    [
        {"thinking_token_budget": 5},
        {"thinking_token_budget": -2, "reasoning_markers": ("a", "b")},
        {"thinking_token_budget": 5, "reasoning_markers": ("a", "")},
        {"thinking_token_budget": 5, "reasoning_markers": ("a", "b", "")},
        {"thinking_token_budget": 5, "reasoning_markers": ("a",)},
    ],
)
def test_wrong_budgets_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"thinking_token_budget|reasoning_markers"):
        SamplingParams(**given)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_reasoning_ends_at_its_budget_with_and_without_speculation(temperature: float) -> None:
    prompt, markers = "Think first. <think>\n", ("<think>", "</think>")
    plain = LLM("builtin", max_model_len=256)
    drafted = LLM("builtin", speculative_config={"model": "builtin-draft"}, max_model_len=256)
    ending = plain.tokenizer.encode(markers[1], add_special_tokens=False)
    free = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    (long,) = plain.generate([prompt], free)
    for budget in (0, 7, 20):
        params = SamplingParams(
            temperature=temperature,
            seed=1,
            max_tokens=40,
            ignore_eos=True,
            thinking_token_budget=budget,
            reasoning_markers=markers,
        )
        (one,), (other,) = (llm.generate([prompt], params) for llm in (plain, drafted))
        tokens = one.outputs[0].token_ids
        assert tokens == other.outputs[0].token_ids
        assert tokens[:budget] == long.outputs[0].token_ids[:budget]
        assert tokens[budget : budget + len(ending)] == ending


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", max_model_len=256, speculative_config={"method": "off"})


@pytest.mark.parametrize(
    ("prompt", "bounded"),
    [
        ("<think> Okay, so", True),
        ("<|user|>Hi<|assistant|><think> Okay, so", True),
        ("<|user|>What is <think>?<|assistant|>", False),  # of another turn
        ("<|user|>Hi<|assistant|><think>x</think>", False),
    ],
)
def test_a_prompt_may_end_within_the_reasoning(prompt: str, bounded: bool, llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=24, thinking_token_budget=3, reasoning_markers=("<think>", "</think>")
    )
    assert ("</think>" in llm.generate([prompt], params)[0].outputs[0].text) == bounded


def test_a_form_without_a_reasoning_has_no_budget(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        thinking_token_budget=3,
        reasoning_markers=("<think>", "</think>"),
        structured_outputs={"regex": "[a-z ]{12}"},
    )
    (output,) = llm.generate(["Say <think>"], params)
    assert len(output.outputs[0].text) == 12
