"""Values that a hostile config may hold, and a test that a loader refuses or survives each of them."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider import ConfigError, ModelError, RequestError, SamplingParams

DEEP = "<nested too deeply>"
NASTY: list[Any] = [
    -1,
    0,
    1e30,
    10**12,
    1.5,
    float("nan"),
    "x",
    "",
    None,
    [],
    {},
    [1, "x"],
    True,
    1 << 63,
    float("-inf"),
    DEEP,
]
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
GREEDY = SamplingParams(temperature=0, max_tokens=3, min_tokens=2)
SECONDS = 1.0  # of processor time, for one load


def written(config: dict[str, Any]) -> str:
    """JSON; DEEP is replaced by 5,000 nested lists, which `json` itself cannot write."""
    return json.dumps(config).replace(json.dumps(DEEP), "[" * 5000 + "]" * 5000)


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the keys of a config are, those of nested objects included."""
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def replaced(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: replaced(config[first], tuple(rest), value) if rest else value}


def try_all(
    file: Path,
    config: dict[str, Any],
    load: Callable[[], None],
    names: tuple[str, ...],
    part: int | None = None,
    parts: int = 3,
) -> None:
    """Load with every key replaced by every bad value.

    names: allowed in the message in place of the key.
    part: number of a part of the values, of so many parts. All of them give a key all values, in any file.
    """
    wrong: list[str] = []
    refused = 0
    for path in places(config):
        first = (zlib.crc32(path[-1].encode()) + (part or 0)) % parts
        for value in NASTY if part is None else NASTY[first::parts]:
            file.write_text(written(replaced(config, path, value)))
            began, case = time.process_time(), f"{'.'.join(path)} = {value!r}"
            try:
                load()
            except (ModelError, ConfigError, RequestError) as error:
                refused += 1
                if not any(name in str(error) for name in (*path, file.name, *names)):
                    wrong.append(f"{case}: the message names neither key nor file: {error}")
            except Exception as error:
                wrong.append(f"{case}: {type(error).__name__}: {error}")
            if (took := time.process_time() - began) > SECONDS:
                wrong.append(f"{case}: took {took:.1f} s")
    file.write_text(json.dumps(config))
    assert not wrong, "\n".join(wrong)
    assert refused > len(NASTY) // (1 if part is None else parts)
    load()
