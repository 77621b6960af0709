"""Lossless speculative decoding for language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider.errors import CapacityError, ConfigError, EngineError, ModelError, OutriderError, RequestError
from outrider.version import VERSION

if TYPE_CHECKING:
    from outrider.async_llm import AsyncLLM
    from outrider.core.logprobs import Logprob
    from outrider.core.params import SamplingParams
    from outrider.core.row import LoRARequest, Speculation
    from outrider.core.structured import StructuredOutputs
    from outrider.llm import LLM
    from outrider.outputs import CompletionOutput, RequestOutput

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineError",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "OutriderError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "StructuredOutputs",
]

# Imported on first access: importing torch takes seconds, and `outrider --help` does not need it.
_HOMES = {
    "LLM": "outrider.llm",
    "AsyncLLM": "outrider.async_llm",
    "CompletionOutput": "outrider.outputs",
    "LoRARequest": "outrider.core.row",
    "Logprob": "outrider.core.logprobs",
    "RequestOutput": "outrider.outputs",
    "SamplingParams": "outrider.core.params",
    "Speculation": "outrider.core.row",
    "StructuredOutputs": "outrider.core.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
