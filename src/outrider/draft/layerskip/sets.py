"""Set of sublayers to skip: published ones, files of the tuner, and a default."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.validate import is_whole
from outrider.errors import ConfigError, unknown

TUNED = {"builtin": Path(__file__).with_name("builtin.json")}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


# name -> (layers of the model, skipped attentions, skipped MLPs).  Sets of Draft & Verify (arXiv 2309.08168)
# have the model's name, those of SWIFT (arXiv 2410.06916) also the data that they were found on.
PUBLISHED = {
    "llama-2-13b": (
        40,
        "3 5 6 8 10 11 14 15 18 22 23 24 25 26 27 28 29 30 31 33 34 35 36 37",
        "6 9 10 11 15 24 25 27 28 35",
    ),
    "llama-2-13b-chat": (
        40,
        "7 8 9 10 11 14 15 18 22 23 24 26 27 28 29 30 31 32 33 34 35 36 37 38",
        "7 10 11 14 27 30 32 33 37 38",
    ),
    "codellama-13b": (
        40,
        "5 6 9 10 11 14 15 16 21 23 24 26 27 28 29 30 31 32 34 35 36 37",
        "10 11 12 14 15 25 26 27 30 32 33 34",
    ),
    "llama-2-70b": (
        80,
        "10 11 13 14 16 18 19 20 21 22 25 27 28 29 30 31 35 41 43 45 46 47 48 49 50 51 52 53 54 55 56 "
        "57 58 60 61 62 63 65 66 67 68 69 70 74 75 78 79",
        "2 4 9 10 13 14 16 20 21 22 24 25 26 27 28 29 31 34 37 41 47 48 49 50 53 54 55 57 58 60 62 63 "
        "66 67 68 70 76",
    ),
    "llama-2-13b_cnndm": (
        40,
        "2 5 6 10 11 14 15 20 22 23 24 25 26 27 28 30 32 33 34 35",
        "9 11 14 15 19 20 24 25 26 27 28 29 30 31",
    ),
    "llama-2-13b_chat_cnndm": (
        40,
        "7 10 14 15 20 23 24 25 26 27 29 30 32 34 35 36 37 38",
        "7 8 9 10 12 14 16 20 24 25 29 30 31 32 33 35",
    ),
    "codellama-13b_humaneval": (
        40,
        "7 10 11 13 14 19 20 22 28 29 30 31 33 34",
        "7 8 9 10 11 13 14 15 18 19 20 21 25 26 27 28 30 31 33 34",
    ),
    "llama-2-70b_cnndm": (
        80,
        "8 9 14 15 17 18 19 21 22 25 26 27 28 29 30 31 32 35 36 38 39 43 45 48 51 53 54 56 57 61 62 "
        "63 65 66 69 70 71 73 74 77 78",
        "3 9 12 13 14 15 16 18 22 26 27 29 30 39 41 42 44 46 49 50 51 52 53 54 55 56 57 60 62 63 64 "
        "66 69 71 72 75 76",
    ),
    "codellama-34b_humaneval": (
        48,
        "8 10 11 12 19 20 21 24 27 29 31 32 33 34 35 36 37 38 40 41 42 46",
        "6 8 9 10 11 13 16 18 19 20 22 23 25 26 27 30 31 32 33 36 38 41 43 44",
    ),
}


@dataclass(frozen=True)
class Skip:
    """Layers, ascending, whose attention or MLP is left out.

    depth: the number of draft tokens that the set was tuned for.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    depth: int | None = None

    @staticmethod
    def of(attention: Any, mlp: Any, layers: int, model: str, depth: int | None = None) -> Skip:
        """Raise ConfigError for a number that is no layer of `model`, or if nothing would be left."""
        parts: list[tuple[int, ...]] = []
        for name, numbers in (("skip_attention", attention), ("skip_mlp", mlp)):
            is_list = isinstance(numbers, (list, tuple, range))
            for number in numbers if is_list else [numbers]:
                if not is_list or not is_whole(number, 0, layers - 1):
                    raise ConfigError(
                        f"{name} must be a list of layers, and {model} has layers 0 … {layers - 1}: got "
                        f"{number!r}."
                    )
            parts.append(tuple(sorted(set(numbers))))
        if sum(map(len, parts)) == 2 * layers:
            raise ConfigError(
                f"every attention and every MLP of {model} would be skipped: leave some of its {layers} "
                f"layers."
            )
        return Skip(parts[0], parts[1], depth)

    @staticmethod
    def alternating(layers: int) -> Skip:
        """Every second layer between the first and the last one: SWIFT's initial set.

        Of two layers the second.
        """
        odd = tuple(range(1, layers - 1, 2)) or (layers - 1,)
        return Skip.of(odd, odd, layers, "a model of one layer" if layers == 1 else "the model")


def known(name: str, layers: int) -> str | None:
    """The name of the set for a checkpoint: a built-in one, a folder or a hub id.

    None if there is no set for it.
    """
    if name in TUNED:
        return name
    short = name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-hf")
    return short if short in PUBLISHED and PUBLISHED[short][0] == layers else None


def named(name: str, layers: int, model: str) -> Skip:
    """A published set, or one from a file of the tuner.

    Raises ConfigError if it is unknown or for another model.
    """
    if name in PUBLISHED:
        size, attention, mlp = PUBLISHED[name]
        _check(size, layers, name, model)
        return Skip.of(_numbers(attention), _numbers(mlp), layers, model)
    path = TUNED[name] if name in TUNED else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            unknown("set of layers (neither a published one nor a file)", name, [*PUBLISHED, *TUNED])
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        keys = ("layers", "skip_attention", "skip_mlp", "num_speculative_tokens")
        size, attention, mlp, depth = (found[key] for key in keys)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"layers {name!r} is no file of `outrider tune`: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(depth, int) or depth < 1:
        raise ConfigError(
            f"num_speculative_tokens in {name!r} must be a whole number of at least 1, got {depth!r}."
        )
    _check(size, layers, name, model)
    return Skip.of(attention, mlp, layers, model, depth)


def _check(size: Any, layers: int, name: str, model: str) -> None:
    if size != layers:
        raise ConfigError(
            f"the set of layers {name!r} is for a model of {size} layers, and {model} has {layers}."
        )
