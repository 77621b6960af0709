"""Set of sublayers to skip: published ones, files of the tuner, and a default."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.validate import is_whole
from outrider.errors import ConfigError, unknown

TUNED = {"builtin": Path(__file__).with_name("builtin.json")}
# Name -> layers of the model, skipped attentions and MLPs.  Those of Draft & Verify (arXiv 2309.08168) have a
# model's name, those of SWIFT (arXiv 2410.06916) also the data that they were found on.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Skip:
    """Layers, ascending, whose attention or MLP is left out.  depth: draft tokens that it was tuned for."""

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
        """Every second layer between the first and the last, SWIFT's initial set; of two the second."""
        odd = tuple(range(1, layers - 1, 2)) or (layers - 1,)
        return Skip.of(odd, odd, layers, "a model of one layer" if layers == 1 else "the model")


def set_name(name: str, layers: int) -> str | None:
    """The name of the set for a checkpoint: a built-in one, a folder or a hub id; None without a set."""
    if name in TUNED:
        return name
    short = name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-hf")
    return short if short in PUBLISHED and PUBLISHED[short]["layers"] == layers else None


def read_set(name: str, layers: int, model: str) -> Skip:
    """A published set, or that of a file.  Raises ConfigError for an unknown one or another model."""
    path = TUNED[name] if name in TUNED else Path(name).expanduser()
    if name not in PUBLISHED and not path.is_file():
        raise ConfigError(
            unknown("set of layers (neither a published one nor a file)", name, [*PUBLISHED, *TUNED])
        )
    try:
        found = PUBLISHED.get(name) or json.loads(path.read_text(encoding="utf-8"))
        size, attention, mlp = (found[key] for key in ("layers", "skip_attention", "skip_mlp"))
        depth = None if name in PUBLISHED else found["num_speculative_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"layers {name!r} is no file of `outrider tune`: {type(error).__name__}: {error}."
        ) from error
    if name not in PUBLISHED and not is_whole(depth, 1):
        raise ConfigError(
            f"num_speculative_tokens in {name!r} must be a whole number of at least 1, got {depth!r}."
        )
    if size != layers:
        raise ConfigError(
            f"the set of layers {name!r} is for a model of {size} layers, and {model} has {layers}."
        )
    return Skip.of(attention, mlp, layers, model, depth)
