"""Fields that OpenAI's client and clients of vLLM's server send: used, without effect, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from served import Served, forked

from outrider.errors import ConfigError
from outrider.serve.ids import ATTEMPT
from outrider.serve.options import ServerOptions
from outrider.serve.protocol import CURES, UNSUPPORTED, ChatBody, CompletionBody, ResponsesBody
from outrider.serve.state import Server

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The future of AI is", "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": HELLO, "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "Hello", "max_output_tokens": 4, "temperature": 0},
}
OF_THE_SERVICE = {"prompt", "image", "access_programs", "background_options"}  # of responses: unknown here
WITHOUT_EFFECT: dict[str, Any] = {
    "user": "someone", "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"}, "metadata": {"a": "b"}, "store": True,
    "service_tier": "auto", "session_id": "x", "stream_interval": 4, "guided_decoding_backend": "xgrammar",
    "length_penalty": 1.0, "early_stopping": False, "truncation_side": "left", "watermarking": False,
    "routed_experts_prompt_start": 0, "return_token_offsets": True, "return_mm_kwargs": False,
    "thinking_token_budget": -1, "ec_transfer_params": {},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"best_of": 1, "suffix": "", "logit_bias": {}, "stop": [], "echo": False, "n": 1},
    CHAT: {
        "verbosity": "low", "reasoning_effort": "minimal", "modalities": ["text"], "logprobs": False,
        "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "logit_bias": {}, "stop": [],
        "response_format": {"type": "text"}, "functions": None, "web_search_options": None, "audio": None,
        "vllm_xargs": {}, "logits_processors": [], "mm_processor_kwargs": {}, "kv_transfer_params": {},
    },
    RESPONSES: {
        "reasoning": {"effort": "low", "summary": None}, "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": False, "tools": [],
        "max_tool_calls": 3, "stream_options": {"include_obfuscation": False}, "truncation": "disabled",
        "background": False, "enable_response_messages": False, "conversation": None,
        "top_logprobs": 0, "tool_choice": "auto",
    },
}  # fmt: skip
# fields of vLLM's bodies, as of November 2026
VLLM_COMMON = """
    model frequency_penalty logit_bias presence_penalty seed stop stream stream_options temperature top_p user
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    max_tokens n logprobs response_format structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval echo add_special_tokens
"""
VLLM: list[tuple[Any, str]] = [
    (CompletionBody, VLLM_COMMON + "prompt suffix prompt_embeds"),
    (
        ChatBody,
        VLLM_COMMON
        + """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
""",
    ),
    (
        ResponsesBody,
        """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id reasoning service_tier store stream temperature text tool_choice
    tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
    prompt_cache_key request_id mm_processor_kwargs priority cache_salt enable_response_messages
    previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
    vllm_xargs prompt
