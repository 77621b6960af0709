"""Numbers of chains of draft tokens on the device: a plan for the first forward, and one for each level."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain, Chains
from outrider.backends.triton.plan import (
    ALL,
    NOT_STORED,
    Plan,
    Sizes,
    Tables,
    aligned,
    columns_of,
    tables_of,
    total,
)
from outrider.backends.triton.sampling import PARAMS, param_bytes
from outrider.core.noise import DRAW, key_in, uniform
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, NodeFeatures

COLUMNS = 7  # of a plan of rows without paths


def levels_of(chains: Chains) -> int:
    """Levels of the longest chain."""
    return max(chain.levels for chain in chains.chains)


class ChainInput(NamedTuple):
    """What the forwards and picks of C chains read.

    ids:          int32 [N], of the first forward
    after:        int32 [C], the row of the first forward that a chain begins after
    owners:       int64 [levels, C, 2], as in `sampling.Rows`
    samples:      int64 [levels, C, 2], as in `distributions.sample`
    params:       float64 [C, PARAMS]
    temperatures: float64 [C], 1 where tokens are greedy
    plan:         of the first forward
    levels:       the plan of each that follows, of one row for each chain
    """

    ids: Tensor
    after: Tensor
    owners: Tensor
    samples: Tensor
    params: Tensor
    temperatures: Tensor
    plan: Plan
    levels: list[Plan]


class ChainNumbers:
    """int32 numbers of up to C chains of up to so many levels, whose first forward has `sizes`.

    total: how many.  level_sizes: of the forwards that follow.
    """

    def __init__(self, sizes: Sizes, levels: int, count: int) -> None:
        self.sizes, self.levels, self.count = sizes, levels, count
        self.level_sizes = Sizes(count, count, sizes.keys, 0, sizes.table, sizes.pinned)
        words = 2 * (levels * count * 4 + count * (PARAMS + 1))
        level = COLUMNS * aligned(count) + aligned(3 * count)
        self.parts = [aligned(sizes.rows), aligned(count), aligned(words), (levels - 1) * level, total(sizes)]
        self.total = sum(self.parts)

    def of(self, step: StepInput, chains: Chains) -> array[int]:
        """The numbers, without the end of a longer table."""
        starts = list(accumulate(self.parts, initial=0))
        numbers = array("i", bytes(4 * starts[4]))
        tables = tables_of(step, levels_of(chains) - 1)
        tips = [*_tips(step, chains.chains, tables)]
        words = array("i", self._words(tips, chains.chains, chains.vocabulary).tobytes())
        places = array("i", [chain.at for chain in chains.chains])
        parts = array("i", step.input_ids), places, words, self._level_numbers(tips)
        for start, part in zip(starts, parts):
            numbers[start : start + len(part)] = part
        return numbers + columns_of(step, self.sizes, tables) + tables.slots

    def split(self, flat: Tensor) -> ChainInput:
        ids, after, words, levels, plan = flat.split(self.parts)
        count = self.count
        owners = self.levels * count * 2
        wide = words[: 2 * (2 * owners + count * (PARAMS + 1))].view(torch.int64)
        numbers = wide[2 * owners :].view(torch.float64)
        first, plans = Plan.of(plan, self.sizes), []
        keys, samples = wide[: 2 * owners].view(2, self.levels, count, 2)
        for part in levels.split(len(levels) // (self.levels - 1)) if self.levels > 1 else ():
            *columns, pieces = part.split([*[aligned(count)] * COLUMNS, aligned(3 * count)])
            rest = first.path_slots, pieces[: 3 * count], first.table_slots  # no row has a path
            plans.append(Plan._make([*(column[:count] for column in columns), *rest]))
        return ChainInput(
            ids[: self.sizes.rows], after[:count], keys, samples,
            numbers[: count * PARAMS].view(count, PARAMS), numbers[count * PARAMS :], first, plans,
        )  # fmt: skip

    def _words(self, tips: Sequence[_Tip], chains: Sequence[Chain], vocabulary: int) -> array[int]:
        """owners, samples, params and temperatures, 8 bytes each."""
        owners, params = array("Q", bytes(16 * self.levels * self.count)), list[bytes]()
        numbers, width = array("Q", range(len(tips))), 2 * len(tips)
        for level in range(self.levels):
            first, keys = 2 * level * self.count, array("Q")
            for tip, chain in zip(tips, chains):
                noise = chain.distribution.temperature > 0
                keys.append(key_in(chain.stream, tip.position + level) if noise else 0)
            owners[first : first + width : 2] = numbers
            owners[first + 1 : first + width : 2] = keys
        temperatures = array("d", [1.0] * self.count)
        for i, chain in enumerate(chains):
            params.append(param_bytes(chain.distribution, vocabulary))
            temperatures[i] = chain.distribution.temperature or 1.0
        padded = b"".join(params).ljust(8 * PARAMS * self.count, b"\0")
        samples = self._samples(tips, chains)
        return array("q", owners.tobytes() + samples.tobytes() + padded + temperatures.tobytes())

    def _samples(self, tips: Sequence[_Tip], chains: Sequence[Chain]) -> array[int]:
        """`ChainInput.samples`."""
        samples = array("Q", bytes(16 * self.levels * self.count))
        for i, (tip, chain) in enumerate(zip(tips, chains)):
            for level, kept in enumerate(() if chain.probs is None else chain.probs[: chain.levels]):
                random = uniform(chain.stream, DRAW, tip.position, chain.first_node + level)
                own = array("Q", [kept.data_ptr()]) + array("Q", array("d", [random]).tobytes())
                samples[2 * (level * self.count + i) : 2 * (level * self.count + i + 1)] = own
        return samples

    def _level_numbers(self, tips: Sequence[_Tip]) -> array[int]:
        length = len(tips)
        pieces = [0, 1, ALL] * length + [0, 0, ALL] * (self.count - length)
        pieces[::3] = range(self.count)
        shifts, places = [tip.position - tip.entry for tip in tips], [tip.place for tip in tips]
        # of every level
        numbers, last = array("i"), self._padded(shifts, [ALL] * self.count, places)
        last.extend(pieces)
        last.extend([0] * (aligned(3 * self.count) - 3 * self.count))
        for level in range(1, self.levels):
            # the forward of the tokens before this level; a chain without it has no keys
            keys = [tip.entry + level if level < tip.levels else 0 for tip in tips]
            slots = [tip.table[end - 1] if end else NOT_STORED for tip, end in zip(tips, keys)]
            slots += [NOT_STORED] * (self.count - length)
            positions = [tip.position + level - 1 if end else 0 for tip, end in zip(tips, keys)]
            numbers += self._padded(positions, slots, keys, keys) + last
        return numbers

    def _padded(self, *columns: Sequence[int]) -> array[int]:
        """Columns of a plan, one behind the other."""
        numbers, width = array("i"), aligned(self.count)
        for column in columns:
            numbers.extend(column)
            numbers.extend([0] * (width - len(column)))
        return numbers


class _Tip(NamedTuple):
    """Where a chain begins.  position: of its first token.  entry: of that token's slot in `table`.

    place: of the table in `table_slots`.
    """

    table: array[int]
    position: int
    entry: int
    place: int
    levels: int


def _tips(step: StepInput, chains: Sequence[Chain], tables: Tables) -> Iterator[_Tip]:
    for chain in chains:
        request = bisect_right(step.query_start, chain.at) - 1
        position, entry = step.positions[chain.at] + 1, step.context_lens[chain.at]
        table = step.slot_tables[request]
        yield _Tip(table, position, entry, tables.places[id(table)], chain.levels)


def read(found: Sequence[Sequence[Sequence[float]]], chains: Chains) -> Chained:
    """Tokens and features of each chain up to a missing token, from [levels, chains, 1 + features]."""
    tokens_of, features_of = list[list[int]](), list[list[NodeFeatures]]()
    for chain, levels in zip(chains.chains, zip(*found)):
        tokens, features = list[int](), list[NodeFeatures]()
        for measured in levels[: chain.levels]:
            if measured[0] < 0:
                break
            tokens.append(int(measured[0]))
            features.append(measured[1:])
        tokens_of.append(tokens)
        features_of.append(features)
    return tokens_of, features_of if chains.stop_rule is not None else []
