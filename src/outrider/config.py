"""Engine options, in vLLM's names.  The keys of speculative_config belong to those who use them: the method's own
`Options` (draft/<method>.py) and the controller's (control/fixed.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from outrider import draft, verify
from outrider.cache.pool import kv_dtype
from outrider.checkpoints.quantize import bits_of
from outrider.control import fixed
from outrider.core.logprobs import MODES
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError, unknown
from outrider.models.placement import check_gpu_layers
from outrider.verify.base import Rule

T = TypeVar("T")

_LEVELS = "Did you mean 'num_speculative_tokens'?"
_MODEL = "Did you mean 'model'?"
_RULE = "Did you mean 'verification'?"
RENAMED = {  # keys of speculative_config as other programs, or earlier versions of vLLM, call them
    "speculative_model": _MODEL, "assistant_model": _MODEL, "num_draft_tokens": _LEVELS,
    "num_assistant_tokens": _LEVELS, "prompt_lookup_num_tokens": _LEVELS, "max_draft_len": _LEVELS, "verify": _RULE,
    "acceptance_method": _RULE, "spec_decoding_acceptance_method": _RULE, "rejection_sample_method": _RULE,
    "controller": "How much is drafted: num_speculative_tokens, or num_speculative_tokens_per_batch_size.",
}  # fmt: skip


@dataclass(frozen=True)
class EngineOptions:
    """dtype: auto, float32, bfloat16 or float16.  quantization: int8 or int4 quantises the weights while loading (None: as they
    are).  kv_cache_dtype: auto or int8, for target and draft.  device: auto, cpu, cuda, cuda:1 or mps.  gpu_layers: so many of the
    last layers lie on that GPU and the rest on the CPU, as llama.cpp's -ngl has it (None: all; more than the model has: embedding and head,
    too).  max_model_len: tokens a request may have, prompt included (None: what the model was made for; with
    longrope and dynamic RoPE scaling, what it does not scale).  max_num_seqs: rows that run at once.
    max_num_batched_tokens: prompt tokens, decodes and guesses of one step.  max_decode_slowdown:
    how many times longer a decode step may take with prompt tokens in it, such as 1.5 (None: the least
    slowdown under which a first token comes within 3 times what its prompt takes alone).
    kv_cache_memory_bytes: memory for K/V of target and draft together (None: what max_num_seqs full requests
    need, but at most a quarter of the free memory on a CPU, gpu_memory_utilization of a GPU).  seed: requests
    without a seed of their own derive theirs from it.  logprobs_mode: what log-probabilities are: of the
    model as it is (raw_logprobs) or after everything that the request does to them (processed_logprobs), or
    the logits themselves (raw_logits, processed_logits); those of a prompt are always raw.  enable_lora:
    requests may name LoRA adapters, of at most max_lora_rank; max_loras of them are in memory (and in use) at
    once.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    gpu_layers: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_decode_slowdown: float | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    seed: int | None = None
    logprobs_mode: str = "raw_logprobs"
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model must be a folder, a .gguf file, a hub id or a built-in name, got {self.model!r}."
            )
        for name in ("tokenizer", "revision"):
            if (text := getattr(self, name)) is not None and not (isinstance(text, str) and text):
                raise ConfigError(f"{name} must be a string or None, got {text!r}.")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running request needs one token a step."
            )
        slowdown = self.max_decode_slowdown
        if slowdown is not None and (
            not isinstance(slowdown, (int, float)) or isinstance(slowdown, bool) or not slowdown > 1
        ):
            raise ConfigError(
                f"max_decode_slowdown must be a number above 1 or None, got {slowdown!r}: a decode step "
                "with prompt tokens takes longer than one without."
            )
        bits_of(self.quantization)
        kv_dtype(self.kv_cache_dtype, torch.float32)
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}."
            )
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError(f"seed must be a whole number or None, got {self.seed!r}.")
        if self.logprobs_mode not in MODES:
            raise ConfigError(unknown("logprobs_mode", self.logprobs_mode, MODES))
        for name in ("enable_prefix_caching", "trust_remote_code", "enable_lora"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        check_gpu_layers(self.gpu_layers, "gpu_layers")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size must be 1, got {self.tensor_parallel_size!r}: one device runs the model; leave it out."
            )


@dataclass(frozen=True)
class SpeculativeOptions:
    """speculative_config, taken apart."""

    method: type[Drafter]
    options: Any
    control: fixed.Options
    rule: Rule

    @staticmethod
    def of(config: Mapping[str, Any] | None) -> SpeculativeOptions:
        """Raises ConfigError naming the key or value and the nearest valid one."""
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config must be a dict such as {{'method': 'ngram'}}, got {config!r}."
            )
        given = dict(config or {"method": "off"})
        name = given.pop("method", None)
        if name is None:
            if "model" not in given:
                raise ConfigError(
                    f"speculative_config needs a 'method' ({', '.join(draft.names())}) or a draft 'model'."
                )
            name = draft.detect(given["model"], given.get("revision"))
        method, judge = draft.method(name), given.pop("verification", "match")
        rule = verify.rule(judge)
        lossless = given.pop("lossless", True)
        if not isinstance(lossless, bool):
            raise ConfigError(f"lossless must be True or False, got {lossless!r}.")
        if lossless and not rule.lossless:
            raise ConfigError(
                f'verification {judge!r} changes what the model says: ask for it together with "lossless": False.'
            )
        parts = [
            {key: given.pop(key) for key in list(given) if key in _names(kind)}
            for kind in (fixed.Options, rule.Options, method.Options)
        ]
        for key in given:
            known = {"method", "verification", "lossless"}.union(
                *map(_names, (method.Options, fixed.Options, rule.Options))
            )
            raise ConfigError(unknown("key", key, known, f"speculative_config of method {name!r}", RENAMED))
        control, ruling, mine = parts
        return SpeculativeOptions(
            method, method.Options(**mine), fixed.Options(**control), rule(rule.Options(**ruling))
        )


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def options(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """`kind(**given)`, refusing unknown names with the nearest valid one."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            raise ConfigError(unknown(what, name, names))
    return kind(**given)
