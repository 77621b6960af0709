"""A tiny target with a tokenizer, its answers to a tiny corpus, and options of short runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import toy_target

from outrider import LLM
from outrider.config import options
from outrider.testing import tiny_tokenizer
from outrider.testing.checkpoints import VOCABULARY
from outrider.train.methods import method
from outrider.train.options import TrainOptions

WORDS = ("the cat sat", "a dog ran home", "rain fell", "she said no", "ten men ate", "it is late")
Make = Callable[..., TrainOptions]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCABULARY, num_hidden_layers=4)
    tiny_tokenizer().save_pretrained(folder)
    return LLM(folder, dtype="float32", max_num_seqs=32, kv_cache_memory_bytes=1 << 24)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = random.Random(0), tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    texts = [{"text": " ".join(rng.choices(WORDS, k=3))} for _ in range(40)]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def run_options(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Options of a short run of a method, whose answers are shared by all."""
    cache = tmp_path_factory.mktemp("cache")

    def make(name: str, out: Path, **given: Any) -> TrainOptions:
        short = {
            "data": (str(corpus),),
            "out": str(out),
            "cache": str(cache),
            "prompt_tokens": 4,
            "answer_tokens": 20,
            "length": 24,
            "steps": 30,
            "batch": 4,
            "rate": 3e-3,
            "held_out": 4,
            "evaluate_tokens": 16,
            "evaluate_every": 1000,
        }
        return options(method(name).Options, {**short, **given}, "training option")

    return make
