"""A tiny target, and its texts without speculation."""

from __future__ import annotations

import pytest

from outrider import LLM
from outrider.testing import tiny_checkpoint


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="package")
def plain(llama: str) -> LLM:
    return LLM(llama, dtype="float32", enable_prefix_caching=False)
