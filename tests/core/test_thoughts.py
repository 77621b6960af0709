"""Reasoning and answer, of whole texts and of texts that grow."""

from __future__ import annotations

import pytest

from outrider.core.reasoning import ReasoningMarkers, Thought

THINK = ReasoningMarkers("<think>", "</think>", ("<call>",))
OPENED = THINK._replace(begin="")
TEXTS = [  # text, whether the prompt opens the reasoning, reasoning, answer
    ("<think>\nSo, 2 < 3.\n</think>\n\nYes.", False, "So, 2 < 3.", "Yes."),
    ("\n<think>a</think>b</think>", False, "a", "b</think>"),
    ("a\n</think>\nb", True, "a", "b"),
    ("</think>b", True, "", "b"),
    ("No <think>x</think> here", False, "", "No <think>x</think> here"),
    (" <thin", False, "", " <thin"),
    ("<think>It goes </thin", False, "It goes </thin", None),
    ("still at it", True, "still at it", None),
    ("", False, "", ""),
    ("", True, "", None),
    ("a < b\n<call>{}</call>", True, "a < b", "<call>{}</call>"),
    ("<think>a<call>{}</think>", False, "a", "<call>{}</think>"),
    ("<think>a</think> b <call>{}", False, "a", "b <call>{}"),
    ("<think>a <ca", False, "a <ca", None),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "answer"), TEXTS)
def test_reasoning_and_answer_of_a_growing_text_are_never_taken_back(
    text: str, opened: bool, reasoning: str, answer: str | None
) -> None:
    markers = OPENED if opened else THINK
    before = Thought("", None)
    for end in range(len(text) + 1):
        now = markers.split(text[:end], end == len(text))
        assert now.reasoning.startswith(before.reasoning)
        assert before.answer is None or (now.answer or "").startswith(before.answer)
        before = now
    assert before[:2] == (reasoning, answer)
    assert (before.answer or "") == text[before.start :]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|>\n", THINK),
        ("<|assistant|>\n<think>\n", OPENED),
        ("<|assistant|>\n<think>\n\n</think>\n\n", None),
        ("What is <think>?<|assistant|>", THINK),
    ],
)
def test_the_end_of_a_prompt_tells_whether_a_reasoning_has_begun(prompt: str, expected: object) -> None:
    assert THINK.behind(prompt) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nLet me", OPENED),
        ("<think>\nLet me<call>", None),
        ("<think>\nLet me</think>\nIt is", None),
        ("Let me</think>\nIt is", None),
        ("It is", THINK),
    ],
)
def test_a_continued_text_tells_whether_it_thinks(text: str, expected: object) -> None:
    assert THINK.within(text) == expected


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("<think>\nOkay, so", OPENED),
        ("<think>", OPENED),
        ("<think>a</think>\n", None),
        ("<think>a</think> Yes. And", THINK),
        ("<think>a<call>", THINK),
        ("And", THINK),
    ],
)
def test_a_turn_may_end_within_its_reasoning(turn: str, expected: object) -> None:
    assert THINK.continued(turn) == expected
