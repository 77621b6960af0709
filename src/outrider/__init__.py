"""Outrider makes a language model answer sooner without changing one token: speculative decoding, exact and complete."""

from outrider.errors import CapacityError, ConfigError, EngineError, ModelError, OutriderError, RequestError
from outrider.llm import LLM
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sampling.logprobs import Logprob
from outrider.sampling.params import SamplingParams
from outrider.types import LoRARequest, Speculation
from outrider.version import VERSION

__version__ = VERSION
__all__ = [
    "LLM",
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
]
