"""Tokens picked from rows of logits for drafters and logits processors: a few launches and one read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton.sampling import (
    BLOCK,
    LATEST,
    PARAMS,
    Rows,
    _below,
    _gumbel,
    _noise_bits,
    best_of_parts,
    cuts_of,
    params_of,
    signed,
)
from outrider.core.device import to_device
from outrider.core.params import DistributionParams


def _rows(logits: Tensor, distributions: Sequence[DistributionParams], keys: Sequence[int]) -> Rows:
    """distributions: one for each row, or one for all"""
    owners = torch.tensor([[i % len(distributions), signed(key)] for i, key in enumerate(keys)])
    numbers = [params_of(each, logits.shape[1]) for each in distributions]
    params = torch.tensor(numbers, dtype=torch.float64)
    return Rows(logits, logits.amax(-1), *(to_device(part, logits.device) for part in (owners, params)))


def pick_next(logits: Tensor, distributions: Sequence[DistributionParams], keys: Sequence[int]) -> Tensor:
    """`Backend.pick_next`."""
    rows = _rows(logits, distributions, keys)
    scores, tokens = best_of_parts(rows)
    tokens = tokens.masked_fill(scores < scores.amax(-1, keepdim=True), LATEST.value).amin(-1)
    return tokens.masked_fill(~rows.highest.isfinite(), -1).long()


@triton.jit
def _score(
    rows, cuts, ids, low_out, scores, stride, vocabulary, IDS: tl.constexpr, PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK distances of a row, -inf below its cut, and with the noise of their tokens."""
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < vocabulary
    greedy, reciprocal = tl.load(rows.params) == 0, tl.load(rows.params + 1).to(tl.float32)
    reciprocal, highest = tl.where(greedy, 1.0, reciprocal), tl.load(rows.highest + row)
    low = _below(rows, row, stride, i, vocabulary, highest, reciprocal)
    low = tl.where(low < tl.load(cuts + row), float("-inf"), low)
    token = tl.load(ids + i, mask=mask, other=0) if IDS else i
    noise = _gumbel(_noise_bits(tl.load(rows.owners + row * 2 + 1).to(tl.uint64), token))
    at = row.to(tl.int64) * vocabulary + i
    tl.store(low_out + at, low, mask=mask)
    logit = tl.load(rows.logits + row.to(tl.int64) * stride + i, mask=mask, other=0.0)
    tl.store(scores + at, tl.where(greedy, logit, low + noise), mask=mask)


def pick_rows(
    logits: Tensor, distribution: DistributionParams, keys: Sequence[int], k: int, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Backend.pick_rows` with probabilities, on the CPU."""
    rows, (n, vocabulary) = _rows(logits, [distribution], keys), logits.shape
    low, scores = logits.new_empty(n, vocabulary), logits.new_empty(n, vocabulary)
    columns = rows.owners if ids is None else ids.to(logits.device)
    _score[(n, triton.cdiv(vocabulary, BLOCK))](
        rows, cuts_of(rows), columns, low, scores, logits.stride(0), vocabulary, IDS=ids is not None,
        PARAMS=PARAMS, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    values, order = (part[:, :k] for part in scores.sort(dim=-1, descending=True, stable=True))
    missing = ~(values > float("-inf")) | ~rows.highest.isfinite()[:, None]
    shares = low.double().softmax(-1).gather(1, order).masked_fill(missing, 0.0)
    both = torch.stack([order.double().masked_fill(missing, -1.0), shares]).cpu()  # one read
    entries, found = torch.full((n, k), -1, dtype=torch.int32), torch.zeros(n, k)
    entries[:, : both.shape[2]], found[:, : both.shape[2]] = both[0].int(), both[1].float()
    return entries, found
