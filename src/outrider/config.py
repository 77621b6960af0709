"""Engine options and parsing of speculative_config, with vLLM's names.

The keys of speculative_config are defined by the `Options` of the method (draft/<method>.py), of the
verification rule (verify/<rule>.py) and of the controller (control/fixed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import torch

from outrider import draft, verify
from outrider.backends.select import ACTIVATIONS
from outrider.cache.pool import kv_dtype
from outrider.checkpoints.quantize import Quantization
from outrider.control import fixed
from outrider.core.logprobs import MODES
from outrider.core.validate import (
    FLAG,
    TEXT,
    Checked,
    Count,
    Flag,
    JsonObject,
    Kind,
    Natural,
    Text,
    json_text,
    made_of,
    one_of,
    optional,
    path_text,
    real,
    whole,
)
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError, nearest, refuse_unknown
from outrider.online.options import Online
from outrider.parallel.layout import Layout
from outrider.verify.base import Rule

T = TypeVar("T")

_LEVELS = "Did you mean 'num_speculative_tokens'?"
_MODEL = "Did you mean 'model'?"
_RULE = "Did you mean 'verification'?"
_TYPICAL = "It is a key of 'verification': 'typical'."
_IDLE = "It has no effect here: leave it out."
RENAMED = {  # keys of other programs or of earlier versions of vLLM -> hint
    "speculative_model": _MODEL, "assistant_model": _MODEL, "num_draft_tokens": _LEVELS,
    "num_assistant_tokens": _LEVELS, "prompt_lookup_num_tokens": _LEVELS, "max_draft_len": _LEVELS,
    "verify": _RULE,
    "acceptance_method": _RULE, "spec_decoding_acceptance_method": _RULE, "rejection_sample_method": _RULE,
    "controller": "How much is drafted: num_speculative_tokens, or num_speculative_tokens_per_batch_size.",
    "max_model_len": "A draft sees what its target sees: leave it out.",
    "tensor_parallel_size": "Did you mean 'draft_tensor_parallel_size'?",
    "draft_sample_method": "The request's own parameters sample drafts, too. Leave it out.",
    "parallel_drafting": "It is a key of 'draft_model'; a head for one pass has the method 'peagle'.",
    "use_heterogeneous_vocab": "Did you mean 'vocab_mismatch'?",
    "speculative_token_tree": "Did you mean 'siblings'?",
    "hf_overrides": "Change config.json in a copy of the draft's folder.",
    **dict.fromkeys(("posterior_threshold", "posterior_alpha"), _TYPICAL),
    **dict.fromkeys(("disable_logprobs", "disable_mqa_scorer", "disable_padded_drafter_batch",
                     "enforce_eager", "attention_backend", "moe_backend", "draft_load_config"), _IDLE),
}  # fmt: skip
ELSEWHERE = {  # engine options of vLLM, transformers and llama-cpp-python -> hint
    "max_new_tokens": "It is max_tokens of SamplingParams.",
    "torch_dtype": "Did you mean 'dtype'?",
    "n_ctx": "Did you mean 'max_model_len'?",
    "n_gpu_layers": "Did you mean 'gpu_layers'?",
    "max_logprobs": "SamplingParams may ask for any number of log-probabilities: leave it out.",
    "load_in_8bit": "Did you mean quantization='int8'?",
    "load_in_4bit": "Did you mean quantization='int4'?",
    "assistant_model": "Did you mean speculative_config={'model': …}?",
    **dict.fromkeys(("speculative_model", "num_speculative_tokens", "draft_tensor_parallel_size"),
                    "It is a key of speculative_config."),
    "hf_overrides": "Change config.json in a copy of the model's folder.",
    "download_dir": "Set the environment variable HF_HOME.",
    "cpu_offload_gb": "Set gpu_layers, which keeps the other layers on the CPU.",
    **dict.fromkeys(("enforce_eager", "swap_space", "block_size", "disable_log_stats", "load_format",
                     "enable_chunked_prefill", "distributed_executor_backend", "compilation_config",
                     "task", "runner", "tokenizer_mode", "config_format", "limit_mm_per_prompt",
                     "language_model_only", "disable_custom_all_reduce"), _IDLE),
}  # fmt: skip

OTHERS = ("method", "verification", "lossless", "adaptive", "online", "control_module")
MODEL = Kind("a folder, a .gguf file, a hub id or a built-in name", TEXT.accepts)
SLOWDOWN = real("a number above 1", lambda value: value > 1)


@dataclass(frozen=True)
class EngineOptions(Checked):
    """Options of `LLM`, each with its unit and the meaning of None.

    dtype                   auto, float32, bfloat16 or float16
    activations             float32, or bfloat16: round the inputs of bfloat16 linears of the target, once a
                            linear, and queries and weights of attention over bfloat16 K/V; auto: bfloat16 on
                            processors with AVX512-BF16 or AMX, float32 on others, where rounding is slow.
                            Products of bfloat16 have the same bits on all of them, but for AMX, which sums
                            those of linears in another order
    quantization            int8 or int4: quantize the weights while loading
    kv_cache_dtype          auto or int8, for target and draft
    device                  auto, cpu, cuda, cuda:1 or mps
    gpu_layers              number of last layers on that GPU, the rest on the CPU (llama.cpp's -ngl); if it
                            exceeds the number of layers: embedding and head, too; None: all
    max_model_len           tokens of a request, prompt included; None: the context the model was made for,
                            without what longrope and dynamic RoPE scaling add
    max_num_seqs            requests that run at once
    max_num_batched_tokens  prompt tokens, decodes and draft tokens of one step
    max_decode_slowdown     aim for the largest ratio of a decode step with prompt tokens to one without,
                            such as 1.5; None: the least that keeps the time to first token within 3 times
                            that of the prompt alone
    kv_cache_memory_bytes   memory for K/V of target and draft together; None: enough for max_num_seqs full
                            requests, at most a quarter of the free memory on a CPU, gpu_memory_utilization of
                            a GPU
    tensor_parallel_size    number of processes (on GPUs: one each) that share every layer
    pipeline_parallel_size  number of stages of consecutive layers, each of tensor_parallel_size processes
    pipeline_layers         number of layers of every stage, such as "20,12"; with "0,32" the first one only
                            drafts and schedules; None: nearly equal ones
    seed                    requests without a seed derive theirs from it
    logprobs_mode           raw_logprobs, processed_logprobs (after all sampling parameters), raw_logits or
                            processed_logits; those of a prompt are always raw
    generation_config       auto: sampling parameters that are not given are those of the model's
                            generation_config.json, as in vLLM; none or vllm: those of SamplingParams; or a
                            folder with such a file
    override_generation_config  further such parameters, as {"temperature": 0.6}
    enable_lora             requests may name LoRA adapters of rank max_lora_rank at most; max_loras of them
                            are in memory, and in use, at once
    """

    model: Annotated[str, MODEL]
    tokenizer: Text | None = None
    dtype: str = "auto"
    activations: Annotated[str, one_of("auto", *ACTIVATIONS)] = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    gpu_layers: Natural | None = None
    revision: Text | None = None
    trust_remote_code: Flag = False
    max_model_len: Count | None = None
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 512
    max_decode_slowdown: Annotated[float, SLOWDOWN] | None = None
    enable_prefix_caching: Flag = True
    kv_cache_memory_bytes: Count | None = None
    gpu_memory_utilization: Annotated[float, real("in (0, 1]", lambda value: 0 < value <= 1)] = 0.9
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    pipeline_layers: Text | None = None
    seed: Annotated[int, whole()] | None = None
    logprobs_mode: Annotated[str, one_of(*MODES)] = "raw_logprobs"
    generation_config: Text = "auto"
    override_generation_config: JsonObject = None
    enable_lora: Flag = False
    max_loras: Count = 1
    max_lora_rank: Count = 16

    def __post_init__(self) -> None:
        name = "override_generation_config"
        object.__setattr__(self, name, json_text(self.override_generation_config, name))
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step."
            )
        kv_dtype(self.kv_cache_dtype, torch.float32)
        layout = self.layout  # with a check of pipeline_layers
        if self.gpu_layers is not None and layout.size > 1:
            raise ConfigError(
                "gpu_layers is for a model in one process: leave it out, or the parallel sizes."
            )

    @property
    def layout(self) -> Layout:
        return Layout.of(self.tensor_parallel_size, self.pipeline_parallel_size, self.pipeline_layers)


@dataclass(frozen=True)
class SpeculativeOptions:
    """Parsed speculative_config: drafting method with its options, controller options, verification rule."""

    method: type[Drafter]
    options: Any
    control: fixed.Options
    rule: Rule
    adaptive: bool = False
    online: Online | None = None
    control_module: str | None = None

    @staticmethod
    def of(config: Mapping[str, Any] | str | None) -> SpeculativeOptions:
        """Parse a speculative_config; None is "off".  A string is the name of a method.

        adaptive: draft only what pays by measured cost and acceptance; the default is the method's.
        online: the drafter goes on learning from the output (online/options.py).
        control_module: a file of `outrider tune control`, or "bins"; by default that of the built-in models.
        Raises ConfigError naming the invalid key or value and the nearest valid one.
        """
        if isinstance(config, str):
            config = {"method": config}
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config must be a dict such as {{'method': 'ngram'}}, got {config!r}."
            )
        given = {key: path_text(value) for key, value in (config or {"method": "off"}).items()}
        name = given.pop("method", None) or _detected(given)
        method, rule_name = draft.method(name), given.pop("verification", "match")
        rule = verify.rule(rule_name)
        lossless = given.pop("lossless", True)
        FLAG.check(lossless, "lossless")
        if lossless and not rule.lossless:
            raise ConfigError(
                f"verification {rule_name!r} changes the distribution of the output: "
                'set "lossless": False with it.'
            )
        adaptive = given.pop("adaptive", method.adaptive)
        FLAG.check(adaptive, "adaptive")
        online = _online(given.pop("online", None), name, method)
        module = _control_module(given.pop("control_module", None), adaptive)
        kinds, where = (fixed.Options, rule.Options, method.Options), f"speculative_config of method {name!r}"
        control, rule_options, own = made_of(given, kinds, where, OTHERS, RENAMED)
        return SpeculativeOptions(method, own, control, rule(rule_options), adaptive, online, module)


def _detected(given: Mapping[str, Any]) -> str:
    """The method of the draft model.  Raises ConfigError without one."""
    if "model" not in given:
        hints = ((key, RENAMED.get(key) or nearest(key, ("method", "model")).strip()) for key in given)
        hint = next((f" It has {key!r}: {text}" for key, text in hints if text), "")
        raise ConfigError(
            f"speculative_config needs a 'method' ({', '.join(draft.names())}) or a draft 'model'.{hint}"
        )
    return draft.detect(given["model"], given.get("revision"))


def _online(given: Any, name: str, method: type[Drafter]) -> Online | None:
    """The options of learning.  Raises ConfigError for another type, and for a method without weights."""
    if given is None:
        return None
    if method.adopt is Drafter.adopt:
        raise ConfigError(f"online: {name!r} has no weights of its own that could learn: leave it out.")
    if not isinstance(given, Mapping) or "path" not in given:
        raise ConfigError(
            f"online must be a dict such as {{'path': 'learned', 'share': 0.1}}, got {given!r}."
        )
    return options(Online, given, "key of online")


def _control_module(given: Any, adaptive: bool) -> str | None:
    """Its file.  Raises ConfigError for no text, and where nothing is predicted."""
    file = Kind('a file, or "bins"', lambda value: TEXT.accepts(value) and value != "")
    optional(file).check(given, "control_module")
    if given is not None and not adaptive:
        raise ConfigError('control_module is for "auto" and for methods with "adaptive": true: leave it out.')
    return None if given is None else str(given)


def options(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """Construct `kind(**given)`.

    Raises ConfigError for an unknown name, suggesting the nearest valid one.
    """
    refuse_unknown(given, [f.name for f in fields(kind)], what, elsewhere=ELSEWHERE)  # type: ignore[arg-type]
    return kind(**given)
