"""Trained heads for `outrider models`, from their configs and headers of tensors.  No weights are loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import expanduser, isdir
from typing import Any

from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantized_layers import QuantizedLayers
from outrider.checkpoints.weights import Weights
from outrider.draft import PLAIN_MODEL, detect, head_methods
from outrider.errors import ModelError
from outrider.heads.layouts import HeadFormat, matching, numbers
from outrider.inspect.card import Header, count, headers

PACKED = "compressed-tensors"  # type of a quantized weight
WEIGHTS = ("float", "bfloat", "F8", PACKED)  # prefixes of the types of weights
TARGET_NORM = "model.norm.weight"  # only a language model has it


@dataclass(frozen=True)
class HeadCard:
    """A trained head, or the head in a checkpoint of its target (`inside`).

    layout: the publisher's format.
    levels: the number of draft positions, None for a recurrent head.
    hidden: width of the target's states that it reads, None if the headers do not contain it.
    vocabulary: number of tokens in its vocabulary, None if the headers do not contain it.
    stored_as: type -> number of values.
    refused: why no target can use it.
    """

    name: str
    method: str
    layout: str
    inside: bool
    levels: int | None
    hidden: int | None
    vocabulary: int | None
    parameters: int
    stored_as: dict[str, int]
    bytes: int
    refused: str | None = None


def head_card(name: str, revision: str | None = None) -> HeadCard | None:
    """Card of a trained head; None for anything else.  Raises ModelError for a folder that cannot be read."""
    try:
        method = detect(name, revision)
    except ModelError:
        if isdir(expanduser(name)):
            raise
        return None
    if method == PLAIN_MODEL:
        return None
    head, head_format = Head.open(name, revision), format_of(method)
    layout = head_format.layout_of(head)
    inside = layout is not None and layout.beside_target and TARGET_NORM in head
    ours = layout.translate(head) if layout else head
    own = set(ours.stored.values()) if inside else None
    values = Counter[str]()
    for _, shape, kind in _only(own, _stored(head)):
        values[kind] += count(shape)
    return HeadCard(
        name=name,
        method=method,
        layout=layout.publisher if layout else "unknown",
        inside=inside,
        levels=_levels(head, ours, head_format),
        hidden=_hidden(head, ours, head_format),
        vocabulary=_vocabulary(ours, head_format),
        parameters=sum(number for kind, number in values.items() if kind.startswith(WEIGHTS)),
        stored_as=dict(values),
        bytes=sum(count(shape) * _bytes(kind) for _, shape, kind in _only(own, headers(_file(head)))),
        refused=_refused(head, method),
    )


def format_of(method: str) -> HeadFormat:
    """The table of a method's published names."""
    return head_methods()[method].FORMAT


def _only(names: set[str] | None, entries: Iterator[Header]) -> Iterator[Header]:
    """The entries of these names; None for all."""
    return (entry for entry in entries if names is None or entry.name in names)


def _file(head: Head) -> Weights:
    tensors = head.tensors.files if isinstance(head.tensors, QuantizedLayers) else head.tensors
    assert isinstance(tensors, Weights)
    return tensors


def _stored(head: Head) -> Iterator[Header]:
    """Every tensor; a quantized weight is one."""
    packed = head.tensors.layer_of if isinstance(head.tensors, QuantizedLayers) else {}
    yield from (Header(name, head.tensors.shape(name), PACKED) for name in packed)
    yield from (
        entry for entry in headers(_file(head)) if entry.name in head.tensors and entry.name not in packed
    )


def _refused(head: Head, method: str) -> str | None:
    try:
        head_methods()[method].check(head)
    except ModelError as error:
        return str(error)
    return None


def _levels(head: Head, ours: Head, head_format: HeadFormat) -> int | None:
    if depth := head_format.depth(head):
        return depth
    stored = len(numbers(ours, *head_format.numbered))
    announced = _number(head.config, "n_predict")  # tied steps are stored once
    return announced if stored <= 1 and announced else stored or None


def _hidden(head: Head, ours: Head, head_format: HeadFormat) -> int | None:
    for pattern, axis in head_format.hidden:
        for name in matching(ours, pattern):
            return ours.shape(name)[axis] // head_format.tap_count(head)
    return _number(head.config, "hidden_size")


def _vocabulary(ours: Head, head_format: HeadFormat) -> int | None:
    for name in matching(ours, *head_format.vocabulary):
        return ours.shape(name)[0]
    return _number(ours.config, "draft_vocab_size") or _number(ours.config, "vocab_size")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    """A number of a config, or of a config in it."""
    nested = [part for part in config.values() if isinstance(part, Mapping)]
    found = next((part[key] for part in (config, *nested) if part.get(key) is not None), None)
    return found if isinstance(found, int) else None


def _bytes(kind: str) -> int:
    """The bytes of one value."""
    bits = re.search(r"\d+", kind)
    return int(bits.group()) // 8 if bits else 1  # bool
