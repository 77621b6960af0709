"""Published names of the tensors of heads: tables that loading, export and `outrider models` read.

A pattern is a tensor's name with fields in braces:

    {i}, {j} …   a decimal number
    {i+1}        that number plus one
    {i+first}    that number plus one that the caller gives (first=36)
    {kind}       weight or bias
    {rest}       one or more characters

    published                           ours                           example
    medusa_head.{i}.{j}.linear.{kind}   {i}.{j}.linear.{kind}          medusa_head.3.0.linear.bias
                                                                       ⇄ 3.0.linear.bias
    additional_layers.{i}.{rest}        layers.{i+1}.{rest}            additional_layers.0.norm.weight
                                                                       ⇄ layers.1.norm.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head, Tensors
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

FIELD = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
FIELD_TEXT = {"kind": "weight|bias", "rest": ".+"}  # every other field is a number
LARGE = re.compile(r"\b\d{4}")  # a layer's or step's number that makes no sense
Rows = tuple[tuple[str, str | None], ...]
Change = Callable[[Tensor, Mapping[str, Any]], Tensor]
# Parts of configs; of equal keys the last counts.
NESTED = ("dflash_config", "eagle_config", "model", "transformer_layer_config")
UNCHANGED: Rows = (("{rest}", "{rest}"),)
# Our names of the tensors of a block, as a regular expression.
BLOCK_NAMES = (
    r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.(weight|bias)|"
    r"((input|post_attention)_layernorm|self_attn\.[qk]_norm)\.weight"
)


def unchanged(*patterns: str) -> Rows:
    """Rows of names that are ours already."""
    return tuple((pattern, pattern) for pattern in patterns)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    expression, end = "", 0
    for field in FIELD.finditer(pattern):
        text = FIELD_TEXT.get(field[1], r"\d+")
        expression += f"{re.escape(pattern[end : field.start()])}(?P<{field[1]}>{text})"
        end = field.end()
    return re.compile(expression + re.escape(pattern[end:]))


def parse(pattern: str, name: str, **numbers: int) -> dict[str, str] | None:
    """Values of the fields of a name, and `numbers`; None without a match, or if a number is negative."""
    match = _compile(pattern).fullmatch(name)
    if match is None:
        return None
    values = {key: str(number) for key, number in numbers.items()} | match.groupdict()
    for field, offset in FIELD.findall(pattern):
        if offset:
            value = int(values[field]) - int(values.get(offset, offset))
            if value < 0:
                return None
            values[field] = str(value)
    return values


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """The name with these fields.  Raises KeyError for a field without a value."""

    def text(field: re.Match[str]) -> str:
        value, offset = values[field[1]], field[2]
        return str(int(value) + int(values.get(offset, offset))) if offset else value

    return FIELD.sub(text, pattern)


def numbers(names: Iterable[str], *patterns: str, field: str = "i") -> set[int]:
    """The values of a field of the names that match one of the patterns."""
    found = (parse(pattern, name) for name in names for pattern in patterns)
    return {int(values[field]) for values in found if values}


def matching(head: Head, *patterns: str) -> Iterator[str]:
    """The names of a head that match one of the patterns."""
    return (name for name in head if any(_compile(pattern).fullmatch(name) for pattern in patterns))


class ChangedTensors:
    """Tensors, some of which are changed while they are read.  changes: stored name -> as in `Layout`."""

    def __init__(self, tensors: Tensors, changes: Mapping[str, Change], config: Mapping[str, Any]) -> None:
        self.tensors, self.changes, self.config = tensors, changes, config
        self.shape = tensors.shape

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def raw(self, name: str) -> Tensor:
        tensor = self.tensors.raw(name)
        return self.changes[name](tensor, self.config) if name in self.changes else tensor

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        """Scales move with their weights if no group crosses the middle of the inputs."""
        weight = self.tensors.weight(name)
        if name not in self.changes:
            return weight

        def change(part: Tensor) -> Tensor:
            return self.changes[name](part, self.config)

        if isinstance(weight, QuantizedWeight):
            whole = weight.values.shape[1] // 2 % weight.group == 0
            return weight.mapped(change) if whole else change(weight.dense())
        return change(weight)


@dataclass(frozen=True)
class Layout:
    """One published set of names.

    publisher:     the format's name in `outrider models`
    sign:          patterns of published names; a file has this layout if one of its tensors matches
    rows:          (published pattern, our pattern); the first match counts, None drops the tensor
    prefixes:      optional prefixes of published names, removed repeatedly before the rows apply
    applies:       a further condition, where names alone are ambiguous
    numbers:       values of fields that depend on all names of a head, such as `first`
    beside_target: such files also hold a whole target
    changes:       (regular expression of our names, function of a tensor and the config) of tensors that
                   differ from ours; the functions keep the shape, and move rows or halves of the inputs
    defaults:      (key, value) of the config that this layout implies
    """

    publisher: str
    sign: tuple[str, ...]
    rows: Rows
    prefixes: tuple[str, ...] = ()
    applies: Callable[[Head], bool] = lambda _: True
    numbers: Callable[[Head], dict[str, int]] = lambda _: {}
    beside_target: bool = False
    changes: tuple[tuple[str, Change], ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    def found_in(self, head: Head) -> bool:
        if not self.applies(head):
            return False
        names = {*head, *map(self._bare, head)}
        return any(_compile(pattern).fullmatch(name) for pattern in self.sign for name in names)

    def ours(self, name: str, **numbers: int) -> str | None:
        """Our name for a published one; None for a tensor that is not read."""
        bare = self._bare(name)
        for published, ours in self.rows:
            if (values := parse(published, bare, **numbers)) is not None:
                return None if ours is None else fill(ours, values)
        return None

    def published(self, name: str, **numbers: int) -> str:
        """The published name for one of ours, without an optional prefix."""
        for published, ours in self.rows:
            if ours is not None and (values := parse(ours, name, **numbers)) is not None:
                return fill(published, values)
        raise AssertionError(f"the layout {self.publisher!r} has no name for {name!r}")

    def translate(self, head: Head) -> Head:
        """The head under our names."""
        numbers = self.numbers(head)
        return head.renamed(lambda name: self.ours(name, **numbers))

    def _bare(self, name: str) -> str:
        while prefix := next((one for one in self.prefixes if name.startswith(one)), ""):
            name = name.removeprefix(prefix)
        return name


@dataclass(frozen=True)
class HeadFormat:
    """All layouts of a method, and the properties that our names encode.

    hidden:     (pattern, axis) of tensors with one axis of the width of the target's states
    taps:       keys of configs that list the states concatenated along this axis; three if none is there
    vocabulary: patterns of tensors with one row per known token
    numbered:   patterns whose field {i} numbers the draft positions; a head without any is recurrent
    depth:      number of draft positions, where the config states it
    kinds:      regular expression of what configs with such heads name as model_type, speculators_model_type
                or architectures
    keys:       beginnings of keys that only such configs have
    known:      regular expression of all our names; a file with others is refused.  None: any name
    variants:   regular expression of unknown names -> the kind of head that has them, the first match counts
    refused:    why a head under its published names, with a flat config, is not supported; "" if it is
    finish:     changes a head under our names as no table can
    """

    layouts: tuple[Layout, ...]
    hidden: tuple[tuple[str, int], ...] = ()
    vocabulary: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    depth: Callable[[Head], int | None] = lambda _: None
    kinds: str = ""
    keys: tuple[str, ...] = ()
    known: str | None = None
    variants: tuple[tuple[str, str], ...] = ()
    refused: Callable[[Head], str] = lambda _: ""
    finish: Callable[[Head], Head] = lambda head: head

    def layout_of(self, head: Head) -> Layout | None:
        """The first layout that matches a head under its published names; None without a match."""
        return next((layout for layout in self.layouts if layout.found_in(head)), None)

    def tap_count(self, head: Head) -> int:
        """The number of the target's states that a head reads."""
        config = flat(head.config)
        listed = [config[key] for key in self.taps if isinstance(config.get(key), list)]
        return len(listed[0]) if listed else 3 if self.taps else 1

    def named_in(self, config: Mapping[str, Any]) -> bool:
        """Whether a config names the method."""
        whole = flat(config)
        kinds = [whole.get("model_type"), whole.get("speculators_model_type")]
        kinds += whole.get("architectures") or []
        named = any(isinstance(kind, str) and re.fullmatch(self.kinds, kind) for kind in kinds)
        return named or any(key.startswith(self.keys) for key in config)

    def renamed(self, head: Head) -> Head:
        """The head under our names, with a flat config.  Without a match it is read in the last layout."""
        if not self.layouts:
            return replace(head, config=flat(head.config))
        layout = self.layout_of(head) or self.layouts[-1]
        ours, config = layout.translate(head), dict(layout.defaults) | flat(head.config)
        changes: dict[str, Change] = {}
        for name, stored in ours.stored.items():
            for pattern, change in layout.changes:
                if re.search(pattern, name):
                    changes[stored] = change
        tensors = ChangedTensors(head.tensors, changes, config) if changes else head.tensors
        return replace(ours, config=config, tensors=tensors)

    def translate(self, head: Head) -> Head:
        """The head as `renamed`.  Raises ModelError for another kind, or for tensors of unknown meaning."""
        if why := self.refused(replace(head, config=flat(head.config))):
            raise ModelError(f"{head.name!r} is not supported: {why}.")
        if self.layouts and self.layout_of(head) is None:
            signs = " or ".join(layout.sign[0] for layout in self.layouts)
            raise ModelError(
                f"{head.name!r} has no such head: there is no {signs} among its {len(head.stored)} tensors, "
                f"{', '.join(sorted(head)[:4])} …"
            )
        ours = self.renamed(head)
        self._check_names(ours)
        return self.finish(ours)

    def _check_names(self, ours: Head) -> None:
        """Raise ModelError for names that the method does not know.  ours: the head under our names."""
        if large := next(filter(LARGE.search, ours), None):
            raise ModelError(f"{ours.name!r} is corrupt: {ours.stored[large]!r} has too large a number.")
        known = re.compile(self.known or ".*")
        strange = sorted(name for name in ours if not known.fullmatch(name))
        if not strange:
            return
        names = " ".join(strange)
        kinds = [f" ({kind})" for part, kind in self.variants if re.search(part, names)]
        raise ModelError(
            f"{ours.name!r} is another kind of head{kinds[0] if kinds else ''}, which is not supported: it "
            f"has {', '.join(ours.stored[name] for name in strange[:4])}."
        )


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config and of the parts in it that describe a layer; the outer ones count."""
    parts = [part for key in NESTED if isinstance(part := config.get(key), Mapping)]
    own = {key: value for key, value in config.items() if value is not None}
    return {key: value for part in [*parts, own] for key, value in part.items()}


def speculators(
    kind: str, architecture: str, tokens: int, layer: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """The config, in the format of speculators, of a head that drafts `tokens` tokens.

    layer: config of its layers, as of transformers.  own: further keys.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    decoding = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": None, "architectures": []},
    }
    outer = {"architectures": [architecture], "speculators_model_type": kind, **own}
    return {**outer, "transformer_layer_config": layer, "speculators_config": decoding}
