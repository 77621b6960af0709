"""The registry of drafting methods: a module of this folder that defines a `Drafter` is the method of its
name.  OUTRIDER_DRAFTERS names further folders with such modules.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from os.path import expanduser, isdir
from pathlib import Path
from pkgutil import iter_modules

from outrider.checkpoints.heads import Head, builtin
from outrider.checkpoints.hub import BUILTIN, is_tagged, on_hub
from outrider.core.registry import classes
from outrider.drafting.base import Drafter, TextDrafter
from outrider.drafting.view import SELF
from outrider.errors import ConfigError, ModelError, nearest, unknown
from outrider.heads.base import HeadDrafter

PLAIN_MODEL = "draft_model"
FOLDERS = "OUTRIDER_DRAFTERS"
RENAMED = {  # of vLLM and others -> hint
    "none": "Did you mean 'off'?",
    **dict.fromkeys(("deepseek_mtp", "mimo_mtp", "ernie_mtp", "qwen3_next_mtp"), "Did you mean 'mtp'?"),
    **dict.fromkeys(("prompt_lookup", "prompt_lookup_decoding"), "Did you mean 'ngram'?"),
    "draft": "Did you mean 'draft_model'?",
    "custom_class": "A method of your own is one file: docs/add-a-drafter.md.",
    "arctic": "Did you mean 'mlp_speculator' or 'suffix'?",
}


@lru_cache(maxsize=1)
def methods() -> dict[str, type[Drafter]]:
    """Method name -> its class.  Raises ConfigError for a folder that is none, and a name that is taken."""
    for folder in filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)):
        path = os.path.abspath(expanduser(folder))
        if not isdir(path):
            raise ConfigError(f"{FOLDERS}: {folder!r} is no folder.")
        if path not in __path__:
            _check_names(path)
            __path__.append(path)
    try:
        return classes(__name__, __path__, Drafter)
    except Exception as error:
        if not os.environ.get(FOLDERS):
            raise
        raise ConfigError(f"{FOLDERS}: a file of these folders cannot be imported: {error!r}.") from error


def _check_names(folder: str) -> None:
    """Raise ConfigError for a module with the name of another one, which would hide it."""
    taken = {module.name for module in iter_modules(__path__)}
    for module in iter_modules([folder]):
        if module.name in taken:
            raise ConfigError(f"{FOLDERS}: there is a method {module.name!r} already: rename the file.")


def head_methods() -> dict[str, type[HeadDrafter]]:
    """The methods that use a trained head."""
    return {name: method for name, method in methods().items() if issubclass(method, HeadDrafter)}


def automatic() -> list[type[TextDrafter]]:
    """The methods that are joined to every other one."""
    texts = [method for method in methods().values() if issubclass(method, TextDrafter)]
    return [method for method in texts if method.automatic]


def names() -> list[str]:
    return sorted(methods())


def method(name: str) -> type[Drafter]:
    if not isinstance(name, str) or name not in methods():
        raise ConfigError(unknown("speculative method", name, names(), elsewhere=RENAMED))
    return methods()[name]


def methods_of(head: Head) -> list[str]:
    """The methods that the tensors of a file name."""
    return [name for name, method in head_methods().items() if method.claims(head) == 2]


def detect(model: str, revision: str | None = None) -> str:
    """Return the method that a draft `model` is for: by its tensors, else by its config, else a language
    model.

    Raises ConfigError if `model` is no name.  Raises ModelError if it does not exist, if two methods claim it
    equally, or if it is known to be something else.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a folder or a hub id, got {model!r}.")
    folder = Path(expanduser(model))
    if model in (SELF, *BUILTIN) or folder.suffix == ".gguf" or is_tagged(model) or _only_gguf(folder):
        return PLAIN_MODEL
    if model not in builtin() and not isdir(folder) and not on_hub(model):
        raise _unknown(model)
    head = Head.open(model, revision)
    claims = {name: method.claims(head) for name, method in head_methods().items()}
    strongest = max(claims.values())
    found = [name for name, claim in claims.items() if claim == strongest]
    if not strongest:
        _refuse(head)
        return PLAIN_MODEL
    if len(found) > 1:
        raise ModelError(f"{model!r} could be for {' or '.join(found)}: say which as 'method'.")
    return found[0]


def _unknown(model: str) -> ModelError:
    """Error for a draft that does not exist."""
    known = [*BUILTIN, *builtin()]
    accepted = ", ".join(["a folder", "a .gguf file", "a hub id (owner/name)", *known])
    cure = nearest(model, known)
    if (meant := model.strip("[]")) in methods():
        cure = f" {meant!r} is a method: give it as 'method'."
    return ModelError(f"there is no draft model or head {model!r}.{cure} Give {accepted}.")


def _refuse(head: Head) -> None:
    """Raise ModelError for a file that no method claims if it is known to be no language model."""
    if (kind := head.config.get("speculators_model_type")) and "model_type" not in head.config:
        cure = ": give the draft model itself" if kind == "independent" else ""
        raise ModelError(
            f"{head.name!r} is of the type {kind!r} of speculators, which no method reads{cure}."
        )
    stop_layers = [name for name in head if re.fullmatch(r"model\.\d+\.weight", name)]
    if "model.0.linear.weight" in head and any(head.shape(name)[:1] == (2,) for name in stop_layers):
        raise ModelError(
            f"{head.name!r} is a head of SpecDec++, which judges draft tokens and makes none, and is not "
            f"supported.  "
            "To stop a draft model in time give it a stop_classifier: `outrider tune disco` makes one."
        )


def _only_gguf(folder: Path) -> bool:
    return isdir(folder) and any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
