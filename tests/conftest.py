"""Tiny random checkpoints, made once a session and shared by all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# One thread unless asked: the models are tiny, and a second thread costs more than it gives.
torch.set_num_threads(int(os.environ.get("OUTRIDER_TEST_THREADS", "1")))
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no failure
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, help="Run one test in N of each file: a sample for a further pass."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, seen = config.getoption("every"), Counter[Path]()
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (left if seen[item.path] % every else chosen).append(item)
        seen[item.path] += 1
    items[:] = chosen
    config.hook.pytest_deselected(items=left)


Make = Callable[..., Path]
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_checkpoint(
    folder: Path, family: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **given: Any
) -> Path:
    """A random checkpoint of `family` in `folder`; `given` overrides the config, `shard` sets max_shard_size.

    Biases and norms are random too: a fresh model has them at 0 and 1, where forgetting one would go unnoticed.
    """
    import transformers

    shard = {"max_shard_size": given.pop("shard")} if "shard" in given else {}
    config = getattr(transformers, f"{family}Config")(**BASE | given)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder, **shard)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`checkpoint(family, seed, dtype, **config)` -> the folder of such a checkpoint, made on first use."""
    made: dict[str, Path] = {}

    def make(family: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **given: Any) -> Path:
        key = repr((family, seed, dtype, sorted(given.items())))
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, seed, dtype, **given)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(checkpoint: Make) -> Path:
    """A two-layer Llama in float32 with a vocabulary of 300 and a context of 256, without a tokenizer."""
    return checkpoint()
