"""Options that commands share.

A field of EngineOptions or SamplingParams, or a key of speculative_config, is one line of a group.  An
option that is not given leaves the field at its default.  Modules that import torch are imported inside
functions: `--help` must be fast.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.flag import Flag
from outrider.cli.llama_cpp import IGNORED, IGNORED_BY_ONE
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.checkpoints.hub import Checkpoint
    from outrider.llm import LLM

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --top_k is --top-k
}
Given = dict[str, Any]  # field -> value, for the flags of one group that were given

MODEL = ("--model", "-m")
MODEL_DRAFT = ("--model-draft", "-md", "--spec-draft-model")
LEVELS = ("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max")
MAX_TOKENS = ("--n-predict", "-n", "--predict", "--max-tokens")
TEMPERATURE = ("--temp", "--temperature")
SEED = ("--seed", "-s")
OUT = ("--out", "-o")
PROMPTS = ("--prompts",)
RAW = ("--raw",)

BUILTIN = "builtin"  # the model if none is given
MODEL_HELP = (
    "Folder, .gguf file, hub id, or one that is shipped: builtin (the default), builtin-100m, builtin-draft."
)
PROMPTS_HELP = (
    "Text with a prompt per line, or .jsonl with prompt, messages, turns (Spec-Bench, MT-bench) or text; "
    "default: built-in prompts."
)
RAW_HELP = "Do not apply the chat template to the prompts."


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value


def layers(text: str) -> int | None:
    """A number of layers; None, all of them, for llama.cpp's all, auto and -1."""
    try:
        return None if text in ("all", "auto") else _unless_negative(int(text))
    except ValueError as error:
        raise ConfigError(
            f"the number of layers on the GPU must be a whole number or all, got {text!r}."
        ) from error


def _names(*names: str) -> str:
    return " ".join(names)


ENGINE = (
    Flag("model", str, _names(*MODEL), MODEL_HELP),
    Flag("max_model_len", int, "--ctx-size -c --max-model-len",
         "Maximum tokens of prompt and answer; 0: the context of the model.",
         read=lambda n: n or None),
    Flag("dtype", str, "--dtype", "auto, float32, bfloat16 or float16."),
    Flag("activations", str, "--activations",
         "float32, or bfloat16: rounds inputs of linears, attention; auto: bfloat16 with AVX512-BF16, AMX."),
    Flag("quantization", str, "--quantization", "Quantize the weights while loading: int8 or int4."),
    Flag("kv_cache_dtype", str, "--kv-cache-dtype",
         "dtype of the KV cache, of target and draft: auto or int8."),
    Flag("device", str, "--device -dev", "auto, cpu, cuda, cuda:1 or mps."),
    Flag("gpu_layers", str, "--gpu-layers -ngl --n-gpu-layers",
         "Number of last layers on the GPU, the others on the CPU; default: all on the device.",
         read=layers),
    Flag("tensor_parallel_size", int, "--tensor-parallel-size -tp", "Processes that share every layer."),
    Flag("pipeline_parallel_size", int, "--pipeline-parallel-size -pp", "Stages of consecutive layers."),
    Flag("pipeline_layers", str, "--pipeline-layers",
         "Layers of every stage, such as 20,12; with 0,32 the first one only drafts; default: equal ones."),
    Flag("tokenizer", str, "--tokenizer", "Folder or hub id of the tokenizer, if the model has none."),
    Flag("revision", str, "--revision", "Branch, tag or commit on the hub."),
    Flag("trust_remote_code", bool, "--trust-remote-code", "Run the code that the checkpoint brings.", False),
    Flag("threads", int, "--threads -t", "CPU threads; -1 (default): OMP_NUM_THREADS, or one per core.",
         read=_unless_negative),
)  # fmt: skip
DEPTH = "num_speculative_tokens"
SPECULATION = (
    Flag("model", str, _names(*MODEL_DRAFT), "Draft model: folder, .gguf file or hub id."),
    Flag("draft_dtype", str, "--dtype-draft --draft-dtype", "As --dtype."),
    Flag("quantization", str, "--quantization-draft --draft-quantization", "As --quantization."),
    Flag("draft_device", str, "--device-draft -devd --draft-device --spec-draft-device",
         "As --device; auto is the target's."),
    Flag("draft_gpu_layers", str, "--gpu-layers-draft -ngld --n-gpu-layers-draft --spec-draft-ngl",
         "As --gpu-layers.", read=layers),
    Flag(DEPTH, int, _names(*LEVELS), "Draft tokens per step."),
    Flag("assistant_confidence_threshold", float, "--draft-p-min --spec-draft-p-min",
         "Stop drafting after a token with a draft probability below this."),
    Flag("method", str, "--method", "Drafting method: ngram, suffix, draft_model …; off. Default: auto."),
    Flag("config", str, "--speculative-config",
         "speculative_config as JSON, or @FILE; the options above override its keys."),
)  # fmt: skip
SAMPLING = (
    Flag("max_tokens", int, _names(*MAX_TOKENS),
         "Maximum new tokens; -1: until EOS or the end of the context.", -1, _unless_negative),
    Flag("seed", int, _names(*SEED), "Random seed; -1: a different one for every run.", -1, _unless_negative),
    Flag("temperature", float, _names(*TEMPERATURE), "0 is greedy.", 0.8),
    Flag("top_k", int, "--top-k", "Keep the K most likely tokens; 0: all.", 40),
    Flag("top_p", float, "--top-p", "Keep the most likely tokens up to this cumulative probability.", 0.95),
    Flag("min_p", float, "--min-p", "Minimum probability relative to the most likely token.", 0.05),
    Flag("repetition_penalty", float, "--repeat-penalty",
         "Penalty factor on the logits of tokens in prompt and answer; 1: off."),
    Flag("presence_penalty", float, "--presence-penalty",
         "Subtracted from the logits of tokens in the answer."),
    Flag("frequency_penalty", float, "--frequency-penalty", "Subtracted once per occurrence in the answer."),
    Flag("ignore_eos", bool, "--ignore-eos", "Ignore the end-of-sequence token.", False),
    Flag("stop", list[str], "--reverse-prompt -r", "Stop string; may be given several times.",
         read=lambda texts: texts or None),
)  # fmt: skip

