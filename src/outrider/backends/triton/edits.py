"""Logits processors on the device: masks, biases and penalties along the paths of draft trees.

`core/edits.py` defines what is applied, and `sampling/processors.py` is the reference, bit for bit.  A step's
edits are one array of int32 numbers:

    of each row of logits    ROW numbers: offset of its mask or -1, words of the mask; bans: first, end; its
                             tree, or one of the next two; the token of its node; row of the parent or -1; -
    of each tree             TREE numbers: entries: first, end; repetition; -; frequency and presence, float64
    masks, bans, entries     at the offsets above, each at a multiple of 16 bytes

Rows without edits are copied, and those behind all trees left out.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.triton.plan import aligned
from outrider.core.device import power_of_two
from outrider.core.edits import COLUMNS, Edits, Numbers
from outrider.core.tree import ROOT

ROW, TREE = 8, 8
NO_EDITS, NOT_USED = tl.constexpr(-1), tl.constexpr(-2)
WIDE, FEW, SPLITS = (
    1024,
    256,
    8,
)  # logits of a program of `_mask`; entries of one of `_edit`, and its programs
LEAST = 4096  # numbers that a graph has room for
NO_MASK = (-1, 0, 0, 0)
PLAIN_ROW = (*NO_MASK, NO_EDITS.value, 0, -1, 0)
NO_ENTRIES = array("i", struct.pack("iifidd", 0, 0, 1.0, 0, 0.0, 0.0))


class Span(NamedTuple):
    """Numbers of an array from `first` to `end`."""

    first: int
    end: int


class EditTables:
    """The edits of several trees, as the kernels read them.

    used: rows of logits up to those of the last tree
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.length = self.used = 0  # numbers of all parts
        self.rows: dict[int, list[int]] = {}  # row of logits -> its numbers, with offsets into the parts
        self.trees: dict[int, tuple[Span, tuple[float, ...]]] = {}  # tree -> entries, penalties

    def add(self, number: int, root: int, edits: Edits) -> None:
        """Add those of a tree.  root: row of the logits after its root."""
        masks = dict[int, Span]()  # by identity: nodes may share one
        banned = dict[int, list[int]]()
        for node, token in edits.bans:
            banned.setdefault(node, []).append(token)
        tokens, parents = [0, *edits.tree.tokens], [ROOT, *edits.tree.parents]
        for node, bits in enumerate(edits.masks, ROOT):
            mask = Span(-1, -1)
            if bits is not None:
                if id(bits) not in masks:
                    masks[id(bits)] = self._put(bits.tobytes())
                mask = masks[id(bits)]
            bans = self._put(array("i", banned[node]).tobytes()) if node in banned else Span(0, 0)
            path = tokens[node + 1], root + 1 + parents[node + 1] if node >= 0 else -1
            self.rows[root + 1 + node] = [mask.first, mask.end - mask.first, *bans, number, *path, 0]
        counted = edits.counted
        penalties = counted.repetition, counted.frequency, counted.presence
        self.trees[number] = self._put(edits.entries().tobytes()), penalties

    def _put(self, numbers: bytes) -> Span:
        first = self.length
        words = -(-len(numbers) // 4)
        self.parts.append(numbers.ljust(4 * aligned(words), b"\0"))
        self.length += aligned(words)
        return Span(first, first + words)

    @property
    def room(self) -> int:
        """Numbers of a graph's array behind its rows and trees; 0 without edits."""
        return power_of_two(max(LEAST, self.length)) if self.trees else 0

    def numbers(self, rows: int) -> Numbers:
        """The array for so many rows of logits."""
        start = (ROW + TREE) * rows
        of_rows = array("i", PLAIN_ROW) * self.used
        of_rows += array("i", [*NO_MASK, NOT_USED.value, 0, -1, 0]) * (rows - self.used)
        of_trees = NO_ENTRIES * rows
        for row, (mask, words, first, end, *path) in self.rows.items():
            shift = start if end > first else 0
            own = [mask if mask < 0 else start + mask, words, first + shift, end + shift, *path]
            of_rows[ROW * row : ROW * row + ROW] = array("i", own)
        for tree, ((first, end), penalties) in self.trees.items():
            repetition, *others = penalties
            packed = struct.pack("iifidd", start + first, start + end, repetition, 0, *others)
            of_trees[TREE * tree : TREE * tree + TREE] = array("i", packed)
        return np.frombuffer(b"".join([of_rows.tobytes(), of_trees.tobytes(), *self.parts]), np.int32)


@triton.jit
def _mask(logits, edited, edits, stride, vocabulary, ROW: tl.constexpr, WIDE: tl.constexpr):
    """WIDE logits of a row, -inf where its mask or its bans say so."""
    row, i = tl.program_id(0), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    if tl.load(edits + row * ROW + 4) == NOT_USED:
        return
    inside = i < vocabulary
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=inside, other=0.0)
    mask, words = tl.load(edits + row * ROW), tl.load(edits + row * ROW + 1)
    if mask >= 0:
        bits = tl.load(edits + mask + i // 32, mask=inside & (i // 32 < words), other=0)
        x = tl.where(((bits >> (i % 32)) & 1) == 1, x, float("-inf"))
    for ban in range(tl.load(edits + row * ROW + 2), tl.load(edits + row * ROW + 3)):
        x = tl.where(i == tl.load(edits + ban), float("-inf"), x)
    tl.store(edited + row.to(tl.int64) * vocabulary + i, x, mask=inside)


@triton.jit
def _edit(
    edited, edits, doubles, vocabulary, rows, ROW: tl.constexpr, TREE: tl.constexpr, COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Biases, depths and penalties of the entries of a row's tree.  Each token is in one entry."""
    row, part = tl.program_id(0), tl.program_id(1)
    tree = tl.load(edits + row * ROW + 4)
    if tree < 0:
        return
    head = rows * ROW + tree * TREE
    first, end = tl.load(edits + head), tl.load(edits + head + 1)
    repetition = tl.load(edits + head + 2).to(tl.float32, bitcast=True)
    frequency, presence = tl.load(doubles + head // 2 + 2), tl.load(doubles + head // 2 + 3)
    for begin in range(first + part * FEW * COLUMNS, end, tl.num_programs(1) * FEW * COLUMNS):
        place = begin + tl.arange(0, FEW) * COLUMNS
        token = tl.load(edits + place, mask=place < end, other=-1)
        inside = (token >= 0) & (token < vocabulary)
        count = tl.load(edits + place + 1, mask=inside, other=-1)
        bias = tl.load(edits + place + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        until = tl.load(edits + place + 3, mask=inside, other=0)
        depth, drafted = tl.full((), 0, tl.int32), tl.zeros((FEW,), tl.int32)
        above, node = tl.load(edits + row * ROW + 6), row
        while above >= 0:
            drafted += (token == tl.load(edits + node * ROW + 5)).to(tl.int32)
            depth += 1
            node = above
            above = tl.load(edits + node * ROW + 6)
        at = edited + row.to(tl.int64) * vocabulary + token
        x = tl.load(at, mask=inside, other=0.0)
        x = tl.where(bias != 0.0, x + bias, x)
        x = tl.where(depth < until, float("-inf"), x)
        number = tl.maximum(count, 0) + drafted
        penalty = (frequency * number.to(tl.float64) + tl.where(number > 0, presence, 0.0)).to(tl.float32)
        y = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition) - penalty
        tl.store(at, tl.where((count >= 0) | (drafted > 0), y, x), mask=inside)


def edited(logits: Tensor, edits: Tensor) -> Tensor:
    """Logits float32 [M, V] after the processors of each row; those behind all trees are not set.

    edits: `EditTables.numbers`.
    """
    rows, vocabulary = logits.shape
    made = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    _mask[(rows, triton.cdiv(vocabulary, WIDE))](
        logits, made, edits, logits.stride(0), vocabulary, ROW=ROW, WIDE=WIDE,
    )  # fmt: skip
    _edit[(rows, SPLITS)](
        made, edits, edits.view(torch.float64), vocabulary, rows, ROW=ROW, TREE=TREE, COLUMNS=COLUMNS,
        FEW=FEW, enable_fp_fusion=False,
    )  # fmt: skip
    return made
