"""The published files of heads.

    layout                              block j of head i                 what it says
    reference v0.1; TGI                 {i}.{j}.linear.weight, .bias      {i}.{n}.weight, n the number of blocks
    "version 2" heads; TGI's V2         the same                          nothing: the target's own head says it
    Medusa-1.0, Medusa-2                medusa_head.{i}.{j}.linear.…      medusa_head.{i}.{n}.weight, beside a whole model
    vLLM                                blocks.{i}.layers.{j}.…           lm_heads.{i}.weight, or one for all; token_map
    ours, while loading                 {i}.{j}.linear.…                  {i}.lm_head.weight, or lm_head.weight; token_map

How many heads there are the tensors say: a published config says 2 of a file with 5.  The reference builds the blocks of a head by
repeating one module, so its files hold one block under n names, or, where a writer drops what it has written, under one of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError

BLOCK, LM_HEAD = r"\1.\2.linear.\3", r"\1.lm_head.weight"
LAYOUTS: tuple[dict[str, str], ...] = (  # the first name of each tells it
    {r"(\d+)\.(\d+)\.linear\.(weight|bias)": BLOCK, r"(\d+)\.(\d+)\.weight": LM_HEAD},
    {
        r"medusa_head\.(\d+)\.(\d+)\.linear\.(weight|bias)": BLOCK,
        r"medusa_head\.(\d+)\.(\d+)\.weight": LM_HEAD,
    },
    {
        r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": BLOCK,
        r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight": LM_HEAD,
        r"(?:medusa_heads\.)?lm_head\.weight": "lm_head.weight",
        r"(?:medusa_heads\.)?token_map": "token_map",
    },
)
NUMBERED = re.compile(
    r"(?:medusa_head\.)?\d+\.(\d+)\.weight"
)  # an lm_head whose number is that of the blocks before it


def layout_of(head: Head) -> dict[str, str] | None:
    """The names of a file, where they are of one of the layouts."""
    for layout in LAYOUTS:
        first = re.compile(next(iter(layout)))
        if any(first.fullmatch(name) for name in head):
            return layout
    return None


def translate(head: Head) -> Head:
    """Under our names, every block under its own.  Raises ModelError where the file is of no layout, or lacks a tensor."""
    layout = layout_of(head)
    if layout is None:
        raise ModelError(
            f"{head.name!r} holds no such heads: there is neither 0.0.linear.weight nor medusa_head.0.0.linear.weight nor "
            f"blocks.0.layers.0.weight among its {len(head.stored)} tensors, {', '.join(sorted(head)[:4])} …"
        )
    ours = head.renamed(lambda name: _renamed(layout, name))
    stored, (heads, blocks) = dict(ours.stored), (counts(ours)[0], _depth(head, ours))
    there = {
        match[1] for name in ours if (match := re.fullmatch(r"\d+\.(\d+)\.linear\.(?:weight|bias)", name))
    }
    if len(there) == 1:  # aliases were dropped, if there were any
        for i, j, kind in itertools.product(range(heads), range(blocks), ("weight", "bias")):
            if (only := ours.stored.get(f"{i}.{min(there)}.linear.{kind}")) is not None:
                stored[f"{i}.{j}.linear.{kind}"] = only
    if head.config.get("original_lm_head") and "0.lm_head.weight" in stored:
        stored["lm_head.weight"] = stored["0.lm_head.weight"]
        stored = {name: own for name, own in stored.items() if not name.endswith(".lm_head.weight")}
    found = replace(ours, stored=stored)
    _complete(found)
    return found


def counts(head: Head) -> tuple[int, int]:
    """How many heads, and how many blocks each, by our names."""
    at = [match for name in head if (match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)", name))]
    heads, blocks = 1 + max(int(m[1]) for m in at), 1 + max(int(m[2]) for m in at)
    if max(heads, blocks) > MOST_STEPS:
        raise ModelError(
            f"{head.name!r} has tensors of {heads} heads of {blocks} blocks; {MOST_STEPS} are read."
        )
    return heads, blocks


def _renamed(layout: Mapping[str, str], name: str) -> str | None:
    for pattern, ours in layout.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return None


def _depth(head: Head, ours: Head) -> int:
    """How many blocks a head has: what its lm_head is numbered; without one, what is there, unless that is a single block."""
    numbers = {int(match[1]) for name in head if (match := NUMBERED.fullmatch(name))}
    seen = counts(ours)[1]
    if not numbers:
        told = head.config.get("medusa_num_layers", 1)
        return told if seen == 1 and isinstance(told, int) and told > 1 else seen
    if len(numbers) > 1 or not seen <= min(numbers) <= MOST_STEPS:
        raise ModelError(
            f"{head.name!r} has heads of {seen} blocks whose last layer is number {', '.join(map(str, sorted(numbers)))}."
        )
    return min(numbers)


def _complete(head: Head) -> None:
    heads, blocks = counts(head)
    names = [f"{i}.{j}.linear" for i in range(heads) for j in range(blocks)]
    kinds = ["weight", *(["bias"] if any(f"{name}.bias" in head for name in names) else [])]
    wanted = [f"{name}.{kind}" for name in names for kind in kinds]
    if any(f"{i}.lm_head.weight" in head for i in range(heads)):
        wanted += [f"{i}.lm_head.weight" for i in range(heads)]
    for name in wanted:
        head.shape(name)  # raises where it is missing


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of heads, of whichever layout, as others read them: "reference" (and TGI), or "vllm"."""
    head = translate(Head.of("the head", config, tensors))
    heads, blocks = counts(head)
    if layout == "reference":
        return _reference(head, heads, blocks)
    if layout != "vllm":
        raise ConfigError(f'heads are written in the layout "reference" or "vllm", not {layout!r}.')
    return _vllm(head, heads, blocks)


def _reference(head: Head, heads: int, blocks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if "token_map" in head or "lm_head.weight" in head:
        raise ConfigError(
            'heads with a token_map, or one lm_head for all, can only be written in the layout "vllm".'
        )
    own = "0.lm_head.weight" in head
    said = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": head.config.get("base_model_name_or_path", ""),
    }
    return said if own else {**said, "version": "2"}, {
        re.sub(r"lm_head\.weight$", f"{blocks}.weight", name): head.raw(name) for name in head
    }


def _vllm(head: Head, heads: int, blocks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shared = "lm_head.weight" in head
    if not shared and "0.lm_head.weight" not in head:
        raise ConfigError(
            "vLLM reads no heads without an lm_head of their own, and these say what they mean through the target's."
        )
    outputs, hidden = head.shape("lm_head.weight" if shared else "0.lm_head.weight")
    known = head.shape("token_map")[0] if "token_map" in head else outputs
    whole = head.config.get("vocab_size") if "token_map" in head else outputs
    if whole is None:
        raise ConfigError(
            "heads with a token_map need vocab_size, the number of the target's tokens, in their config."
        )
    names = {name: re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name) for name in head}
    names = {name: re.sub(r"^(\d+)\.lm_head\.", r"lm_heads.\1.", new) for name, new in names.items()}
    names = {name: "lm_heads.0.weight" if new == "lm_head.weight" else new for name, new in names.items()}
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": hidden, "vocab_size": whole, "num_heads": heads,
        "num_hidden_layers": blocks, "max_paths": 64, "topk": 10, "truncated_vocab_size": known, "original_lm_head": shared,
        "medusa_fc_bias": "0.0.linear.bias" in head,
    }, {new: head.raw(name) for name, new in names.items()}  # fmt: skip
