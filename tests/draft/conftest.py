"""A toy target for tests that train or load heads; files with another one define their own."""

from __future__ import annotations

import pytest
from toys import toy_target

from outrider import LLM


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy_target(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    return LLM(target, dtype="float32")
