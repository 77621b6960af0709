"""vLLM's structural_tag, in every field that takes it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from served import Served

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TAG: dict[str, Any] = {
    "structures": [{"begin": "very<weather>", "schema": CITY, "end": "</weather>"}],
    "triggers": ["very"],
}
FORMAT = {"type": "structural_tag", **TAG}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY: dict[str, Any] = {"prompt": "The future of AI is", "max_tokens": 100, "temperature": 0}
FORMS: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"structured_outputs": {"structural_tag": json.dumps(FORMAT)}},
    {"structured_outputs": {"structural_tag": TAG}},
    {"structural_tag": json.dumps(FORMAT)},
]


def test_parts_of_a_text_follow_their_schema_with_and_without_speculation(server: Served) -> None:
    plain = server.post(COMPLETIONS, BODY).json()["choices"][0]["text"]
    assert "very" in plain and "very<" not in plain
    answers = [server.post(COMPLETIONS, {**BODY, **form}) for form in FORMS]
    answers.append(server.post(COMPLETIONS, {**BODY, **FORMS[0], "speculation": {"enabled": False}}))
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1, [answer.text for answer in answers]
    parts = re.findall(r"very<weather>(.*?)</weather>", text := texts.pop())
    assert 0 < text.count("very<") <= len(parts) + 1, "the last part may be cut off"
    assert all(json.loads(part)["city"] in ("Rome", "Oslo") for part in parts)


def test_chats_and_responses_take_it(server: Served) -> None:
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.post(CHAT, {**hello, "response_format": FORMAT}).status_code == 200
    text = {"format": FORMAT}
    answer = server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 4, "text": text})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {**FORMAT, "triggers": ["<g"]}}, "response_format"),
        ({"response_format": {**FORMAT, "triggers": "very"}}, "response_format.triggers"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structural_tag": {"structures": 5}}, "structural_tag"),
    ],
)
def test_a_fault_names_its_field(more: Any, param: str, server: Served) -> None:
    answer = server.post(COMPLETIONS, {**BODY, **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
