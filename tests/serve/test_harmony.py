"""Messages of gpt-oss: reasoning, answers and tool calls, whole and in every part of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from served import forked

from outrider.core.reasoning import Thought
from outrider.serve.chat import Reply
from outrider.serve.errors import ApiError
from outrider.serve.harmony import HARMONY
from outrider.serve.protocol import ChatBody
from outrider.serve.reasoning import markers_for
from outrider.serve.sampling import params_of
from outrider.serve.tool_calls import ToolCall
from outrider.serve.tools import PARSERS, parser_for

THOUGHT = "<|channel|>analysis<|message|>The user asks.\n 1 < 2.<|end|>"
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Os\\"lo"}'
OTHER = ' to=functions.now<|channel|>commentary json<|message|>{"zone": 1}'
WEATHER, NOW = ToolCall("get_weather", '{"city": "Os\\"lo"}'), ToolCall("now", '{"zone": 1}')
REASONING = "The user asks.\n 1 < 2."
TEMPLATE = "{{ '<|start|>assistant<|channel|>final<|message|>' }}"
TEXTS: dict[str, tuple[str, str, str, list[ToolCall]]] = {  # text -> reasoning, content, calls
    "answer": (f"{THOUGHT}{START}{FINAL}It is so.<|return|>", REASONING, "It is so.", []),
    "no thought": (f"{FINAL}It is so.", "", "It is so.", []),
    "call": (f"{THOUGHT}{START}{CALL}<|call|>", REASONING, "", [WEATHER]),
    "preamble": (f"{THOUGHT}{START}{PREAMBLE}{START}{CALL}", REASONING, "I look.", [WEATHER]),
    "two thoughts": (
        f"{THOUGHT}{START}<|channel|>analysis<|message|>More.<|end|>{START}{FINAL}Yes",
        f"{REASONING}\nMore.",
        "Yes",
        [],
    ),
    "two calls": (f"{THOUGHT}{START}{CALL}<|call|>{START}{OTHER}<|call|>", REASONING, "", [WEATHER, NOW]),
    "unclosed": (f"{THOUGHT}{START}{OTHER}", REASONING, "", [NOW]),
    "no messages": ("Hello <b>", "", "Hello <b>", []),
}


def reply(text: str, finish_reason: str | None) -> Any:
    ending = frozenset({"<|return|>", "<|call|>"})
    return Reply(parser_for("auto", TEMPLATE), ending=ending, markers=HARMONY).read(text, finish_reason)


@pytest.mark.parametrize("name", TEXTS)
def test_a_whole_text_is_read(name: str) -> None:
    text, reasoning, content, calls = TEXTS[name]
    found = reply(text, "stop")
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_stream_shows_stays(name: str) -> None:
    """Every prefix has beginnings of what the whole text has, and no marker."""
    text, reasoning, content, calls = TEXTS[name]
    most = 0
    for length in range(len(text) + 1):
        found = reply(text[:length], None)
        assert reasoning.startswith(found.reasoning) and content.startswith(found.content), text[:length]
        assert most <= len(found.calls) <= len(calls)
        most = len(found.calls)
        for call, expected in zip(found.calls, calls):
            assert call.name == expected.name and expected.arguments.startswith(
                call.arguments.rstrip("<|cal")
            )


def test_a_thought_that_is_cut_off_is_all_reasoning() -> None:
    assert HARMONY.split("<|channel|>analysis<|message|>So <", True) == Thought("So <", None, 34)
    assert HARMONY.split("<|channel|>analysis<|message|>So <", False).reasoning == "So"


def test_the_answer_begins_where_its_text_does() -> None:
    text = f"{THOUGHT}{START}{FINAL}It is so."
    assert text[HARMONY.split(text, True).start :] == "It is so."
    opened = HARMONY.behind("<|start|>assistant<|channel|>analysis<|message|>")
    assert opened is not None
    rest = text.removeprefix("<|channel|>analysis<|message|>")
    found = opened.split(rest, True)
    assert (found.reasoning, rest[found.start :]) == (REASONING, "It is so.")
    assert HARMONY.behind(f"<|start|>assistant{FINAL}") is None


def test_formats_are_found_by_name_and_in_the_template() -> None:
    assert markers_for("openai_gptoss", "") is markers_for("auto", TEMPLATE) is HARMONY
    assert parser_for("openai", "") is parser_for("auto", TEMPLATE) is PARSERS["openai"]


def test_a_server_has_reasoning_answers_and_calls_apart() -> None:
    """A constraint on the whole text makes any model write such messages."""
    # no <|end|>, which ends texts of this model
    thought = r"<\|channel\|>analysis<\|message\|>[a-z]{12}<\|start\|>assistant"
    final = r"<\|channel\|>final<\|message\|>[a-z]{6}"
    call = r'<\|channel\|>commentary to=functions\.f <\|constrain\|>json<\|message\|>\{"x": [0-9]\}'
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 120}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    flags = ["--reasoning-parser", "openai_gptoss", "--tool-call-parser", "openai", "--max-model-len", "512"]
    with forked("builtin", *flags) as server:

        def message(form: str, **more: Any) -> Any:
            given = {**body, "structured_outputs": {"regex": form, "reasoning": None}, **more}
            answer = server.post("/v1/chat/completions", given)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]

        answer, called = message(thought + final), message(thought + call, tools=tools)
        refused = server.post("/v1/chat/completions", {**body, "structured_outputs": {"regex": "a"}})
    assert len(answer["reasoning"]) == len(called["reasoning"]) == 12 and len(answer["content"]) == 6
    (function,) = [each["function"] for each in called["tool_calls"]]
    assert function["name"] == "f" and function["arguments"].startswith('{"x": ') and not called["content"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"


def test_constraints_are_refused_by_name() -> None:
    body = ChatBody(messages=[{"role": "user", "content": "a"}], structured_outputs={"regex": "a"})
    with pytest.raises(ApiError, match="structured_outputs is not supported for messages of gpt-oss"):
        params_of(body, {}, None, HARMONY)
    assert params_of(ChatBody(messages=body.messages), {}, None, HARMONY).structured_outputs is None
