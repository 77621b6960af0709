"""One server for the tests of this folder that need no options of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served, forked

from outrider import LLM


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    flags = ["--seed", "42", "-tp", "1", "--gpu_memory_utilization", "0.8", "--max-model-len", "512"]
    flags += ["--log-interval", "1", "--stream-interval", "0"]
    with forked("builtin", "--speculative_config", config, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The model of the server, offline and without speculation."""
    return LLM("builtin", seed=42, max_model_len=512)


@pytest.fixture(scope="session")
def adaptive() -> Iterator[Served]:
    """A server with an API key and two names, whose controller chooses between two drafters."""
    config = '{"method": "auto", "model": "builtin-draft"}'
    flags = ["--api-key", "secret", "--max-model-len", "512", "--served-model-name", "builtin", "alias"]
    with forked("builtin", "--speculative-config", config, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def open_server() -> Iterator[Served]:
    """A server whose clients may load adapters.  Nothing may be left in it at the end."""
    options = ("--enable-lora", "--allow-lora-loading", "--max-model-len", "256")
    with forked("builtin-draft", *options) as running:
        yield running
        assert running.idle() and "Traceback" not in running.log
