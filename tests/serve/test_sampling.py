"""Bodies of requests as SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.errors import ApiError
from outrider.serve.protocol import CompletionBody
from outrider.serve.sampling import params_of


@pytest.mark.parametrize(
    "form", [{"guided_json": {"type": "object"}}, {"response_format": {"type": "json_object"}}]
)
def test_vllms_whitespace_pattern_belongs_to_the_json_of_a_body(form: dict[str, Any]) -> None:
    body = CompletionBody.model_validate({"prompt": "a", "guided_whitespace_pattern": " ?", **form})
    assert params_of(body, {}).structured_outputs.whitespace_pattern == " ?"  # type: ignore[union-attr]


@pytest.mark.parametrize("form", [{}, {"guided_regex": "a+"}])
def test_a_whitespace_pattern_without_json_is_refused(form: dict[str, Any]) -> None:
    body = CompletionBody.model_validate({"prompt": "a", "guided_whitespace_pattern": " ?", **form})
    with pytest.raises(ApiError, match="needs a constraint to JSON") as error:
        params_of(body, {})
    assert error.value.param == "guided_whitespace_pattern"
