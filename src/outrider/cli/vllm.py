"""What `vllm serve` reads beyond the options of `outrider serve`: further flags, and spellings of values."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from outrider.cli.flag import Flag
from outrider.cli.llama_cpp import STEP
from outrider.core.validate import text_of
from outrider.errors import ConfigError, first_line

_BACKEND = "the backend chooses its kernels"
_FILES = "the files of the model decide"
_KV = "K/V has one form for all layers and models"
_LOG = "the log has one form"
_METRICS = "/metrics has all metrics"
_RANKS = "every rank and every replica is a process"
_SHARES = "-tp divides every layer"
_TEXT = "models take and make text"
_DOCS = "/openapi.json describes the routes"

# of vLLM, without effect here: reason -> flags with a value; flags without one
_WITHOUT_EFFECT = {
    _BACKEND: (
        "attention-config -ac|kernel-config|additional-config|override-attention-dtype|"
        "cudagraph-capture-sizes|max-cudagraph-capture-size|moe-backend|linear-backend|performance-mode",
        "specialize-active-lora|enable-flashinfer-autotune --no-enable-flashinfer-autotune",
    ),
    _FILES: ("pt-load-map-location", "allow-deprecated-quantization|enable-lora-bias"),
    _KV: (
        "mamba-cache-dtype|mamba-ssm-cache-dtype|mamba-block-size|mamba-cache-mode|"
        "dcp-kv-cache-interleave-size|cp-kv-cache-interleave-size",
        "kv-sharing-fast-prefill",
    ),
    _LOG: ("", "aggregate-engine-logging|log-error-stack|enable-log-deltas --no-enable-log-deltas"),
    _METRICS: (
        "collect-detailed-traces|kv-cache-metrics-sample",
        "kv-cache-metrics|cudagraph-metrics|enable-mfu-metrics|enable-layerwise-nvtx-tracing|"
        "enable-logging-iteration-details",
    ),
    _RANKS: ("data-parallel-backend -dpb", "worker-use-ray|disable-nccl-for-dp-synchronization"),
    _SHARES: (
        "decode-context-parallel-size -dcp|prefill-context-parallel-size -pcp|all2all-backend|eplb-config|"
        "expert-placement-strategy|num-redundant-experts",
        "enable-eplb",
    ),
    STEP: ("dbo-decode-token-threshold|dbo-prefill-token-threshold", "enable-dbo"),
    _TEXT: (
        "media-io-kwargs|allowed-media-domains|mm-processor-cache-type|mm-shm-cache-max-object-size-mb|"
        "mm-encoder-tp-mode|mm-encoder-attn-backend|video-pruning-rate|default-mm-loras",
        "language-model-only|mm-encoder-only|interleave-mm-strings|enable-mm-embeds|disable-chunked-mm-input|"
        "enable-tower-connector-lora",
    ),
    _DOCS: ("", "enable-offline-docs"),
    "one process answers HTTP": ("renderer-num-workers", ""),
    "one library compiles all grammars": ("", "guided-decoding-disable-fallback"),
    "responses have no system_fingerprint": ("fingerprint-mode|fingerprint-value", ""),
    "headers have 64 KiB, and bodies --max-body-bytes": (
        "h11-max-incomplete-event-size|h11-max-header-count",
        "",
    ),
}
_MACHINES = "start a server with --replicas N on each machine"
_CLASSES = "its classes are vLLM's: leave it out"
# of vLLM, whose effect would be missed: what to do instead -> flags with a value; flags without one
_REFUSED = {
    """use --speculative-config, such as '{"model": "…", "num_speculative_tokens": 5}'""": (
        "typical-acceptance-sampler-posterior-threshold|typical-acceptance-sampler-posterior-alpha",
        "speculative-disable-mqa-scorer|disable-logprobs-during-spec-decoding",
    ),
    _MACHINES: (
        "data-parallel-rank -dpn|data-parallel-start-rank -dpr|data-parallel-rpc-port -dpp",
        "headless|data-parallel-hybrid-lb -dph|data-parallel-external-lb -dpe",
    ),
    _CLASSES: ("worker-cls|worker-extension-cls|scheduler-cls|io-processor-plugin", ""),
    "K/V stays in its process: leave it out": (
        "kv-events-config|ec-transfer-config|kv-offloading-size|kv-offloading-backend",
        "",
    ),
    "the server generates text": ("pooler-config|override-pooler-config", ""),
    "use one of the formats of --reasoning-parser": ("reasoning-parser-plugin|reasoning-config", ""),
    "change config.json in a copy of the model's folder": ("hf-config-path", ""),
    "use --max-model-len with the size of the window": ("", "disable-sliding-window"),
    "the client calls the tools: leave it out": ("tool-server", ""),
    'give "additionalProperties": false in the schemas': (
        "",
        "guided-decoding-disable-additional-properties",
    ),
    "start the server again with the new weights": ("weight-transfer-config", ""),
    "/metrics has the times of all requests: leave it out": ("", "enable-per-request-metrics"),
    "/tokenize has the tokens of a text: leave it out": ("", "enable-tokenizer-info-endpoint"),
    "give token ids as prompt, with return_token_ids: leave it out": ("", "tokens-only"),
    "no profile is made: leave it out": ("profiler-config", "ray-workers-use-nsight"),
    "use --enable-lora --lora-modules NAME=PATH": ("qlora-adapter-name-or-path", ""),
}


def _flags(table: dict[str, tuple[str, str]]) -> tuple[Flag, ...]:
    made = []
    for help, (valued, bare) in table.items():
        made += [Flag("", str, f"--{names}", help, hidden=True) for names in valued.split("|") if names]
        made += [Flag("", bool, f"--{names}", help, False, hidden=True) for names in bare.split("|") if names]
    return tuple(made)


IGNORED = _flags(_WITHOUT_EFFECT)
REFUSED = _flags(_REFUSED)

FILE = "--config"
SIZES = ("--max-model-len", "--ctx-size", "-c", "--max-num-batched-tokens", "--kv-cache-memory-bytes")
CONTEXT = SIZES[:3]
UNITS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}


def configured(words: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Arguments with those of the YAML file of `--config FILE` before them, so that they override these.

    options: names of all options, with those that switch one off -> the first name of the same option.
    Raises ConfigError for a file that cannot be read, and for one without options.
    """
    rest, files = list[str](), list[str]()
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name == FILE:
            files.append(value if equals else next(given, ""))
            if not files[-1]:
                raise ConfigError(f"{FILE} needs a file.")
        else:
            rest.append(word)
    model = rest[:1] if rest and not rest[0].startswith("-") else []
    named = {options.get(word.partition("=")[0].replace("_", "-")) for word in rest} - {None}
    made: list[str] = []
    for file in files:
        for key, value in _entries(file).items():
            name = f"--{key}".replace("_", "-")
            # a list is replaced as a whole, an object by its keys
            overridden = options.get(name) in named and not isinstance(value, dict)
            if not (overridden or (model and key == "model")):
                made += _option(name, value, options)
    return [*model, *made, *rest[len(model) :]]