""",
    ),
]
KINDS: list[tuple[Any, Any]] = [
    (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    (chat_create_params.CompletionCreateParamsBase, ChatBody),
    (response_create_params.ResponseCreateParamsBase, ResponsesBody),
]


@pytest.mark.parametrize(("params", "body"), KINDS)
def test_every_field_of_openais_client_is_known_or_refused_by_name(params: Any, body: Any) -> None:
    names = set(params.__annotations__)
    assert len(names) > 10
    assert names <= body.model_fields.keys() | UNSUPPORTED.keys() | OF_THE_SERVICE
    assert not body.model_fields.keys() & UNSUPPORTED.keys()


@pytest.mark.parametrize(("body", "names"), VLLM)
def test_every_field_of_vllm_is_known_or_refused_by_name(body: Any, names: str) -> None:
    assert {*names.split()} <= body.model_fields.keys() | UNSUPPORTED.keys() | {"prompt"}


@pytest.mark.parametrize("path", BODIES)
def test_fields_without_an_effect_change_nothing(path: str, server: Served) -> None:
    found = [server.post(path, {**BODIES[path], **more}) for more in ({}, {**WITHOUT_EFFECT, **MORE[path]})]
    assert [answer.status_code for answer in found] == [200, 200], found[1].text
    texts = [answer.json().get("choices") or answer.json()["output"][0]["content"] for answer in found]
    assert texts[0] == texts[1]
    more = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert server.post(path, {**BODIES[path], **more}).status_code == 200


def test_the_text_of_a_prompt_is_returned(server: Served) -> None:
    body = {**BODIES[CHAT], "return_prompt_text": True}
    text = server.post(CHAT, body).json()["prompt_text"]
    assert "Hello" in text and text != "Hello"
    lines = server.post(CHAT, {**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [part.get("prompt_text") for part in parts] == [text] + [None] * (len(parts) - 1)
    assert all("token_ids" not in part["choices"][0] for part in parts)
    assert "prompt_text" not in server.post(CHAT, BODIES[CHAT]).json()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"watermarking": True}, "texts have no watermark"),
        ({"routed_experts_prompt_start": 3}, "leave it out"),
        ({"truncation_side": "right"}, "left"),
        ({"use_beam_search": True}, "use best_of"),
    ],
)
def test_values_that_would_change_the_text_are_refused_by_name(
    more: dict[str, Any], text: str, server: Served
) -> None:
    for path, body in BODIES.items():
        answer = server.post(path, {**body, **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and text in error["message"] and [error["param"]] == [*more]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_refusal_has_its_cure(name: str, server: Served) -> None:
    answer = server.post(CHAT, {**BODIES[CHAT], name: {"a": 1}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unknown_parameter")
    assert error["message"] == f"{name} is not supported: {UNSUPPORTED[name]}."


def test_the_header_x_request_id_names_a_request(server: Served) -> None:
    def id_of(header: str, **more: Any) -> str:
        answer = server.post(CHAT, {**BODIES[CHAT], **more}, headers={"X-Request-Id": header})
        return str(answer.json()["id"])

    assert id_of("trace-1") == "chatcmpl-trace-1" and id_of("trace-1", request_id="own") == "chatcmpl-own"
    for header in ("", "a b", "x" * 201):
        assert header not in id_of(header)[9:] or not header
        assert len(id_of(header)) == len("chatcmpl-") + 32


def test_a_header_x_request_id_may_be_repeated(server: Served) -> None:
    """While its first request runs, and with other ids of its parts."""
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"enum": [3]}},
              "required": ["a"], "additionalProperties": False}}]  # fmt: skip
    body = {"messages": [{"role": "user", "content": "Call f."}], "max_tokens": 60, "tools": tools,
            "tool_choice": {"type": "any"}}  # fmt: skip

    def ask(attempt: str) -> Any:
        headers = {"X-Request-Id": "again", **({ATTEMPT: attempt} if attempt else {})}
        return server.post("/v1/messages", body, headers=headers)

    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(ask, ["", "", "one", "two"])]
    assert [answer.status_code for answer in answers] == [200] * 4, answers[-1].text
    found = [answer.json() for answer in answers] + [ask("one").json()]
    assert {each["id"] for each in found} == {"msg_again"}
    calls = [each["content"][0]["id"] for each in found]
    assert len({*calls}) == 4 and calls[2] == calls[4]


def test_sagemakers_route_takes_chats_and_completions(server: Served) -> None:
    for path in (CHAT, COMPLETIONS):
        answers = [server.post(each, BODIES[path]).json() for each in ("/invocations", path)]
        assert answers[0]["choices"] == answers[1]["choices"] and "object" in answers[0]
    for body in ({}, {"prompt": 5}, "x"):
        assert server.post("/invocations", body).status_code == 400
    assert server.post("/invocations", content=b"{").status_code == 400
    stream = server.post("/invocations", {**BODIES[CHAT], "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_a_response_takes_the_sampling_parameters_of_a_chat(server: Served) -> None:
    """As in vLLM, whose responses have them beside OpenAI's fields."""
    more = {"presence_penalty": 2.0, "frequency_penalty": 1.5, "logit_bias": {"9": 4}, "stop": ["an", "e"]}
    chat = server.post(CHAT, {**BODIES[CHAT], **more, "max_tokens": 40}).json()["choices"][0]
    answer = server.post(RESPONSES, {**BODIES[RESPONSES], **more, "max_output_tokens": 40}).json()
    assert answer["output"][0]["content"][0]["text"] == chat["message"]["content"]
    assert chat["stop_reason"] in more["stop"] and answer["status"] == "completed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 0.5),
        ("early_stopping", True),
        ("use_beam_search", True),
        ("truncation_side", "right"),
        ("modalities", ["audio"]),
    ],
)
def test_values_with_an_effect_are_refused(field: str, value: Any, server: Served) -> None:
    answer = server.post(CHAT, {**BODIES[CHAT], field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field)
    assert CURES.get(field, "") in answer.json()["error"]["message"]


# ---- a server whose template shows its variables


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(
        "{{ greeting }}<{{ reasoning_effort }} {{ enable_thinking }}>{{ messages[0].content }}"
    )
    flags = ["--chat-template", str(template), "--default-chat-template-kwargs", '{"greeting": "Yo"}']
    for name, value in (("temperature", "0"), ("max_new_tokens", "3")):
        flags += [f"--override-generation-config.{name}", value]
    flags.append("--enable-force-include-usage")
    with forked("builtin", "--speculative-config", "off", "--max-model-len", "256", *flags) as running:
        yield running


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "Yo< >Hello"),
        ({"reasoning_effort": "low"}, "Yo<low True>Hello"),
        ({"reasoning_effort": "none"}, "Yo<none False>Hello"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "Yo<low False>Hello",
        ),
        ({"chat_template_kwargs": {"greeting": "Hey"}}, "Hey< >Hello"),
    ],
)
def test_the_reasoning_effort_is_given_to_the_template(more: Any, expected: str, reasoning: Served) -> None:
    answer = reasoning.post(CHAT, {**BODIES[CHAT], **more, "return_token_ids": True}).json()
    prompt = reasoning.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_may_be_forced_into_streams(path: str, reasoning: Served, server: Served) -> None:
    for more in ({}, {"stream_options": {"include_usage": False}}):
        body = {**BODIES[path], **more, "stream": True}
        assert '"usage":{"prompt_tokens":' in reasoning.post(path, body).text.split("\n\n")[-3]
        assert "usage" not in server.post(path, body).text


