"""cache_salt of requests, documents of a chat, and /load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, forked

TEMPLATE = (
    "{% for document in documents %}<{{ document.title }}: {{ document.text }}>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
LONG = "A long prompt that fills several pages of the cache, again and again. " * 4
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": f"Chat. {LONG}"}],
        "max_tokens": 4,
        "temperature": 0,
    },
    "/v1/responses": {"input": f"Respond. {LONG}", "max_output_tokens": 4, "temperature": 0},
}


def cached(server: Served, path: str, salt: str | None) -> tuple[int, str]:
    """Cached tokens of the prompt, and what was answered."""
    answer = server.post(path, {**BODIES[path], "cache_salt": salt}).json()
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"], str(answer.get("choices") or answer["output"][0]["content"])


@pytest.mark.parametrize("path", BODIES)
def test_requests_of_one_salt_alone_share_cached_pages(path: str, server: Served) -> None:
    found = [cached(server, path, salt) for salt in ("mine", "mine", "theirs", None, None, "theirs")]
    assert [count > 0 for count, _ in found] == [False, True, False, False, True, True]
    assert len({text for _, text in found}) == 1


def test_prompts_of_token_ids_are_salted_too(server: Served) -> None:
    for salt, found in (("a", 0), ("b", 0), ("a", 48)):
        body = {"prompt": [*range(300, 350)], "max_tokens": 1, "cache_salt": salt}
        usage = server.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == found


@pytest.mark.parametrize("salt", ["", 5])
def test_another_value_is_no_salt(salt: Any, server: Served) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "cache_salt": salt})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


# ---- a server with a template that has documents


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--speculative-config", "off", "--max-model-len", "256", "--api-key", "secret"]
    with forked("builtin", "--chat-template", str(template), *flags) as running:
        yield running


def test_documents_are_given_to_the_chat_template(reader: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "Which?"}],
        "documents": [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    key = {"Authorization": "Bearer secret"}
    answer = reader.post("/v1/chat/completions", body, headers=key).json()
    prompt = reader.post("/detokenize", {"tokens": answer["prompt_token_ids"]}, headers=key).json()["prompt"]
    assert prompt == "<One: first><Two: second>Which?"


def test_the_load_is_told_without_a_key(reader: Served) -> None:
    assert reader.get("/load").json() == {"server_load": 0}