def _entries(file: str) -> dict[str, Any]:
    import yaml  # comes with transformers

    try:
        entries = yaml.safe_load(text_of(file, FILE))
    except yaml.YAMLError as error:
        raise ConfigError(f"{FILE}: {file!r} is no YAML: {first_line(error)}.") from error
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise ConfigError(f"{FILE}: {file!r} must have an option a line, such as port: 8000.")
    return entries


def _option(name: str, value: Any, options: Container[str]) -> list[str]:
    """The arguments for an option of a file: none for null, and for a switch that is off anyway.

    An unknown one is left to be refused by its name, with any value.
    """
    off = f"--no-{name[2:]}"
    if value is False and off in options:
        return [off]
    if value is None or value is False:
        return [] if name in options or off in options else [name]
    if value is True:
        return [name]
    if isinstance(value, list):
        return [word for each in value for word in _option(name, each, options)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def sized(words: Sequence[str]) -> list[str]:
    """Arguments with sizes such as 16k (16,000), 16K (16,384) and 1.5g as numbers, as vLLM reads them.

    A context of auto or -1 becomes 0, that of the model.
    """
    made: list[str] = []
    option = ""  # the one before this word, if it has a size
    for word in words:
        name, equals, value = word.partition("=")
        if option:
            made.append(_size(word, option))
        elif equals and (given := name.replace("_", "-")) in SIZES:
            made.append(f"{name}={_size(value, given)}")
        else:
            made.append(word)
        named = word.replace("_", "-")
        option = named if named in SIZES and not option else ""
    return made


def _size(text: str, option: str) -> str:
    if option in CONTEXT and text in ("auto", "-1"):
        return "0"
    match = re.fullmatch(r"(\d+)(\.\d+)?([kmgtKMGT])", text, re.ASCII)
    if match is None or (match[2] and match[3].isupper()):
        return text  # a number, or an error
    return str(int(float(match[1] + (match[2] or "")) * UNITS[match[3]]))


def nested(words: Sequence[str], options: Container[str]) -> list[str]:
    """Arguments in which `--option.key.other value` is `--option '{"key": {"other": value}}'`.

    options: those that have an object.  A value that is no JSON is a text.
    """
    made: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        name, dot, path = name.partition(".")
        option = name.replace("_", "-")
        if option not in options:
            made.append(word)
            continue
        value = value if equals else next(given, "")
        content = _value(value)
        if dot:
            _put(objects.setdefault(option, {}), path, content)
        elif isinstance(content, dict):
            objects[option] = objects.get(option, {}) | content
        else:  # a method, @FILE, or a mistake
            made += [name, value] if value or equals else [word]
    for option, content in objects.items():
        made += [option, json.dumps(content)]
    return made


def _put(content: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {key!r} already has a value.")
    content[last] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def adapters(given: Sequence[str]) -> tuple[str, ...]:
    """Values of --lora-modules as NAME=PATH: vLLM also reads objects in JSON with name and path."""
    made = []
    for text in given:
        if text.lstrip().startswith("{"):
            module = _value(text)
            name, path = (
                (module.get("name"), module.get("path")) if isinstance(module, dict) else (None, None)
            )
            if not (isinstance(name, str) and isinstance(path, str) and name and path):
                wanted = 'NAME=PATH, or {"name": …, "path": …}'
                raise ConfigError(f"--lora-modules must be {wanted}, got {text!r}.")
            text = f"{name}={path}"
        made.append(text)
    return tuple(made)
