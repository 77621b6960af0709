"""generation_config.json: tokens that end a text, and the sampling parameters that a model is meant for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.checkpoints.fields import GENERATION
from outrider.checkpoints.validate import read_json

FILE = "generation_config.json"
# names there -> those of SamplingParams, as in vLLM
SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
SAMPLING |= {"max_new_tokens": "max_tokens"}


def generation_config(folder: Path) -> dict[str, Any]:
    """The config of a folder; empty if there is none.  Raises ModelError."""
    path = folder / FILE
    return read_json(path, GENERATION) if path.is_file() else {}


def sampling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its sampling parameters, by their names in SamplingParams."""
    found = {name: config.get(old) for old, name in SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