def test_sampling_parameters_that_are_not_given_are_the_servers(reasoning: Served) -> None:
    body = {"messages": BODIES[CHAT]["messages"], "ignore_eos": True}
    given = {**body, "temperature": 0, "max_tokens": 3}
    default, explicit, longer = (
        reasoning.post(CHAT, each).json() for each in (body, given, {**body, "max_tokens": 5})
    )
    assert default["choices"] == explicit["choices"] and default["usage"]["completion_tokens"] == 3
    assert longer["usage"]["completion_tokens"] == 5


def test_the_effort_of_a_response_is_given_to_the_template(reasoning: Served) -> None:
    counts = [
        reasoning.post(RESPONSES, {**BODIES[RESPONSES], **more}).json()["usage"]["input_tokens"]
        for more in ({}, {"reasoning": {"effort": "medium"}})
    ]
    assert counts[0] < counts[1]


def test_a_template_may_be_given_in_one_line() -> None:
    """As to vLLM, which takes a text with a brace for the template itself."""
    text = "{{ messages[0].content }}"
    assert Server(ServerOptions(chat_template=text), "builtin").template == text
    with pytest.raises(ConfigError, match="chat_template 'no-such-file' cannot be read"):
        Server(ServerOptions(chat_template="no-such-file"), "builtin")
