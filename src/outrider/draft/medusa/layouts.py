"""Published files of Medusa heads.

    layout                        block j of head i                 its matrix to the vocabulary
    reference v0.1; TGI           {i}.{j}.linear.weight, .bias      {i}.{n}.weight, n the number of blocks
    "version 2" heads; TGI's V2   the same                          none: the target's lm_head for all heads
    Medusa-1.0, Medusa-2          medusa_head.{i}.{j}.linear.…      medusa_head.{i}.{n}.weight, a whole model
    vLLM                          blocks.{i}.layers.{j}.…           lm_heads.{i}.weight, or one; token_map
    ours, while loading           {i}.{j}.linear.…                  {i}.lm_head.weight, or one; token_map

The tensors, not the config, give the number of heads: a published config has 2 for a file with 5.  The
reference repeats one module as the blocks of a head.  Its files hold this block under n names, or under one
of them if the writer drops aliases.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError
from outrider.heads.layouts import HeadFormat, Layout, matching, parse

BLOCK, WEIGHT, LM_HEAD = "{i}.{j}.linear.{kind}", "{i}.{j}.linear.weight", "{i}.lm_head.weight"
REFERENCE = Layout("reference", (BLOCK,), ((BLOCK, BLOCK), ("{i}.{blocks}.weight", LM_HEAD)))
WITH_TARGET = Layout(
    "Medusa-1.0",
    (f"medusa_head.{BLOCK}",),
    ((f"medusa_head.{BLOCK}", BLOCK), ("medusa_head.{i}.{blocks}.weight", LM_HEAD)),
    beside_target=True,
)
VLLM = Layout(
    "vLLM",
    ("blocks.{i}.layers.{j}.{kind}",),
    (
        ("blocks.{i}.layers.{j}.{kind}", BLOCK),
        ("lm_heads.{i}.weight", LM_HEAD),
        ("lm_head.weight", "lm_head.weight"),
        ("token_map", "token_map"),
    ),
    ("medusa_heads.",),
)
FORMAT = HeadFormat(
    (REFERENCE, WITH_TARGET, VLLM),
    hidden=((WEIGHT, 1),),
    vocabulary=(LM_HEAD, "lm_head.weight"),
    numbered=("{i}.{rest}",),
)


def translate(head: Head) -> Head:
    """The head under our names, every block under its own.

    Raises ModelError for an unknown layout or a missing tensor.
    """
    if FORMAT.layout_of(head) is None:
        raise ModelError(
            f"{head.name!r} holds no Medusa heads: there is neither 0.0.linear.weight nor "
            "medusa_head.0.0.linear.weight nor blocks.0.layers.0.weight "
            f"among its {len(head.stored)} tensors, {', '.join(sorted(head)[:4])} …"
        )
    ours = FORMAT.translate(head)
    stored, heads, blocks = dict(ours.stored), counts(ours)[0], _blocks_per_head(head, ours)
    numbers = {match["j"] for name in ours if (match := parse(BLOCK, name))}
    if len(numbers) == 1:  # aliases were dropped, if there were any
        only = numbers.pop()
        for i, j, kind in itertools.product(range(heads), range(blocks), ("weight", "bias")):
            if (tensor := ours.stored.get(f"{i}.{only}.linear.{kind}")) is not None:
                stored[f"{i}.{j}.linear.{kind}"] = tensor
    if head.config.get("original_lm_head") and "0.lm_head.weight" in stored:
        stored["lm_head.weight"] = stored["0.lm_head.weight"]
        stored = {name: own for name, own in stored.items() if not name.endswith(".lm_head.weight")}
    found = replace(ours, stored=stored)
    for pattern in (WEIGHT, BLOCK.replace("{kind}", "bias"), LM_HEAD):
        if any(matching(found, pattern)):
            for i, j in itertools.product(range(heads), range(blocks)):
                found.shape(pattern.format(i=i, j=j))  # raises if it is missing
    return found


def counts(head: Head) -> tuple[int, int]:
    """The number of heads, and of blocks of each, by our names."""
    numbers = [match for name in head if (match := parse(BLOCK, name))]
    heads, blocks = (1 + max(int(match[field]) for match in numbers) for field in "ij")
    if max(heads, blocks) > MOST_STEPS:
        raise ModelError(
            f"{head.name!r} has tensors of {heads} heads of {blocks} blocks; "
            f"at most {MOST_STEPS} are supported."
        )
    return heads, blocks


def _blocks_per_head(head: Head, ours: Head) -> int:
    """The number that the matrix to the vocabulary has; without one, the number of blocks in the file, or
    the config's settings of one."""
    matrices = ("{i}.{blocks}.weight", "medusa_head.{i}.{blocks}.weight")
    numbers = {int(match["blocks"]) for name in head for one in matrices if (match := parse(one, name))}
    stored = counts(ours)[1]
    if not numbers:
        announced = head.config.get("medusa_num_layers", 1)
        return announced if stored == 1 and isinstance(announced, int) and announced > 1 else stored
    if len(numbers) > 1 or not stored <= min(numbers) <= MOST_STEPS:
        last = ", ".join(map(str, sorted(numbers)))
        raise ModelError(f"{head.name!r} has heads of {stored} blocks whose last layer is number {last}.")
    return min(numbers)


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of heads of any layout, as "reference" (and TGI) or "vllm".

    Raises ConfigError for what it cannot express.
    """
    head = translate(Head.of("the head", config, tensors))
    heads, blocks = counts(head)
    shared, own = "lm_head.weight" in head, "0.lm_head.weight" in head
    if layout == "vllm":
        return _vllm(head, heads, blocks)
    if layout != "reference":
        raise ConfigError(f'heads are written in the layout "reference" or "vllm", not {layout!r}.')
    if "token_map" in head or shared:
        raise ConfigError(
            'heads with a token_map, or one lm_head for all, can only be written in the layout "vllm".'
        )
    base = head.config.get("base_model_name_or_path", "")
    numbers = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": base}
    version = {} if own else {"version": "2"}
    return {**numbers, **version}, {REFERENCE.published(name, blocks=blocks): head.raw(name) for name in head}


def _vllm(head: Head, heads: int, blocks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shared, truncated = "lm_head.weight" in head, "token_map" in head
    if not shared and "0.lm_head.weight" not in head:
        raise ConfigError(
            "vLLM does not read heads without an lm_head of their own, and these use the target's."
        )
    outputs, hidden = head.shape("lm_head.weight" if shared else "0.lm_head.weight")
    vocabulary = head.config.get("vocab_size") if truncated else outputs
    if vocabulary is None:
        raise ConfigError(
            "heads with a token_map need vocab_size, the number of the target's tokens, in their config."
        )
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": head.shape("token_map")[0] if truncated else outputs,
        "original_lm_head": shared,
        "medusa_fc_bias": "0.0.linear.bias" in head,
    }
    first = {"lm_head.weight": "0.lm_head.weight"}  # one for all is written as the first head's
    return config, {VLLM.published(first.get(name, name)): head.raw(name) for name in head}
