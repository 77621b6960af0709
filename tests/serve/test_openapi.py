"""Requests made from our OpenAPI document, and nested bodies that it leaves open: no answer is a failure of
the server, and errors have one shape.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Served

from outrider.serve.messages.protocol import MessagesErrorBody
from outrider.serve.protocol import ErrorBody

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FEW = settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def validate(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):
        for name in LENGTHS:
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 5)
    case.call_and_validate(checks=CHECKS, timeout=60)


def test_generated_requests_get_answers_of_the_document(open_server: Served) -> None:
    document = schemathesis.openapi.from_url(f"{open_server.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 8
    for operation in operations:
        FEW(given(case=operation.as_strategy())(validate))()


# ---- values with the right keys and any content, where the document says "object" only

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(max_size=8) | st.sampled_from(
    ["user", "text", "function", "message", "string", "object", "add"]
)
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def made_of(*keys: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with some of these keys."""
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(keys, VALUES), **known}) | VALUES


SCHEMAS = made_of(
    "properties", "required", "enum", "items", "$ref", "pattern", "anyOf", type=st.just("object") | VALUES
)
FUNCTIONS = made_of("name", "description", name=WORDS, parameters=SCHEMAS)
TOOLS = made_of("name", type=st.just("function"), function=FUNCTIONS, name=WORDS, parameters=SCHEMAS)
PARTS = WORDS | st.lists(made_of("text", type=st.sampled_from(["text", "input_text", "image"])), max_size=2)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
MESSAGES = made_of(
    "name",
    "tool_call_id",
    role=ROLES | VALUES,
    content=PARTS | VALUES,
    tool_calls=st.lists(TOOLS, max_size=2),
)
CHOICES = (
    st.sampled_from(["auto", "none", "required"])
    | TOOLS
    | made_of(
        "mode",
        type=st.just("allowed_tools"),
        allowed_tools=made_of("mode", tools=VALUES),
        tools=VALUES,
        name=WORDS,
    )
)
KINDS = st.sampled_from(["text", "json_object", "json_schema"]) | VALUES
ITEMS = MESSAGES | made_of(
    "call_id",
    "output",
    type=st.sampled_from(["function_call", "function_call_output", "message"]),
    name=WORDS,
    arguments=WORDS,
)


def several(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(each, min_size=1, max_size=3)


FORMS = {"json": SCHEMAS, "regex": WORDS, "choice": VALUES, "grammar": WORDS}
BODIES = {
    "/v1/chat/completions": {
        "messages": several(MESSAGES),
        "tools": several(TOOLS),
        "tool_choice": CHOICES,
        "response_format": made_of(type=KINDS, json_schema=made_of("name", schema=SCHEMAS)),
        "structured_outputs": made_of(**FORMS),
        "logit_bias": VALUES,
        "stream": st.booleans(),
        "chat_template_kwargs": VALUES,
        "prediction": made_of("content", type=st.just("content")),
        "stop": VALUES,
        "continue_final_message": st.booleans(),
        "speculation": made_of("method", "max_tokens"),
    },
    "/v1/responses": {
        "input": WORDS | several(ITEMS),
        "tools": several(TOOLS),
        "tool_choice": CHOICES,
        "stream": st.booleans(),
        "instructions": WORDS,
        "text": made_of(format=made_of("name", type=KINDS, schema=SCHEMAS)),
        "metadata": VALUES,
        "structured_outputs": made_of(**FORMS),
    },
    "/v1/messages": {
        "messages": several(MESSAGES),
        "system": PARTS,
        "tools": several(TOOLS),
        "tool_choice": made_of("name", type=st.sampled_from(["auto", "any", "tool", "none"])),
        "thinking": made_of("budget_tokens", type=st.sampled_from(["enabled", "disabled"])),
        "output_config": made_of("effort", format=made_of(type=KINDS, schema=SCHEMAS)),
        "stream": st.booleans(),
        "stop_sequences": VALUES,
    },
    "/tokenize": {
        "messages": several(MESSAGES),
        "tools": several(TOOLS),
        "prompt": WORDS,
        "chat_template_kwargs": VALUES,
        "continue_final_message": st.booleans(),
        "return_token_strs": st.booleans(),
    },
    "/detokenize": {"tokens": st.lists(st.integers(-1, 9000), max_size=4) | VALUES},
    "/v1/load_lora_adapter": {"lora_name": WORDS, "lora_path": WORDS | st.just("/etc/passwd")},
    "/v1/unload_lora_adapter": {"lora_name": VALUES},
}


HELLO = {"role": "user", "content": "Hello"}
VALID: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [HELLO], "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": [HELLO], "max_tokens": 3},
    "/tokenize": {"messages": [HELLO]},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


@st.composite
def nearly_valid(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body with other values in two fields at most."""
    names = draw(st.lists(st.sampled_from(sorted(BODIES[path])), max_size=2, unique=True))
    return VALID[path] | {name: draw(BODIES[path][name]) for name in names}


@pytest.mark.parametrize("path", BODIES)
def test_nested_bodies_get_an_answer_or_an_error_of_one_shape(path: str, open_server: Served) -> None:
    statuses = set[int]()

    @settings(FEW, max_examples=24)
    @given(nearly_valid(path))
    def check(body: dict[str, Any]) -> None:
        answer = open_server.post(path, body)
        assert answer.status_code < 500, answer.text
        statuses.add(answer.status_code)
        if answer.status_code != 200:
            shape = MessagesErrorBody if path == "/v1/messages" else ErrorBody
            jsonschema.validate(answer.json(), shape.model_json_schema())
        elif "event-stream" in answer.headers.get("content-type", ""):
            assert '"code":"500"' not in answer.text and "server_error" not in answer.text, answer.text

    check()
    assert statuses >= ({400} if "lora" in path else {200, 400})
