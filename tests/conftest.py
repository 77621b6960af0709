"""Tiny random checkpoints, made once a session and shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelled_time
import pytest
import torch
from hypothesis import HealthCheck, settings
from toys import toy_target

from outrider import LLM, AsyncLLM
from outrider.backends.torch.backend import leave_out_amx
from outrider.testing import bare_checkpoint

# Workers and the processes that tests start import the same files: without bytecode each compiles them again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Triton reads it when something first imports it, which may be before the tests of its kernels do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

leave_out_amx()  # before a test uses oneDNN for anything else

# Tests compare with plain decoding, so here a target decodes plainly unless a test says otherwise.
for api in (LLM, AsyncLLM):
    assert api.__init__.__kwdefaults__["speculative_config"] == "auto"
    api.__init__.__kwdefaults__["speculative_config"] = None

# What a controller chooses would depend on the machine and on earlier runs.
modelled_time.install()

# One thread unless asked: the models are tiny, and a second thread costs more than it gives.
torch.set_num_threads(int(os.environ.get("OUTRIDER_TEST_THREADS", "1")))
# No deadlines: a busy machine is no failure.
settings.register_profile("no_deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        help="Run the first case of each test and every Nth behind it: a sample for a further pass.",
    )


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, seen = config.getoption("every"), Counter[str]()
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left if seen[test] % every else chosen).append(item)
        seen[test] += 1
    items[:] = chosen
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Leave thousands of tests and the libraries, which stay to the end, out of full collections."""
    gc.collect()
    gc.freeze()


Make = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`checkpoint(family, seed, dtype, **config)`: the folder of a `bare_checkpoint`, made on first use."""
    folders: dict[str, Path] = {}

    def make(family: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        key = repr((family, seed, dtype, sorted(config.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp("checkpoint")
            folders[key] = bare_checkpoint(folder, family, seed, dtype, **config)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def tiny(checkpoint: Make) -> Path:
    """A two-layer Llama in float32 with a vocabulary of 300 and a context of 256, without a tokenizer."""
    return checkpoint()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine in float32 on a `toy_target`."""
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32")
