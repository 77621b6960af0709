"""Reasoning apart from the answer, in chats and responses, whole and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served import Served, forked

from outrider.core.reasoning import ReasoningMarkers
from outrider.serve.chat import Reply
from outrider.serve.protocol import ChatBody
from outrider.serve.reasoning import markers_for
from outrider.serve.sampling import params_of
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import PARSERS

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hello"}]
THOUGHT = "<think>\\n[a-z]{3} [a-z]{12}\\n</think>\\n\\n"  # makes any model think
ANSWER = "[a-z]{6}"
BODY: dict[str, Any] = {
    "messages": MESSAGES, "temperature": 0, "max_tokens": 80,
    "structured_outputs": {"regex": THOUGHT + ANSWER, "reasoning": None},
}  # fmt: skip
# always thinks, unless it is told not to
OPENED = (
    "{{ messages[0].reasoning_content }}"
    "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}<seed:think>\n"
    "{% else %}<seed:think></seed:think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    flags = ["--max-model-len", "512", "--stream-interval", "0", "--speculative-config", "suffix"]
    with forked("builtin", "--reasoning-parser", "qwen3", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def opened() -> Iterator[Served]:
    flags = ["--max-model-len", "256", "--speculative-config", "suffix", "--chat-template", OPENED]
    with forked("builtin", "--reasoning-parser", "auto", *flags) as running:
        yield running


def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")


def test_a_message_has_its_reasoning_apart(thinking: Served) -> None:
    answer = thinking.post(CHAT, BODY).json()
    whole = thinking.post(CHAT, {**BODY, "separate_reasoning": False}).json()
    message, text = answer["choices"][0]["message"], whole["choices"][0]["message"]["content"]
    assert text.startswith("<think>\n") and "reasoning" not in whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == text[8:].split("\n</think>")[0]
    assert message["content"] == text.split("</think>\n\n")[1] and len(message["content"]) == 6
    counts = answer["usage"]["completion_tokens_details"]
    assert 0 < counts["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    hidden = thinking.post(CHAT, {**BODY, "include_reasoning": False}).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": message["content"], "refusal": None}


def test_a_stream_has_the_reasoning_in_parts_before_the_answer(thinking: Served) -> None:
    message = thinking.post(CHAT, BODY).json()["choices"][0]["message"]
    body = {**BODY}
    form = body.pop("structured_outputs")
    options: Any = {
        "stream_options": {"include_usage": True},
        "extra_body": {"structured_outputs": form, "speculation": {"enabled": False}},
    }
    thought, content, usage = [], [], None
    for chunk in client(thinking).chat.completions.create(model="builtin", stream=True, **body, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if part := getattr(choice.delta, "reasoning_content", None):
                assert not content, "the answer has begun"
                thought.append(part)
            if choice.delta.content:
                content.append(choice.delta.content)
    assert len(thought) > 1 and "".join(thought) == message["reasoning"]
    assert "".join(content) == message["content"]
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_a_hidden_reasoning_has_no_log_probabilities(thinking: Served) -> None:
    def tokens(**more: Any) -> str:
        (choice,) = thinking.post(CHAT, {**BODY, "logprobs": True, **more}).json()["choices"]
        return "".join(each["token"] for each in choice["logprobs"]["content"]).removesuffix("<|end|>")

    answer = thinking.post(CHAT, BODY).json()["choices"][0]["message"]["content"]
    assert "<think>" in tokens() and tokens(include_reasoning=False).strip() == answer
    body = {**BODY, "logprobs": True, "stream": True, "include_reasoning": False}
    lines = [line[6:] for line in thinking.post(CHAT, body).text.splitlines() if line.startswith("data: {")]
    parts = [part["logprobs"] for line in lines for part in json.loads(line)["choices"]]
    found = [each["token"] for part in parts if part for each in part["content"]]
    assert "".join(found).removesuffix("<|end|>").strip() == answer
    assert not tokens(include_reasoning=False, max_tokens=4), "it ends within its reasoning"


def test_a_text_that_ends_within_its_reasoning_has_no_answer(thinking: Served) -> None:
    (choice,) = thinking.post(CHAT, {**BODY, "max_tokens": 8}).json()["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert choice["message"]["reasoning"]


def test_a_response_has_a_reasoning_item_before_its_message(thinking: Served) -> None:
    form = {"structured_outputs": BODY["structured_outputs"]}
    asked: Any = {"model": "builtin", "input": "Hello", "temperature": 0, "extra_body": form}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client(thinking).responses.create(**asked)
    thought, message = whole.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert len(thought.content[0].text) == 16 and len(whole.output_text) == 6
    assert "".join(each.token for each in message.content[0].logprobs).strip() == whole.output_text
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    kinds, parts, ended = [], [], None
    for event in client(thinking).responses.create(stream=True, **asked):
        kinds.append(event.type.removeprefix("response."))
        if event.type == "response.reasoning_text.delta":
            parts.append(event.delta)
        if event.type == "response.completed":
            ended = event.response
    assert "".join(parts) == thought.content[0].text and ended.output_text == whole.output_text
    order = [kind for kind in kinds if not kind.endswith("delta")]
    assert order[2:6] == [
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done"
    ]  # fmt: skip


def test_a_message_has_a_thinking_block_before_its_text(thinking: Served) -> None:
    whole = thinking.post("/v1/messages", BODY).json()
    thought, text = whole["content"]
    chat = thinking.post(CHAT, BODY).json()["choices"][0]["message"]
    assert (thought["type"], thought["thinking"]) == ("thinking", chat["reasoning"])
    assert thought["signature"] and text == {"type": "text", "text": chat["content"]}
    counts = whole["usage"]
    assert 0 < counts["output_tokens_details"]["thinking_tokens"] < counts["output_tokens"]
    lines = thinking.post("/v1/messages", {**BODY, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [(each["index"], each["delta"]) for each in events if each["type"] == "content_block_delta"]
    kinds = list(dict.fromkeys((index, delta["type"]) for index, delta in deltas))
    assert kinds == [(0, "thinking_delta"), (0, "signature_delta"), (1, "text_delta")]
    assert "".join(delta.get("thinking", "") for _, delta in deltas) == thought["thinking"]
    assert "".join(delta.get("text", "") for _, delta in deltas) == text["text"]


def test_tool_calls_are_read_behind_the_reasoning(thinking: Served) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    form = {"regex": THOUGHT + call.replace("{", r"\{").replace("}", r"\}"), "reasoning": None}
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = thinking.post(CHAT, {**BODY, "structured_outputs": form, "tools": tools}).json()
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["message"]["reasoning"] and choice["finish_reason"] == "tool_calls"


NAMED = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_begins_behind_the_reasoning(stream: bool, opened: Served) -> None:
    """The model thinks until the end of the text: there is no call yet."""
    body = {"messages": MESSAGES, "max_tokens": 12, "stream": stream, **NAMED}
    body["tools"] = [{"type": "function", "function": TOOL}]
    text = opened.post(CHAT, body).text
    assert '"reasoning"' in text and "tool_calls" not in text, text
    body = {
        "input": "Hello",
        "max_output_tokens": 12,
        "stream": stream,
        "tools": [{"type": "function", **TOOL}],
    }
    text = opened.post(RESPONSES, {**body, "tool_choice": {"type": "function", "name": "f"}}).text
    assert "reasoning_text" in text and '"function_call"' not in text and "response.failed" not in text


def test_a_continued_reasoning_goes_on(thinking: Served) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nLet me see"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    form = {"regex": r" it\.</think>Yes", "reasoning": None}
    answer = thinking.post(CHAT, {**BODY, "messages": messages, **more, "structured_outputs": form}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("it.", "Yes")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**SCHEMA, "maxProperties": 1}}}


def test_a_schema_holds_for_the_answer_behind_an_opened_reasoning(opened: Served) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "response_format": FORMAT}
    free = opened.post(CHAT, body).json()["choices"][0]["message"]
    assert free["reasoning"] and not free["content"], "it thinks until the end, without a constraint"
    told = opened.post(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": False}}).json()
    message = told["choices"][0]["message"]
    assert "reasoning" not in message and message["content"].startswith("{")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_reasoning_of_earlier_messages_reaches_the_template(name: str, opened: Served) -> None:
    messages = [{"role": "assistant", "content": "Hi.", name: "I greet."}, *MESSAGES]
    answer = opened.post(CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True}).json()
    prompt = opened.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt.startswith("I greet.Hi.")


def test_formats_are_found_by_the_template() -> None:
    assert markers_for("auto", "… '<think>\\n\\n</think>\\n\\n' …") == markers_for("deepseek_r1", "")
    assert markers_for("auto", "[THINK]{{ x }}[/THINK]") == markers_for("mistral", "")
    assert markers_for("auto", "{{ messages }}") is None is markers_for("none", "</think>")


def test_a_budget_ends_the_reasoning(thinking: Served) -> None:
    """The structured output makes the model think longer than it may: its end is forced."""
    body = {**BODY, "structured_outputs": None, "messages": [{"role": "user", "content": "<think>"}]}
    plain = {"add_generation_prompt": True, "ignore_eos": True, "min_tokens": 30}
    template = {"prompt": "So <think>\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    free, bound = (
        thinking.post("/v1/completions", {**template, **more}).json()["choices"][0]["text"]
        for more in ({}, {"thinking_token_budget": 5})
    )
    assert "</think>" in bound and bound.partition("</think>")[0] == free[: bound.index("</think>")]
    for path, given in ((CHAT, {**body, **plain}), (RESPONSES, {"input": "Hello", "max_output_tokens": 8})):
        for budget in (-1, 0, 5):
            assert thinking.post(path, {**given, "thinking_token_budget": budget}).status_code == 200
        assert thinking.post(path, {**given, "thinking_token_budget": -2}).status_code == 400


def test_a_budget_of_an_opened_reasoning_bounds_what_is_thought(opened: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    for budget in (0, 6):
        message = opened.post(CHAT, {**body, "thinking_token_budget": budget}).json()["choices"][0]["message"]
        assert message["content"] and len(message.get("reasoning") or "") <= 40
        assert budget or "reasoning" not in message
    anthropic = {**body, "thinking": {"type": "enabled", "budget_tokens": 6}}
    found = opened.post("/v1/messages", anthropic).json()["content"]
    assert [block["type"] for block in found] == ["thinking", "text"]
    assert found[0]["thinking"] == message["reasoning"] and found[1]["text"] == message["content"]


def test_a_budget_needs_known_markers(server: Served) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        error = server.post(path, {**body, "thinking_token_budget": 5}).json()["error"]
        assert error["param"] == "thinking_token_budget" and "--reasoning-parser" in error["message"]
        assert server.post(path, {**body, "max_tokens": 1, "thinking_token_budget": -1}).status_code == 200


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hunyuan_a13b", "<think>\nSo\n</think>\n<answer>\nYes </b>\n</answer>"),
        ("hunyuan_a13b", "<think>\nSo\n</think>\n<answer>Yes </b></answer>"),
        ("ernie45", "<think>\nSo\n</think>\n\n<response>\nYes </b>\n</response>\n"),
    ],
)
def test_an_answer_between_markers_of_its_own_is_read_without_them(name: str, text: str) -> None:
    markers = markers_for(name, "")
    assert markers is not None
    answer = ""
    for end in range(len(text) + 1):
        thought = markers.split(text[:end], end == len(text))
        assert (thought.answer or "").startswith(answer), text[:end]
        answer = thought.answer or ""
    assert (thought.reasoning, answer) == ("So", "Yes </b>")
    assert text[thought.start :].startswith("Yes")
    assert markers.split("<think>So</think>Yes", True).answer == "Yes", "without its own"


def test_the_template_names_the_markers() -> None:
    assert markers_for("auto", "<think></think><answer>") is markers_for("hunyuan_a13b", "")
    assert markers_for("auto", "<think></think><response>") is markers_for("ernie45", "")
    assert markers_for("auto", "<think></think>") is markers_for("qwen3", "")
    assert markers_for("gemma4", "") == ReasoningMarkers("<|channel>thought", "<channel|>")


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("name", "call"), [("kimi_k2", KIMI), ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')]
)
def test_a_call_ends_a_reasoning_that_the_model_has_not_closed(name: str, call: str) -> None:
    use = ToolUse.of([{"type": "function", "function": {"name": "f"}}], "auto", None)
    reply = Reply(PARSERS[name], use, markers=markers_for("kimi_k2", ""))
    text = "<think>I look at f. " + call
    for end in range(len(text) + 1):
        parsed = reply.read(text[:end], "stop" if end == len(text) else None)
        assert "I look at f.".startswith(parsed.reasoning) and not parsed.content, text[:end]
    assert [(each.name, each.arguments) for each in parsed.calls] == [("f", "{}")]


def test_a_budget_ends_at_calls_if_there_may_be_any() -> None:
    markers = markers_for("qwen3", "")
    assert markers is not None
    body = ChatBody(messages=MESSAGES, thinking_token_budget=5)
    made = params_of(body, {}, None, markers, markers, calls=True)
    assert made.reasoning_markers == ("<think>", "</think>", "<tool_call>", "<|tool_calls_section_begin|>")
    form = {"regex": "a"}
    for other in (
        params_of(body, {}, None, markers, markers),
        params_of(body, {}, form, markers, markers, calls=True),
    ):
        assert other.reasoning_markers == ("<think>", "</think>")
