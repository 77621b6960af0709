"""Conversion of a trained head between the published layouts that its method reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider import draft
from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantize import bits_of
from outrider.errors import ConfigError, write_fault
from outrider.heads.base import FINGERPRINT
from outrider.train.base import Method, write_head
from outrider.train.methods import methods


def export(
    model: str,
    layout: str,
    folder: Path,
    method: str | None = None,
    revision: str | None = None,
    quantization: str | None = None,
) -> str:
    """Write the head `model` to a new or empty folder in another layout; returns its method.

    The weights become bfloat16, or int8 or int4 by `quantization`.  Raises ConfigError for an unknown layout
    and for what it cannot hold, and for a folder that cannot be written; ModelError for a head that cannot be
    read.
    """
    with _writing(folder):
        used = folder.exists() and any(folder.iterdir())
    if used:
        raise ConfigError(f"the folder {str(folder)!r} is not empty: choose another one.")
    name, heads = method or draft.detect(model, revision), draft.head_methods()
    if name not in heads:
        raise ConfigError(f"{model!r} is for the method {name!r}: only trained heads can be exported.")
    head = Head.open(model, revision)
    heads[name].check(head)
    config, tensors = _writer(name).convert(head, layout)
    kept = {key: head.config[key] for key in (FINGERPRINT,) if key in head.config}
    with _writing(folder):
        write_head(folder, {**config, **kept}, tensors, bits_of(quantization))
    return name


def _writer(name: str) -> type[Method]:
    """The method that writes heads of a drafting method: the one that trains them."""
    for made in methods().values():
        if name in made.variants:
            return made
    return methods()["mlp_speculator" if name == "lstm_speculator" else name]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise ConfigError if the folder cannot be read or written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # the message of `writing` names the file
            raise ConfigError(str(error)) from error
        raise ConfigError(f"the folder {str(folder)!r} cannot be written: {write_fault(error)}") from error
