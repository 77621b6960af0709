"""Messages of gpt-oss: reasoning, answers and tool calls, whole and in every part of a stream."""

from __future__ import annotations

import time
from typing import Any

import pytest
from content_blocks import joined_blocks, with_inputs_parsed
from served import forked

from outrider.core.reasoning import Thought
from outrider.serve.chat import Reply, markers_of
from outrider.serve.errors import ApiError
from outrider.serve.harmony import HARMONY, HEAD
from outrider.serve.messages.blocks import ContentBlocks, content_of
from outrider.serve.output_items import OutputItems
from outrider.serve.protocol import ChatBody
from outrider.serve.reasoning import markers_for
from outrider.serve.sampling import params_of
from outrider.serve.tool_calls import ToolCall
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import PARSERS, parser_for

THOUGHT = "<|channel|>analysis<|message|>The user asks.\n 1 < 2.<|end|>"
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
LATER = "<|channel|>analysis<|message|>More, later.<|end|>"
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
    "recipient first": (OTHER, "", "", [NOW]),
    "preamble, thought, call": (f"{PREAMBLE}{START}{LATER}{START}{CALL}", "", "I look.", [WEATHER]),
    "thought, preamble, thought, call": (
        f"{THOUGHT}{START}{PREAMBLE}{START}{LATER}{START}{CALL}",
        REASONING,
        "I look.",
        [WEATHER],
    ),
    "answer, thought": (f"{FINAL}It is so.<|end|>{START}{LATER}", "", "It is so.", []),
    "text behind a call that is no JSON": (
        f"{THOUGHT}{START}{CALL[:-1]}<|call|>{START}{FINAL}Done.",
        REASONING,
        "Done.",
        [WEATHER._replace(arguments=WEATHER.arguments[:-1], complete=False)],
    ),
    "call without arguments": (
        f"{THOUGHT}{START}<|channel|>commentary to=functions.now<|message|><|call|>{START}{FINAL}Done.",
        REASONING,
        "Done.",
        [ToolCall("now", "{}")],
    ),
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


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_blocks_of_a_stream_are_those_of_the_whole_text(name: str, step: int) -> None:
    text, blocks, events = TEXTS[name][0], ContentBlocks("x"), list[Any]()
    for end in range(step, len(text), step):
        events += blocks.grow(reply(text[:end], None), False)
    whole = reply(text, "stop")
    events += blocks.grow(whole, True)
    made, expected = joined_blocks(events), content_of("x", whole)
    if all(call.complete for call in whole.calls):
        assert with_inputs_parsed(made) == expected
    assert [block["type"] for block in made] == [block["type"] for block in expected]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_items_of_a_stream_are_those_of_the_whole_text(name: str, step: int) -> None:
    text, items, events = TEXTS[name][0], OutputItems("x"), list[Any]()
    for end in range(step, len(text), step):
        events += items.grow(reply(text[:end], None), None)
    events += items.grow(reply(text, "stop"), "completed")
    whole = OutputItems("x")
    list(whole.grow(reply(text, "stop"), "completed"))
    assert items.items == whole.items
    open_, texts = set[int](), dict[int, str]()
    for event in events:
        place, kind = event["output_index"], event["type"].removeprefix("response.")
        if kind == "output_item.added":
            open_.add(place)
        assert place in open_, event
        if kind == "output_item.done":
            open_.remove(place)
        if kind.endswith(".delta"):
            texts[place] = texts.get(place, "") + event["delta"]
    assert not open_
    for place, item in enumerate(whole.items):
        assert texts.get(place, "") == (
            item["content"][0]["text"] if "content" in item else item["arguments"]
        )


def test_tokens_of_heads_are_no_reasoning() -> None:
    thought = f"{THOUGHT}{START}"
    for answer in (f"{FINAL}It is so.", f"{PREAMBLE}{START}{LATER}", CALL, ""):
        assert HARMONY.reasoning_end(f"{thought}{answer}", True) == len(THOUGHT)
        assert HARMONY.reasoning_end(answer, True) == 0
    for text in ("Hello", "<|channel|>ana"):
        assert HARMONY.reasoning_end(text, True) == 0
    cut = THOUGHT[:-9]
    assert HARMONY.reasoning_end(cut, False) == HARMONY.reasoning_end(cut, True) == len(cut)
    opened = HARMONY.behind("<|start|>assistant<|channel|>analysis<|message|>")
    assert opened is not None
    rest = THOUGHT.removeprefix("<|channel|>analysis<|message|>")
    assert opened.reasoning_end(f"{rest}{START}{FINAL}Yes", True) == len(rest)


HEADS = ["<|chan", "<|start|>ass", "<|channel|>final<|mess",
         "<|channel|>analysis", f"{START}<|channel|>", "<|start|>", START,
         " to=functions.now<|channel|>commentary json", " to=functions.no"]  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_a_text_that_ends_within_its_head_has_no_answer(head: str) -> None:
    assert reply(head, "length") == reply(head, None) == reply("", None)


@pytest.mark.parametrize("head", ["<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
                                  " to=functions.now<|channel|>commentary<|message|>"])  # fmt: skip
def test_the_token_that_ends_a_text_completes_a_call_without_arguments(head: str) -> None:
    found = [Reply(PARSERS["openai"], markers=HARMONY).read(head + end, "stop") for end in ("<|call|>", "")]
    assert [reply.calls for reply in found] == [[ToolCall("now", "{}")], [ToolCall("now", "", False)]]
    forced = Reply(PARSERS["openai"], ToolUse(name="now"), markers=HARMONY)
    assert forced.read('{"zone": 1}<|return|>', "stop").calls == [NOW]


@pytest.mark.parametrize("text", ["<", "< 3", "<|x|>", "to=5", "a <|channel|>"])
def test_other_texts_are_answers(text: str) -> None:
    assert reply(text, "length").content == text


@pytest.mark.parametrize("text", [" " * 40_000, "<|channel|>" + "a" * 40_000, "a" * 40_000])
def test_a_text_without_a_head_takes_linear_time(text: str) -> None:
    began = time.perf_counter()
    assert HEAD.match(text) is None
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("name", ["call", "two calls", "unclosed", "recipient first"])
def test_calls_are_read_without_a_reasoning_parser(name: str) -> None:
    """The parser of calls reads the messages, whichever way they name their recipient."""
    text, reasoning, content, calls = TEXTS[name]
    parser = parser_for("openai", "")
    found = Reply(parser, markers=markers_of(parser, None, "")).read(text, "stop")
    assert (found.calls, found.reasoning, found.content) == (calls, reasoning, content)
    prompt = f"{START}{FINAL}"
    assert markers_of(parser, None, prompt) is markers_of(PARSERS["hermes"], None, "") is None


@pytest.mark.parametrize(
    "name", ["call", "two calls", "unclosed", "recipient first", "call without arguments"]
)
def test_calls_are_read_where_the_reasoning_stays_in_the_text(name: str) -> None:
    """With "separate_reasoning": false, a call whose recipient comes first was content."""
    text, _, _, calls = TEXTS[name]
    read, tools = PARSERS["openai"].parse, {"get_weather": {}, "now": {}}
    found = read(text, True, tools)
    assert found.calls == calls and found.content.startswith(THOUGHT[:-7] if text.startswith(THOUGHT) else "")
    content = ""
    for end in range(len(text) + 1):
        now = read(text[:end], end == len(text), tools)
        assert now.content.startswith(content), text[:end]
        assert [call.name for call in now.calls] == [call.name for call in calls][: len(now.calls)]
        content = now.content


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
