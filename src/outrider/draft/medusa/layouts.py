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
from dataclasses import replace

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.errors import ModelError
from outrider.heads.layouts import HeadFormat, Layout, fill, matching, numbers, parse, unchanged

BLOCK, WEIGHT, LM_HEAD = "{i}.{j}.linear.{kind}", "{i}.{j}.linear.weight", "{i}.lm_head.weight"
MATRIX = "{i}.{blocks}.weight"
REFERENCE = Layout("reference", (BLOCK,), ((BLOCK, BLOCK), (MATRIX, LM_HEAD)))
WITH_TARGET = Layout(
    "Medusa-1.0",
    (f"medusa_head.{BLOCK}",),
    ((f"medusa_head.{BLOCK}", BLOCK), (f"medusa_head.{MATRIX}", LM_HEAD)),
    beside_target=True,
)
VLLM = Layout(
    "vLLM",
    ("blocks.{i}.layers.{j}.{kind}",),
    (
        ("blocks.{i}.layers.{j}.{kind}", BLOCK),
        ("lm_heads.{i}.weight", LM_HEAD),
        *unchanged("lm_head.weight", "token_map"),
    ),
    ("medusa_heads.",),
)


def _finished(head: Head) -> Head:
    """The head with every block under its own name.  Raises ModelError for a missing tensor."""
    stored, (heads, _), blocks = dict(head.stored), counts(head), _blocks_per_head(head)
    if len(numbers(head, BLOCK, field="j")) == 1:  # aliases were dropped, if there were any
        for name, own in head.stored.items():
            if block := parse(BLOCK, name):
                stored |= {fill(BLOCK, {**block, "j": str(j)}): own for j in range(blocks)}
    if head.config.get("original_lm_head") and "0.lm_head.weight" in stored:
        stored["lm_head.weight"] = stored["0.lm_head.weight"]
        stored = {name: own for name, own in stored.items() if not name.endswith(".lm_head.weight")}
    found = replace(head, stored=stored)
    for pattern in (WEIGHT, BLOCK.replace("{kind}", "bias"), LM_HEAD):
        if any(matching(found, pattern)):
            for i, j in itertools.product(range(heads), range(blocks)):
                found.shape(pattern.format(i=i, j=j))  # raises if it is missing
    return found


def counts(head: Head) -> tuple[int, int]:
    """The number of heads, and of blocks of each, by our names."""
    heads, blocks = (1 + max(numbers(head, BLOCK, field=field)) for field in "ij")
    return heads, blocks


def _blocks_per_head(head: Head) -> int:
    """The number that the matrix to the vocabulary has; without one, the number of blocks in the file, or
    the config's settings of one."""
    stored = counts(head)[1]
    last = numbers(head.stored.values(), MATRIX, f"medusa_head.{MATRIX}", field="blocks")
    if not last:
        announced: int = head.config.get("medusa_num_layers", 1)
        return announced if stored == 1 else stored
    if len(last) > 1 or not stored <= min(last) <= MOST_STEPS:
        named = ", ".join(map(str, sorted(last)))
        raise ModelError(f"{head.name!r} has heads of {stored} blocks whose last layer is number {named}.")
    return min(last)


FORMAT = HeadFormat(
    (REFERENCE, WITH_TARGET, VLLM),
    hidden=((WEIGHT, 1),),
    vocabulary=(LM_HEAD, "lm_head.weight"),
    numbered=("{i}.{rest}",),
    kinds="medusa",
    keys=("medusa_num",),
    finish=_finished,
)