ASKED = (Flag("file", Path, _names(*PROMPTS), PROMPTS_HELP), Flag("raw", bool, _names(*RAW), RAW_HELP, False))
COMPARED = (
    Flag("methods", list[str], "--method",
         "Measure this method, all of them, or one row of all; may be given several times."),
    Flag("configs", list[str], "--speculative-config",
         "Measure this JSON or @FILE, or LABEL=JSON or LABEL=@FILE; may be given several times."),
    Flag("draft", str, _names(*MODEL_DRAFT), "Measure this model as the draft."),
    Flag("levels", int, _names(*LEVELS), "Draft tokens per step of --method and -md."),
    Flag("peers", list[str], "--peer",
         "Also measure transformers, llama.cpp, openvino or vllm, or NAME=TARGET,DRAFT on files of its own."),
)  # fmt: skip
MEASURED = (
    Flag("max_tokens", int, _names(*MAX_TOKENS), "Maximum new tokens per prompt.", 128),
    Flag("temperature", float, _names(*TEMPERATURE), "0 is greedy.", 0.0),
    Flag("top_p", float, "--top-p", "As in generate.", 1.0),
    Flag("seed", int, _names(*SEED), "Seed of every request.", 7),
    Flag("ignore_eos", bool, "--ignore-eos", "Ignore the end-of-sequence token.", False),
)
_DIVIDED = ("tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers")
_PLACES = ("model", "tokenizer", "threads", "gpu_layers", *_DIVIDED)
FORM = tuple(flag for flag in ENGINE if flag.field not in _PLACES)  # what decides about memory
GROUPS = {
    "engine": (ENGINE, "Model"),
    "form": (FORM, "Model"),
    "speculation": (SPECULATION, "Speculation"),
    "sampling": (SAMPLING, "Sampling"),
    "compared": (COMPARED, "Speculation"),
    "measured": (MEASURED, "Sampling"),
    "asked": (ASKED, "Prompts"),
}


