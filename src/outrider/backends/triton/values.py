"""Log-probabilities on the device: of the tokens that a step may emit, and of the best ones beside each.

Which nodes are on the path is known on the device alone, so every node of a row that asks has an entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton.sampling import BLOCK, LATEST, PARAMS, Rows, _below, first_of_best
from outrider.core.device import power_of_two
from outrider.core.logprobs import TopValues
from outrider.core.row import Row

LEAST, MOST = 8, 128  # best tokens of an entry on the device; more are found on the host


class AskedValues:
    """Rows of logits whose values are asked for.

    mode: one of `logprobs.MODES`.  rows: of the logits.  places: key of a tree -> number of its first row.
    counts: best tokens for each tree.
    """

    def __init__(self) -> None:
        self.mode = ""
        self.rows = list[int]()
        self.places, self.counts = dict[int, int](), dict[int, int]()

    def add(self, key: int, row: Row, root: int, nodes: int) -> None:
        """Add the root and the nodes of a row, if it asks and the device can answer."""
        asked = row.logprobs
        if asked is None or asked.count is None or not 0 <= asked.count <= MOST:
            return
        self.mode, self.places[key], self.counts[key] = asked.mode, len(self.rows), asked.count
        self.rows += range(root, root + nodes + 1)

    @property
    def size(self) -> int:
        """Number of rows, padded; 0 for none."""
        return power_of_two(len(self.rows)) if self.rows else 0

    @property
    def best(self) -> int:
        """Best tokens of each row, padded; 0 for none."""
        return power_of_two(max(LEAST, *self.counts.values())) if self.rows else 0

    def read(
        self, key: int, nodes: Sequence[int], numbers: Sequence[int], begin: int, width: int
    ) -> list[TopValues]:
        """The entries of the tokens after these nodes.

        numbers: from `begin` on those of `values_of`, `width` a row.
        """
        found, count, best = list[TopValues](), self.counts[key], width // 2 - 1
        for node in nodes:
            first = begin + (self.places[key] + 1 + node) * width
            rank, *ids = numbers[first + 1 : first + 2 + min(count, best)]
            own, values = numbers[first], numbers[first + 2 + best : first + 2 + best + len(ids)]
            value, *others = struct.unpack(f"{1 + len(ids)}f", struct.pack(f"{1 + len(ids)}i", own, *values))
            found.append(TopValues(value, rank, ids, others))
        return found


@triton.jit
def _filter(rows, cuts, asked, out, stride, vocabulary, PARAMS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK logits of a row at temperature, -inf where a filter removes a token."""
    place, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(asked + place)
    tree = tl.load(rows.owners + row * 2)
    if tree < 0:  # a row that pads
        return
    mask = i < vocabulary
    x = tl.load(rows.logits + row.to(tl.int64) * stride + i, mask=mask, other=0.0)
    temperature = tl.load(rows.params + tree * PARAMS)
    if temperature > 0:
        reciprocal = tl.load(rows.params + tree * PARAMS + 1).to(tl.float32)
        low = _below(rows, row, stride, i, vocabulary, tl.load(rows.highest + row), reciprocal)
        scaled = tl.div_rn(x, temperature.to(tl.float32))
        x = tl.where(low < tl.load(cuts + row), float("-inf"), scaled)
    tl.store(out + place.to(tl.int64) * vocabulary + i, x, mask=mask)


class Picks(NamedTuple):
    """Scores float32 and tokens int32 [M, parts] of rows of logits, as `best_of_parts` returns them."""

    scores: Tensor
    tokens: Tensor

    def of(self, asked: Tensor) -> Tensor:
        """The picked token of some rows, int64 [L]."""
        scores, tokens = self.scores.index_select(0, asked), self.tokens.index_select(0, asked)
        return tokens.masked_fill(scores < scores.amax(-1, keepdim=True), LATEST.value).amin(-1).long()


def values_of(
    mode: str, raw: Tensor, rows: Rows, cuts: Tensor, picks: Picks, asked: Tensor, best: int
) -> Tensor:
    """int32 [L, 2 + 2 · best]: bits of the value of each row's pick, its rank, the best tokens, their values.

    raw: logits before processors.  rows: after them.  asked: int32 [L], rows of both.
    """
    vocabulary = raw.shape[1]
    if mode.startswith("processed"):
        values = torch.empty(len(asked), vocabulary, dtype=torch.float32, device=raw.device)
        _filter[(len(asked), triton.cdiv(vocabulary, BLOCK))](
            rows, cuts, asked, values, rows.logits.stride(0), vocabulary, PARAMS=PARAMS, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    else:
        values = raw.index_select(0, asked)
    if mode.endswith("logprobs"):
        values = values.log_softmax(-1)
    token = picks.of(asked).clamp(0, vocabulary - 1)[:, None]  # LATEST where no logit is finite
    own = values.gather(1, token)
    rank = (values >= own).sum(-1, keepdim=True, dtype=torch.int32)
    ids = first_of_best(values, min(best, vocabulary))
    bits = [part.view(torch.int32) for part in (own, values.gather(1, ids))]
    return torch.cat([bits[0], rank, ids.int(), bits[1]], 1)
