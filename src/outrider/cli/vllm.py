"""Spellings of arguments that `vllm serve` reads, in the form that the options of `outrider serve` have."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from outrider.core.validate import text_of
from outrider.errors import ConfigError, first_line

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


def repeated(words: Sequence[str], options: Container[str]) -> list[str]:
    """Arguments in which every value has its option: `--api-key a b` as `--api-key a --api-key b`.

    options: those that may be given several times.  Only where MODEL is the first word, or --model is given,
    since `b` could be MODEL otherwise.
    """
    has_model = any(word.split("=")[0] in ("--model", "-m") for word in words)
    if not words or (words[0].startswith("-") and not has_model):
        return [*words]
    made: list[str] = []
    option, has_value = "", False  # the last one that may have several values
    for word in words:
        if option and not has_value:
            has_value = True  # a value may begin with a dash
        elif word.startswith("-"):
            option, has_value = word if word.replace("_", "-") in options else "", False
        elif option:
            made.append(option)
        made.append(word)
    return made
