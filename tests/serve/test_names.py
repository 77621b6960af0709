"""Several names of one model: requests may have any of them, responses have the first, as vLLM's."""

from __future__ import annotations

import openai
import pytest
from served import Served

NAMES = ["builtin", "alias"]


def test_any_name_is_accepted_and_responses_have_the_first(adaptive: Served) -> None:
    client = adaptive.client("secret")
    assert [model.id for model in client.models.list()] == NAMES
    for name in NAMES:
        assert client.models.retrieve(name).id == name
        found = [
            client.completions.create(model=name, prompt="a", max_tokens=1).model,
            client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "a"}], max_tokens=1
            ).model,
            client.responses.create(model=name, input="a", max_output_tokens=1).model,
            *(part.model for part in client.completions.create(model=name, prompt="a", stream=True)),
        ]
        assert set(found) == {"builtin"}


def test_another_name_is_refused_with_those_that_are_served(adaptive: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'other', but builtin, alias"):
        adaptive.client("secret").completions.create(model="other", prompt="a")


def test_an_empty_name_is_that_of_the_model(server: Served) -> None:
    answer = server.post("/v1/completions", {"model": "", "prompt": "a", "max_tokens": 1})
    assert (answer.status_code, answer.json()["model"]) == (200, "builtin")
