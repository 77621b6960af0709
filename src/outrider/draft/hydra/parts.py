"""Hydra's networks on the target's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.draft.hydra.layouts import PREFIX
from outrider.drafting.base import Target
from outrider.heads.layer import Block, Sizes, rotary_table
from outrider.heads.reader import Reader
from outrider.models.base import Model
from outrider.models.fallback.row_invariant import by_rows


class Prefix:
    """A Llama block and a norm over the target's states f_0 … f_t.

    Its output P_t replaces f_t as input of the heads.
    """

    def __init__(self, reader: Reader, target: Target) -> None:
        self.backend, self.model, at = reader.backend, target.decoder, f"{PREFIX}.layers.0"
        hidden = self.model.spec.hidden
        self.sizes = Sizes.of(reader.head, at, hidden)
        norm_in = reader.vector(f"{at}.input_layernorm.weight", hidden)
        self.norm_out = reader.vector(f"{PREFIX}.norm.weight", hidden)
        rotary = rotary_table(reader.head.config, self.sizes, target.max_len)
        self.block = Block(reader, at, self.sizes, hidden, rotary, norm_in=norm_in)

    @property
    def slot_bytes(self) -> int:
        return self.sizes.slot_bytes(1, self.model)

    def pool(self, slots: int) -> Pool:
        return self.sizes.pool(1, slots, self.model)

    def __call__(self, states: Tensor, step_input: StepInput, pool: Pool, rows: list[int]) -> Tensor:
        """P [len(rows), hidden] of these rows of `step_input`.

        states [n, hidden] of all rows are changed.  K/V goes to the pool.
        """
        outputs = self.block(states, step_input, pool)
        return self.backend.rms_norm(outputs[rows], self.norm_out, self.sizes.eps)


class Step:
    """Head i: z = [P_t; e(x_t+1); e(c_1); …; e(c_i)] -> the logits of the next token.

    x = res(z) + silu(linear(z)), then x += silu(linear(x)) for every further block, then the head's own lm
    head, or the target's if the file has none.
    """

    def __init__(self, reader: Reader, i: int, embedded: int, vocabulary: int, model: Model) -> None:
        self.backend, self.model, at, hidden = reader.backend, model, f"hydra_mlp.{i}", model.spec.hidden
        self.first = _fused(
            reader, [f"{at}.0.linear", f"{at}.0.res_connection"], hidden, hidden + (i + 1) * embedded
        )
        self.rest = _further(reader, at, hidden)
        own = any(name.startswith("hydra_lm_head.") for name in reader.head)
        self.out = _fused(reader, [f"hydra_lm_head.{i}"], vocabulary, hidden) if own else None

    def __call__(self, z: Tensor) -> Tensor:
        """float32 [n, V]."""
        modified, straight = self.backend.linear(z, self.first).chunk(2, dim=-1)
        x = straight + by_rows(F.silu, modified.contiguous())
        for block in self.rest:
            x = x + by_rows(F.silu, self.backend.linear(x, block))
        return self.model.head_logits(x) if self.out is None else self.backend.linear(x, self.out).float()


def steps(reader: Reader, embedded: int, vocabulary: int, model: Model) -> list[Step]:
    """All heads of the file.  Raises ModelError for one that does not fit."""
    heads = {
        int(name.split(".")[1]) for name in reader.head if name.startswith(("hydra_mlp.", "hydra_lm_head."))
    }
    return [Step(reader, i, embedded, vocabulary, model) for i in range(max(heads) + 1)]


def _further(reader: Reader, at: str, hidden: int) -> list[Any]:
    """The blocks after the first.  Equal blocks, or one that the file holds for all, are packed once."""
    head, packed = reader.head, list[Any]()
    for j in takewhile(lambda j: f"{at}.{j}.linear.weight" in head, count(1)):
        name, before = f"{at}.{j}.linear", f"{at}.{j - 1}.linear"
        same = j > 1 and all(
            torch.equal(head.raw(f"{name}.{part}"), head.raw(f"{before}.{part}"))
            for part in ("weight", "bias")
        )
        packed.append(packed[-1] if same else _fused(reader, [name], hidden, hidden))
    layers = head.config.get("hydra_num_layers")
    if len(packed) == 1 and isinstance(layers, int) and layers > 2:
        return packed * (layers - 1)
    return packed


def _fused(reader: Reader, names: Sequence[str], outputs: int, inputs: int) -> Any:
    """Linears with biases, their outputs side by side."""
    for name in names:
        reader.head.get(f"{name}.bias", outputs)
    return reader.fused([(name, outputs) for name in names], inputs)
