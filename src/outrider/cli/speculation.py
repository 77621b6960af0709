"""speculative_config from the flags of a command, or from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from outrider.cli.flag import Flag
from outrider.cli.flags import DEPTH, SPECULATION, Given
from outrider.core.validate import kinds_of, text_of
from outrider.errors import ConfigError

AUTO = {"method": "auto"}  # what is drafted without a flag
FOR_ALL = ("method", "config", DEPTH)  # fields of flags that every method has


def config_of(speculation: Given, default: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """speculative_config from the flags, JSON or a method's name.  -md with --draft drafts in every step.

    Raises ConfigError for a flag that does not fit the method.
    """
    given = dict(speculation)
    text = given.pop("config", "") or "{}"
    config = {"method": text} if re.fullmatch("[a-z]\\w*", text) else parsed(text)
    if default and not config and not ("method" in given or {"model", DEPTH} <= given.keys()):
        config = default if given.keys() <= {"model", DEPTH} else {"adaptive": True}
    config = {**config, **given}
    if typed := [flag for flag in SPECULATION if flag.field in given and flag.field not in FOR_ALL]:
        _check_flags(typed, config)
    return config or None


def _check_flags(typed: list[Flag], config: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names the flag, for one that the method has no key for, and a wrong value."""
    from outrider import draft  # it imports torch

    name, model = config.get("method"), config.get("model")
    if not name and not model:
        raise ConfigError(f"{_name(typed[0])} is for a draft model: give one with -md, or leave it out.")
    if not name and all(flag.field == "model" for flag in typed):
        return
    name = name or draft.detect(str(model), config.get("revision"))
    options: Any = draft.method(name).Options
    known, kinds = {field.name for field in fields(options)}, kinds_of(options)
    for flag in typed:
        if flag.field not in known:
            raise ConfigError(f"{_name(flag)} is not for the method {name!r}: leave one of them out.")
        if flag.field in kinds:
            kinds[flag.field].check(config[flag.field], _name(flag))


def _name(flag: Flag) -> str:
    return flag.names.split()[0]


def parsed(text: str, what: str = "speculative_config") -> dict[str, Any]:
    """The object of an option: JSON, or @FILE with JSON in it.  what: its name in errors."""
    where = f"{text!r}"
    if text.startswith("@"):
        where, text = f"file {text[1:]!r}", text_of(text[1:], f"{what}: the file")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} {where} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f'{what} must be an object such as {{"name": 1}}, got {where}.')
    return config
