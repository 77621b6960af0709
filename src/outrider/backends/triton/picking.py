"""Tokens picked from rows of logits for drafters and logits processors: a few launches and one read."""

from __future__ import annotations

from array import array
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
    first_of_best,
    param_bytes,
)
from outrider.core.device import Numbers
from outrider.core.params import DistributionParams


def asked(distributions: Sequence[DistributionParams], keys: Sequence[int], vocabulary: int) -> Numbers:
    """[n, 1 + PARAMS]: the key of the noise of each row, and the bits of its parameters."""
    blank = bytes(8)  # in place of a key
    words = array("q", b"".join([blank + param_bytes(own, vocabulary) for own in distributions]))
    return _with_keys(words, keys)


def _with_keys(words: array[int], keys: Sequence[int]) -> Numbers:
    """What `asked` returns, with these keys in place of others."""
    words = words[:]
    words[:: 1 + PARAMS] = array("q", array("Q", keys).tobytes())
    return Numbers(words, (len(keys), 1 + PARAMS))


def _rows(logits: Tensor, words: Tensor) -> Rows:
    """words: of `asked`, one for each row"""
    owners = torch.stack([torch.arange(len(words), device=words.device), words[:, 0]], 1)
    params = words[:, 1:].contiguous().view(torch.float64)
    return Rows(logits, logits.amax(-1), owners, params)


def pick_next(logits: Tensor, distributions: Sequence[DistributionParams], keys: Sequence[int]) -> Tensor:
    """`Backend.pick_next`; `distributions` may be one for all rows."""
    several = [distributions[i % len(distributions)] for i in range(len(keys))]
    return _best(_rows(logits, asked(several, keys, logits.shape[1]).on(logits.device)))


def next_tokens(logits: Tensor, owners: Tensor, params: Tensor) -> Tensor:
    """`pick_next` for numbers that are on the device, as in `Rows`."""
    return _best(Rows(logits, logits.amax(-1), owners, params))


def _best(rows: Rows) -> Tensor:
    scores, tokens = best_of_parts(rows, cuts_of(rows))
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
    params = rows.params + tl.load(rows.owners + row * 2) * PARAMS
    greedy, reciprocal = tl.load(params) == 0, tl.load(params + 1).to(tl.float32)
    reciprocal, highest = tl.where(greedy, 1.0, reciprocal), tl.load(rows.highest + row)
    low = _below(rows, row, stride, i, vocabulary, highest, reciprocal)
    low = tl.where(low < tl.load(cuts + row), float("-inf"), low)
    token = tl.load(ids + i, mask=mask, other=0) if IDS else i
    noise = _gumbel(_noise_bits(tl.load(rows.owners + row * 2 + 1).to(tl.uint64), token))
    at = row.to(tl.int64) * vocabulary + i
    tl.store(low_out + at, low, mask=mask)
    logit = tl.load(rows.logits + row.to(tl.int64) * stride + i, mask=mask, other=0.0)
    tl.store(scores + at, tl.where(greedy, logit, low + noise), mask=mask)


class TopNext:
    """`Backend.top_next`."""

    def asked(
        self, distributions: Sequence[DistributionParams], keys: Sequence[int], vocabulary: int
    ) -> Numbers:
        return asked(distributions, keys, vocabulary)

    def with_keys(self, asked: Numbers, keys: Sequence[int]) -> Numbers:
        return _with_keys(asked.values, keys)

    def __call__(self, logits: Tensor, asked: Tensor, k: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, (n, vocabulary) = _rows(logits, asked), logits.shape
        low, scores = logits.new_empty(n, vocabulary), logits.new_empty(n, vocabulary)
        columns = rows.owners if ids is None else ids.to(logits.device)
        _score[(n, triton.cdiv(vocabulary, BLOCK))](
            rows, cuts_of(rows), columns, low, scores, logits.stride(0), vocabulary, IDS=ids is not None,
            PARAMS=PARAMS, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
        order = first_of_best(scores, min(k, vocabulary))
        missing = ~(scores.gather(1, order) > float("-inf")) | ~rows.highest.isfinite()[:, None]
        entries = order.masked_fill(missing, -1)
        shares = low.gather(1, order).double().exp() / low.exp().sum(-1, keepdim=True, dtype=torch.float64)
        return entries, shares.masked_fill(missing, 0.0).float()


def pick_rows(
    logits: Tensor, distribution: DistributionParams, keys: Sequence[int], k: int, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Backend.pick_rows` with probabilities, on the CPU."""
    words = asked([distribution] * len(keys), keys, logits.shape[1]).on(logits.device)
    picked = TopNext()(logits, words, k, ids)
    both = torch.stack([part.double() for part in picked]).cpu()  # one read
    n, width = both.shape[1:]
    entries, found = torch.full((n, k), -1, dtype=torch.int32), torch.zeros(n, k)
    entries[:, :width], found[:, :width] = both[0].int(), both[1].float()
    return entries, found
