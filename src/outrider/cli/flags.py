"""The flags that commands share.  A flag that is a field of EngineOptions or SamplingParams, or a key of speculative_config, is
one line here; one that is not given leaves the field to its own default.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.errors import ConfigError
from outrider.kernels.threads import limit
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams

Given = dict[str, Any]  # field -> value, for the flags of one group that were given


@dataclass(frozen=True)
class Flag:
    """names: as on the command line, the first one a long name.  read: what the field gets for the value that was typed."""

    field: str
    kind: Any
    names: str
    help: str
    default: Any = None
    read: Callable[[Any], Any] = lambda value: value

    @property
    def word(self) -> str:
        """The name of the Python parameter."""
        return self.names.split()[0].lstrip("-").replace("-", "_")

    def parameter(self, panel: str) -> inspect.Parameter:
        metavar = {int: "N", float: "X", str: "TEXT"}.get(self.kind)
        option = typer.Option(
            *self.names.split(),
            help=self.help,
            rich_help_panel=panel,
            metavar=metavar,
            show_default=self.default is not None,
        )
        kind = self.kind if self.default is not None else self.kind | None
        return inspect.Parameter(
            self.word,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[kind, option],
        )


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value


ENGINE = (
    Flag("model", str, "--model -m", "Folder, .gguf file, hub id, builtin or builtin-draft.", "builtin"),
    Flag(
        "max_model_len",
        int,
        "--ctx-size -c",
        "Tokens of prompt and answer together; 0: what the model was made for.",
        read=lambda n: n or None,
    ),
    Flag("dtype", str, "--dtype", "auto, float32, bfloat16 or float16."),
    Flag("quantization", str, "--quantization", "int8 or int4: quantise the weights while loading."),
    Flag("kv_cache_dtype", str, "--kv-cache-dtype", "auto or int8, for target and draft."),
    Flag("device", str, "--device", "auto, cpu, cuda, cuda:1 or mps."),
    Flag(
        "gpu_layers",
        int,
        "--gpu-layers -ngl",
        "So many of the last layers on the GPU, the rest on the CPU; without it all on the device.",
    ),
    Flag("tokenizer", str, "--tokenizer", "Folder or hub id, where the model has no tokenizer of its own."),
    Flag("revision", str, "--revision", "Branch, tag or commit on the hub."),
    Flag(
        "threads",
        int,
        "--threads -t",
        "Threads on the CPU; without it OMP_NUM_THREADS, or one for each core.",
    ),
)
SPECULATION = (
    Flag("model", str, "--model-draft -md", "A smaller model that guesses: folder, .gguf file or hub id."),
    Flag("draft_dtype", str, "--draft-dtype", "As --dtype."),
    Flag("quantization", str, "--draft-quantization", "As --quantization."),
    Flag("draft_device", str, "--device-draft -devd", "As --device; auto is the target's."),
    Flag("draft_gpu_layers", int, "--gpu-layers-draft -ngld", "As --gpu-layers."),
    Flag("num_speculative_tokens", int, "--draft --draft-max", "Tokens to guess ahead."),
    Flag("method", str, "--method", "What guesses: ngram, suffix, draft_model …"),
    Flag("config", str, "--speculative-config", "All keys of speculative_config, as JSON; the flags above change it."),
)  # fmt: skip
SAMPLING = (
    Flag("max_tokens", int, "--n-predict -n", "New tokens at most; -1: until the model ends or the context is full.", -1, _unless_negative),
    Flag("seed", int, "--seed -s", "The text is a function of it; -1: another text each time.", -1, _unless_negative),
    Flag("temperature", float, "--temp", "0 is greedy.", 0.8),
    Flag("top_k", int, "--top-k", "Keep the K most likely tokens; 0: all.", 40),
    Flag("top_p", float, "--top-p", "Keep the most likely tokens that have so much probability together.", 0.95),
    Flag("min_p", float, "--min-p", "Keep tokens at least so likely, relative to the most likely one.", 0.05),
    Flag("repetition_penalty", float, "--repeat-penalty", "Divides the logits of tokens that were there already (1: does nothing)."),
    Flag("presence_penalty", float, "--presence-penalty", "Taken off the logits of tokens that the answer has."),
    Flag("frequency_penalty", float, "--frequency-penalty", "The same for each time that the answer has it."),
    Flag("ignore_eos", bool, "--ignore-eos", "Go on past the end-of-sequence token.", False),
    Flag("stop", list[str], "--reverse-prompt -r", "Stop at this text; may be given several times.", read=lambda texts: texts or None),
)  # fmt: skip
FORM = tuple(
    flag for flag in ENGINE if flag.field not in ("model", "tokenizer", "threads", "gpu_layers")
)  # what decides about memory
GROUPS = {
    "engine": (ENGINE, "Model"),
    "form": (FORM, "Model"),
    "speculation": (SPECULATION, "Speculation"),
    "sampling": (SAMPLING, "Sampling"),
}


def shared(function: Callable[..., None]) -> Callable[..., None]:
    """Spreads a command's parameters `engine`, `speculation` and `sampling` into the flags of these groups."""
    signature = inspect.signature(function, eval_str=True)
    mine = {name: group for name, (group, _) in GROUPS.items() if name in signature.parameters}
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in mine]
    for name, group in mine.items():
        parameters += [flag.parameter(GROUPS[name][1]) for flag in group]

    @functools.wraps(function)
    def spread(**typed: Any) -> None:
        for name, group in mine.items():
            values = [(flag, typed.pop(flag.word)) for flag in group]
            typed[name] = {flag.field: flag.read(value) for flag, value in values if value is not None}
        function(**typed)

    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {}
    return spread


def load(engine: Given, speculative_config: Mapping[str, Any] | None = None, **more: Any) -> LLM:
    """The model, with a note on the terminal while it loads."""
    import torch

    engine = {**engine, **more}
    threads = engine.pop("threads", None)
    limit()  # now, so that what is asked for explicitly is not lowered later
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}.")
        torch.set_num_threads(threads)
    with Console(stderr=True).status(f"Loading {engine['model']}"):
        return LLM(**engine, speculative_config=speculative_config)


def config_of(speculation: Given) -> dict[str, Any] | None:
    """speculative_config from the flags; None is plain decoding."""
    given = dict(speculation)
    config = parsed(given.pop("config", "{}"))
    return {**config, **given} or None


def parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config {text!r} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f'speculative_config must be an object such as {{"method": "ngram"}}, got {text!r}.'
        )
    return config


def params_of(sampling: Given) -> SamplingParams:
    return SamplingParams(**sampling)
