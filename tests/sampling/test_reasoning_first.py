"""Grammars of answers behind a reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, RequestError, SamplingParams, StructuredOutputs
from outrider.core.processor import Ids
from outrider.sampling.grammar.compiler import GrammarCompiler

THINK = ("<think>", "</think>")
TAG = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
FORMS: list[dict[str, Any]] = [
    {"regex": "[0-9]+"},
    {"json": {"type": "integer"}},
    {"choice": ["1", "12"]},
    {"grammar": "start: /[0-9]+/"},
    {"grammar": 'root ::= "1" "2"?'},
]
TEXTS = [  # prompt, text, whether it may stand there, whether it may end there
    ("", "12", True, True),
    ("", "<think>So\n\n{2} < 3 <|user|></think>\n\n12", True, True),
    ("", "<think>So", True, False),
    ("", "So</think>12", False, False),
    ("", "<think>a</think> b</think>12", False, False),
    ("<think>\n", "a</think>12", True, True),
    ("<think>\n", "12", True, False),
    ("<think></think>", "12", True, True),
    ("<think></think>", "<think>a</think>12", False, False),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("prompt", "text", "stands", "ends"), TEXTS)
def test_the_form_holds_for_what_follows_the_reasoning(
    form: Any, prompt: str, text: str, stands: bool, ends: bool, compiler: GrammarCompiler
) -> None:
    state = compiler.state(StructuredOutputs(**form, reasoning=THINK).behind(prompt), 0)
    ids = compiler.tokenizer.encode(text, add_special_tokens=False)
    assert state.move(Ids(ids)) == stands
    if stands:
        assert bool(state.matcher.is_accepting()) == ends


@pytest.mark.parametrize(
    ("prompt", "text", "stands"),
    [
        ("<think>", "<a>x</think><a>1</a>", True),
        ("<think>", "</think><a>x", False),
        ("", "<think>x</think><a>1</a>", True),
        ("", "<think></think><a>x", False),
    ],
)
def test_tags_are_followed_behind_the_reasoning(
    prompt: str, text: str, stands: bool, compiler: GrammarCompiler
) -> None:
    """Where the prompt begins the reasoning, not within it; otherwise it is a part of the free text."""
    form = StructuredOutputs(structural_tag={"structures": [TAG], "triggers": ["<a>"]}, reasoning=THINK)
    ids = compiler.tokenizer.encode(text, add_special_tokens=False)
    assert compiler.state(form.behind(prompt), 0).move(Ids(ids)) == stands


@pytest.mark.parametrize("markers", ["<think>", ("<think>",), ("<think>", ""), (1, 2), []])
def test_markers_are_two_texts(markers: Any) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.reasoning must be two texts"):
        StructuredOutputs(json_object=True, reasoning=markers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_constrained_with_and_without_speculation(temperature: float) -> None:
    """The "reasoning" is all up to the first comma that the model writes."""
    form = {"regex": "[0-9]{3}", "reasoning": ("", ",")}
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, structured_outputs=form)
    texts = [
        LLM("builtin", speculative_config=config).generate("The future of AI is", params)[0].outputs[0].text
        for config in ("off", {"method": "draft_model", "model": "builtin-draft"}, {"method": "suffix"})
    ]
    assert len({*texts}) == 1
    thought, marker, answer = texts[0].partition(",")
    assert thought and marker and len(answer.strip()) == 3 and answer.strip().isdecimal(), texts[0]
