"""Requests made from our OpenAPI document: no answer is a failure of the server; errors have one shape."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def validate(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 5)
    case.call_and_validate(checks=CHECKS, timeout=60)


def test_generated_requests_get_answers_of_the_document(server: Served) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    few = settings(
        max_examples=2,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 8
    for operation in operations:
        few(given(case=operation.as_strategy())(validate))()
