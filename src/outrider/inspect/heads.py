"""What a trained head is, from its config and the headers of its tensors.  No weights are loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.checkpoints.heads import Head, Packed
from outrider.checkpoints.weights import Weights
from outrider.draft import PLAIN_MODEL, detect, methods
from outrider.draft.dflash.layouts import from_anchor
from outrider.errors import ModelError
from outrider.inspect.card import count, headers

TAPS = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
    "target_layer_ids",
)  # keys for the layers that a head reads
FLOATS = ("float", "bfloat", "F8")  # what the types of weights begin with


class Layout(NamedTuple):
    """Patterns of whole names.  sign: a tensor that only this layout has.  hidden: one of whose inputs (or, `across`, outputs) there are as
    many as the target's states are wide.  vocabulary: one with an output for each token.  level: the first group numbers the heads; where
    there is none the head recurs.  inside: of its own tensors, where they lie in the checkpoint of a target.
    """

    label: str
    sign: str
    hidden: str
    vocabulary: str
    level: str = ""
    across: bool = False
    tapped: bool = False  # several states side by side
    inside: str = ""


PACKED = "compressed-tensors"  # type of a layer in few bits
WHOLE = "model.norm.weight"  # only a language model has it
JOINED = r"(?:eh_proj|input_proj|mtp_linear_proj\.\d+)"  # what puts a state and a token together, in prediction layers
SPEC, DRAFTER, MODEL, MEDUSA = (
    r"(?:speculator\.)?",
    r"(?:module\.)?drafter\.",
    r"(?:model\.)*",
    r"(?:medusa_heads\.)?",
)
LAYOUTS = (
    Layout("Medusa's, in its target", r"medusa_head\.0\.0\.linear\.weight", r"medusa_head\.0\.0\.linear\.weight",
           r"medusa_head\.\d+\.\d+\.weight", r"medusa_head\.(\d+)\..*", inside=r"medusa_head\..*"),
    Layout("Medusa's", r"0\.0\.linear\.weight", r"0\.0\.linear\.weight", r"\d+\.\d+\.weight", r"(\d+)\.\d+\..*"),
    Layout("vLLM's of Medusa", rf"{MEDUSA}blocks\.0\.layers\.0\.weight", rf"{MEDUSA}blocks\.0\.layers\.0\.weight",
           rf"{MEDUSA}lm_heads\.\d+\.weight", rf"{MEDUSA}blocks\.(\d+)\..*"),
    Layout("Hydra's", r"hydra_mlp\.0\..*", r"hydra_mlp\.0\.\d+\.linear\.weight", r"hydra_lm_head\.0\.(?:\d+\.)?weight",
           r"hydra_(?:mlp|lm_head)\.(\d+)\..*", across=True),
    Layout("Arctic's LSTM speculator", rf"{SPEC}(?:projs|forget_proj)\.0\.weight", rf"{SPEC}(?:projs|forget_proj)\.0\.weight",
           rf"{SPEC}head\.0\.weight"),
    Layout("MLP speculator", rf"{SPEC}proj\.0\.(?:0\.)?weight", rf"{SPEC}proj\.0\.(?:0\.)?weight", rf"{SPEC}head\.0\.weight",
           rf"{SPEC}emb\.(\d+)\..*"),
    Layout("TensorRT-LLM's of ReDrafter", r"drafter\.layers\.0\.linear\.weight", rf"{DRAFTER}rnn_u\.weight", r"drafter\.lm_head\.weight",
           inside=r"drafter\..*"),
    Layout("ReDrafter's, beside its target", rf"{DRAFTER}lm_heads?\.0\..*", rf"{DRAFTER}rnn_u\.weight", rf"{DRAFTER}lm_heads?\.\d+\.weight",
           inside=rf"{DRAFTER}.*"),
    Layout("ReDrafter's", r"lm_heads?\.\d+\.linear\.weight|rnn_u\.weight", r"rnn_u\.weight", r"lm_heads?\.\d+\.weight"),
    Layout("speculators v0.1", r"fusion_fc\.weight", r"fusion_fc\.weight", r"embed_tokens\.weight", across=True),
    Layout("DFlash's", rf"{MODEL}hidden_norm\.weight", rf"{MODEL}fc\.weight", rf"{MODEL}lm_head\.weight", tapped=True),
    Layout("EAGLE-3's", r"midlayer\.hidden_norm\.weight", r"fc\.weight", r"lm_head\.weight", tapped=True),
    Layout("EAGLE-3's, as vLLM or speculators do", rf"{MODEL}layers\.0\.hidden_norm\.weight", rf"{MODEL}fc\.weight", r"lm_head\.weight",
           tapped=True),
    Layout("a prediction layer", rf".*\.?{JOINED}\.weight", rf".*\.?{JOINED}\.weight",
           rf"{MODEL}embed_tokens\.weight|lm_head\.weight", across=True),
    Layout("EAGLE's", rf"{MODEL}fc\.weight", rf"{MODEL}fc\.weight", rf"{MODEL}(?:lm_head|embed_tokens)\.weight", across=True),
)  # fmt: skip


@dataclass(frozen=True)
class HeadCard:
    """Of a trained head, or of the one that a checkpoint of a target brings along (`inside`).  levels: heads in the file, None where one
    recurs.  hidden: width of the target's states that it reads.  vocabulary: tokens that it can say.  None where the headers do not tell.
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
    stored_as: dict[str, int]  # type -> numbers
    bytes: int
    refused: str | None = None


