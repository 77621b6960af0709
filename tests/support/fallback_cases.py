"""Prompts, and logits of models that run in the code of transformers, or might."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.backends.cpu import backend as cpu
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.fallback.model import Fallback
from outrider.models.placement import Precision

LENGTHS = (1, 9, 9, 30, 30)
needs_c = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(300) for _ in range(length)] for length in LENGTHS]


def fallback(folder: Path, dtype: torch.dtype) -> Fallback:
    return Fallback(Checkpoint.open(str(folder)), Precision(dtype), torch.device("cpu"), 200)


def lean(folder: Path, dtype: torch.dtype) -> Decoder:
    return Decoder(Checkpoint.open(str(folder)), Precision(dtype), torch.device("cpu"), 200)


def chain(model: Model, pool: Any, start: int, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V]."""
    step_input = StepInput.of_chain(array("i", range(256)), start, tokens)
    return model.logits(model.forward(step_input, pool), list(range(len(tokens))))
