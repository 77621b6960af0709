"""Tiny checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from drafter_cases import PlainOutputs
from helpers import answer
from scene import GREEDY, Scene, Setup
from threads import PARAMS, PROMPTS

from outrider import LLM, SamplingParams
from outrider.testing import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def llama(checkpoints: Path) -> str:
    """Two layers, four heads over two, float32."""
    return tiny_checkpoint(checkpoints / "llama")


@pytest.fixture(scope="session")
def random_draft(checkpoints: Path) -> str:
    """Another random model of the same vocabulary: a draft that is nearly always wrong."""
    return tiny_checkpoint(checkpoints / "random_draft", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def mistral(checkpoints: Path) -> str:
    """Every layer sees eight tokens."""
    return tiny_checkpoint(checkpoints / "mistral", "Mistral", sliding_window=8)


@pytest.fixture(scope="session")
def qwen3(checkpoints: Path) -> str:
    """Norms of queries and keys, and three layers."""
    return tiny_checkpoint(checkpoints / "qwen3", "Qwen3", num_hidden_layers=3)


@pytest.fixture(scope="session")
def plain(llama: str) -> LLM:
    """Plain decoding: what everything is compared with."""
    return LLM(llama, max_num_seqs=4, enable_prefix_caching=False)


@pytest.fixture(scope="session")
def outputs_of(plain: LLM) -> PlainOutputs:
    """Outputs of plain decoding, computed once for all tests."""
    return PlainOutputs(plain)


@pytest.fixture(scope="session")
def fast(llama: str) -> LLM:
    """The engine under test; every test puts its own drafter in."""
    return LLM(llama, max_num_seqs=4)


@pytest.fixture(scope="session")
def shared(llama: str) -> LLM:
    """An engine that several threads use."""
    return LLM(llama, dtype="float32", seed=0, max_num_seqs=5)


@pytest.fixture(scope="session")
def texts(shared: LLM) -> list[list[int]]:
    """What each request of threads.py gets alone."""
    return [answer(shared, prompt, p).outputs[0].token_ids for prompt, p in zip(PROMPTS, PARAMS)]


@pytest.fixture
def scene(plain: LLM, fast: LLM) -> Setup:
    """`scene(params, script)`: a healthy one, shown to be healthy."""

    def make(params: SamplingParams | Sequence[SamplingParams] = GREEDY, script: str = "hidden") -> Scene:
        many = [params] if isinstance(params, SamplingParams) else params
        seeded = [SamplingParams(**{**vars(p), "seed": 5}) for p in many]
        made = Scene(plain, fast, seeded[0] if isinstance(params, SamplingParams) else seeded, script)
        made.healthy()
        return made

    return make