def head_card(name: str, revision: str | None = None) -> HeadCard | None:
    """None where `name` is a language model of its own, or nothing.  Raises ModelError for a folder in which nothing can be read."""
    try:
        method = detect(name, revision)
    except ModelError:
        if Path(name).expanduser().is_dir():
            raise
        return None
    if method == PLAIN_MODEL:
        return None
    head = Head.open(name, revision)
    layout = next(
        (layout for layout in LAYOUTS if any(re.fullmatch(layout.sign, one) for one in head)),
        Layout("unknown", "", "", ""),
    )
    kinds, size = Counter[str](), 0
    inside = bool(layout.inside) and WHOLE in head
    for one, shape, kind in _stored(head):
        if not inside or re.fullmatch(layout.inside, one):
            kinds[kind] += count(shape)
    for one, shape, kind in headers(_file(head)):
        if not inside or re.fullmatch(layout.inside, one):
            size += count(shape) * _bytes(kind)
    return HeadCard(
        name, method, layout.label, inside, _levels(head, layout), _hidden(head, layout), _vocabulary(head, layout),
        sum(weights for kind, weights in kinds.items() if kind.startswith((*FLOATS, PACKED))), dict(kinds), size,
        _refused(head, method),
    )  # fmt: skip


def _file(head: Head) -> Weights:
    tensors = head.tensors.tensors if isinstance(head.tensors, Packed) else head.tensors
    assert isinstance(tensors, Weights)
    return tensors


def _stored(head: Head) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of every tensor; a layer in few bits is one, its weight."""
    few = head.tensors.few if isinstance(head.tensors, Packed) else {}
    yield from ((name, head.tensors.shape(name), PACKED) for name in few)
    yield from (entry for entry in headers(_file(head)) if entry[0] in head.tensors)


def _refused(head: Head, method: str) -> str | None:
    try:
        methods()[method].check(head)
    except ModelError as error:
        return str(error)
    return None


def _levels(head: Head, layout: Layout) -> int | None:
    if block := _number(head.config, "block_size"):
        return block if from_anchor(head) else block - 1
    numbers = {found.group(1) for one in head if layout.level and (found := re.fullmatch(layout.level, one))}
    said = _number(head.config, "n_predict")
    return said if len(numbers) <= 1 and said else len(numbers) or None  # tied ones are stored once


def _hidden(head: Head, layout: Layout) -> int | None:
    shape = _shape(head, layout.hidden)
    if shape is None:
        return _number(head.config, "hidden_size")
    taps = (
        next((len(ids) for key in TAPS if isinstance(ids := _setting(head.config, key), list)), 3)
        if layout.tapped
        else 1
    )
    return shape[0 if layout.across else 1] // taps


def _vocabulary(head: Head, layout: Layout) -> int | None:
    shape = _shape(head, layout.vocabulary)
    return (
        shape[0] if shape else _number(head.config, "draft_vocab_size") or _number(head.config, "vocab_size")
    )


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """Of a config, or of what it holds."""
    inner = [part for part in config.values() if isinstance(part, Mapping)]
    return next((part[key] for part in (config, *inner) if part.get(key) is not None), None)


def _number(config: Mapping[str, Any], key: str) -> int | None:
    found = _setting(config, key)
    return found if isinstance(found, int) else None


def _shape(head: Head, pattern: str) -> tuple[int, ...] | None:
    return next((head.shape(one) for one in head if re.fullmatch(pattern, one)), None)


def _bytes(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return int(bits.group()) // 8 if bits else 1  # bool
