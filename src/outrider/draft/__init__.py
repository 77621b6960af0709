"""How to guess.  This folder is the registry: a module here that defines a `Drafter` is the method of its name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from outrider.draft.base import Drafter
from outrider.errors import ConfigError, ModelError, unknown
from outrider.models.hub import BUILTIN
from outrider.registry import classes

PLAIN_MODEL = "draft_model"


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Drafter]]:
    """Method name -> its class, found by looking into the folder."""
    return classes(__name__, __path__, Drafter)


def names() -> list[str]:
    return sorted(methods())


def method(name: str) -> type[Drafter]:
    if not isinstance(name, str) or name not in methods():
        raise ConfigError(unknown("speculative method", name, names()))
    return methods()[name]


def detect(model: str, revision: str | None = None) -> str:
    """The method that a draft `model` is for: what its tensors say, then what its config says; a language model of its own otherwise.

    Raises ModelError where there is nothing to look at, or two methods claim it alike.
    """
    from outrider.heads.files import Head

    if model in BUILTIN or Path(model).suffix == ".gguf" or _only_gguf(Path(model).expanduser()):
        return PLAIN_MODEL
    head = Head.open(model, revision)
    claims = {name: method.claims(head) for name, method in methods().items()}
    best = max(claims.values())
    found = [name for name, claim in claims.items() if claim == best]
    if best and len(found) > 1:
        raise ModelError(f"{model!r} could be for {' or '.join(found)}: say which as 'method'.")
    return found[0] if best else PLAIN_MODEL


def _only_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
