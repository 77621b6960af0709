"""Start-up test of bit-exactness: a token must get the same logits alone, in a chunk and in a tree.

The C kernels satisfy this by construction.  oneDNN's packed linears satisfied it in every trial, but may not
on another processor.  If the test fails, the engine warns that its output may differ from plain decoding.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.models.base import Model


def bit_exact(decoder: Model) -> bool:
    """Compare the logits of four tokens one by one with one forward where the last two have siblings."""
    vocabulary = decoder.spec.vocabulary
    tokens = [(i * i * 7 + 3) % vocabulary for i in range(24)]
    table = array("i", range(len(tokens) + 8))
    start = len(tokens) - 4

    alone, together = decoder.pool(len(table)), decoder.pool(len(table))
    one_by_one: list[Tensor] = []
    decoder.forward(StepInput.of_chain(table, 0, tokens[:start]), alone)
    for i in range(start, len(tokens)):
        one_by_one.append(_read(decoder, StepInput.of_chain(table, i, tokens[i : i + 1]), alone, [0]))

    half = start // 2  # prefill in different chunks
    decoder.forward(StepInput.of_chain(table, 0, tokens[:half]), together)
    decoder.forward(StepInput.of_chain(table, half, tokens[half:start]), together)
    step_input, root = StepInput(), start + 2
    step_input.chain(table, start, tokens[start:root])
    step_input.node(table, root, [root], 1)  # in the slot that the true token has in plain decoding
    path = [root + 1]
    step_input.node(table, root, path, tokens[root])
    step_input.node(table, root, [*path, root + 2], 2)
    step_input.node(table, root, [*path, root + 3], tokens[root + 1])
    return torch.equal(torch.cat(one_by_one), _read(decoder, step_input.build(), together, [0, 1, 3, 5]))


def _read(decoder: Model, step_input: StepInput, pool: Pool, rows: list[int]) -> Tensor:
    """Logits of some rows, by the forward that the engine uses."""
    step_input.logits_rows = rows
    return decoder.forward_step(step_input, pool, {}).clone()