def shared(function: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameters that have the name of a group (`engine`, `sampling` …) by its flags.

    A command that samples also accepts flags of llama.cpp that have no effect here, with a note.
    """
    signature = inspect.signature(function, eval_str=True)
    mine = {name: group for name, (group, _) in GROUPS.items() if name in signature.parameters}
    ignored = (*IGNORED, *IGNORED_BY_ONE) if "sampling" in mine else ()
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in mine]
    for name, group in mine.items():
        parameters += [flag.parameter(GROUPS[name][1]) for flag in group]
    parameters += [flag.parameter("llama.cpp") for flag in ignored]

    @functools.wraps(function)
    def spread(**typed: Any) -> None:
        note_ignored(ignored, typed)
        for name, group in mine.items():
            typed[name] = values_of(group, typed)
        if "engine" in mine and "target" not in typed:  # `named` sets it for a model given by its place
            typed["engine"].setdefault("model", BUILTIN)
        function(**typed)

    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {}
    return spread


def note_ignored(ignored: Iterable[Flag], typed: Given) -> None:
    """Remove flags that have no effect from the arguments of a command, with a note for each one given."""
    for flag in ignored:
        if typed.pop(flag.word) not in (None, False):
            first, *others = flag.names.split()
            name = "/".join([first, *(other for other in others if other.startswith("--no-"))])
            note(f"{name} does nothing here: {flag.help}.")


def values_of(group: Iterable[Flag], typed: Given) -> Given:
    """Remove the flags of a group from the arguments of a command.  Returns the values that were given."""
    values = [(flag, typed.pop(flag.word)) for flag in group]
    return {flag.field: flag.read(value) for flag, value in values if value is not None}


def note(text: str) -> None:
    """A line on standard error about what was asked and is not an error."""
    typer.echo(f"note: {text}", err=True)


def load(engine: Given, speculative_config: Mapping[str, Any] | None = None, **more: Any) -> LLM:
    """The model, with a note on the terminal while it loads; without a config it decodes plainly."""
    from rich.console import Console
    from rich.markup import escape

    from outrider.backends.cpu.threads import processors, use
    from outrider.llm import LLM

    engine = {**engine, **more}
    threads = engine.pop("threads", None)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}.")
    if threads is not None and threads > processors():
        note(f"-t {threads} is more than the processors of this machine: it gets {processors()}.")
    use(threads)
    engine, speculative_config = clipped(engine, speculative_config)
    with Console(stderr=True).status(escape(f"Loading {engine['model']}")):
        return LLM(**engine, speculative_config=speculative_config)


def checkpoint_of(engine: Given) -> Checkpoint:
    """The checkpoint of a command's model, without its weights."""
    from outrider.checkpoints.hub import Checkpoint

    trusted = engine.get("trust_remote_code", False)
    return Checkpoint.open(engine["model"], engine.get("revision"), trusted)


def clipped(engine: Given, config: Mapping[str, Any] | None) -> tuple[Given, Mapping[str, Any] | None]:
    """The given options without those that model and machine do not support: a longer context, GPU layers.

    Prints a note for each change.
    """
    engine, wanted = dict(engine), engine.get("max_model_len")
    if wanted is not None and wanted > 0:
        context = checkpoint_of(engine).spec.context
        if wanted > context:
            note(
                f"-c {wanted} is more than the {context} tokens that {engine['model']} was made for: it "
                f"gets {context}."
            )
            engine["max_model_len"] = context
    return without_gpu_layers(engine, config)


def without_gpu_layers(engine: Given, config: Mapping[str, Any] | None) -> tuple[Given, Given | None]:
    """The given options without numbers of GPU layers where the device is a CPU, with a note for each."""
    from outrider.models.placement import device_name  # it makes no CUDA context: a router needs none

    engine, draft = dict(engine), dict(config or {})
    device, own = engine.get("device") or "auto", draft.get("draft_device") or "auto"
    if engine.get("gpu_layers") and device_name(device).startswith("cpu"):
        note(f"-ngl {engine['gpu_layers']} does nothing here: all layers are on the CPU.")
        engine["gpu_layers"] = None
    if draft.get("draft_gpu_layers") and device_name(device if own == "auto" else own).startswith("cpu"):
        note(
            f"-ngld {draft.pop('draft_gpu_layers')} does nothing here: the draft's device is a CPU, and "
            "all its layers are there."
        )
    return engine, None if config is None else draft
