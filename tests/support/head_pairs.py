"""A head that records which pairs of state and token it reads, and what it should have read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers import answer
from torch import Tensor
from toys import read

from outrider import LLM, SamplingParams
from outrider.backends.candidates import Candidates, TopEntries
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.config import SpeculativeOptions
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch
from outrider.core.step_input import StepInput
from outrider.core.tree import Draft
from outrider.drafting.base import Target
from outrider.heads.choose import Chooser
from outrider.heads.recurrent import Forwards, Recurrent, RecurrentOptions
from outrider.testing import KnownTexts, check_idle

WIDE = 32  # of a pair in the pool
SMALL: dict[str, dict[str, Any]] = {"dynamic": {"top_k": 2, "nodes": 6}, "chain": {}}  # options of a tree
LONG = 90  # more tokens than a row without drafts may have pending states of


class Net:
    """Returns the state itself.  K of a pair is its position and token, V the first numbers of the state."""

    taps, ids, slot_bytes = (FINAL,), None, Pool.bytes_per_slot(1, 1, WIDE, torch.float32)

    divided, model = None, SimpleNamespace(embedding=None)

    @property
    def stack(self) -> Net:
        return self

    def pool(self, slots: int) -> Pool:
        return Pool(1, 1, WIDE, slots, torch.float32, torch.device("cpu"))

    def from_states(self, states: Tensor) -> Tensor:
        return states

    def from_output(self, o: Tensor) -> Tensor:
        return o

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        at, key = step_input.on(torch.device("cpu")), torch.zeros(step_input.length, 1, WIDE)
        key[:, 0, 0], key[:, 0, 1] = at.positions.float(), at.input_ids.float()
        pool.write(0, 0, at.slot_mapping, key)
        pool.write(0, 1, at.slot_mapping, g[:, None, :WIDE])
        return g

    def logits(self, o: Tensor) -> Tensor:
        return o


class Oracle(Chooser):
    """Drafts from the known text of plain decoding: right in two of three positions."""

    def __init__(self, target: Target, truth: KnownTexts) -> None:
        super().__init__(target)
        self.truth = truth

    def top_entries(self, row: Row, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> TopEntries:
        entries = torch.zeros(len(paths), k, dtype=torch.int32)
        for i, path in enumerate(paths):
            ahead = self.truth.continuation(row, len(path) + 1)
            right = ahead[len(path)] if len(ahead) > len(path) and ahead[: len(path)] == list(path) else 5
            place = (len(row.tokens) + len(path)) % 3  # third: not among two
            entries[i] = torch.tensor(
                [right if rank == place else (right + 1 + rank) % 300 for rank in range(k)]
            )
        return TopEntries(entries, torch.full((len(paths), k), 0.4) * 0.9 ** torch.arange(k))

    def widen(
        self, candidates: Candidates, row: Row, paths: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[list[int], list[int]]:
        return candidates.widen(self.top_entries(row, paths, logits, candidates.k))


@dataclass
class Log:
    """pairs: of every row what went in, (life, position, token, state); a preemption begins another life."""

    pairs: dict[Row, list[tuple[int, int, int, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    lives: dict[Row, int] = field(default_factory=lambda: defaultdict(int))


class Listening(Recurrent):
    """seen: (tokens, K, V) of a row whenever it was drafted for or counted as filled."""

    def __init__(self, target: Target, truth: KnownTexts, tree: str = "dynamic") -> None:
        super().__init__(
            RecurrentOptions(tree=tree, **SMALL.get(tree, {"nodes": 6})), target, Head.of("pairs", {}, {})
        )
        self.choose = Oracle(target, truth)
        self.log = Log()
        self.seen: list[tuple[list[int], Tensor, Tensor]] = []
        self.drafted = self.shared = 0
        self.complete = True  # whether K/V of all positions before a draft token must be there

    def network(self) -> Any:
        return Net()

    def _catch_up(self, forwards: Forwards) -> Tensor:
        for reading in forwards.readings:
            row, cursor = reading.row, reading.cursor
            states = torch.cat(cursor.states)
            for i, t in enumerate(range(cursor.first, cursor.end)):
                self.log.pairs[row].append((self.log.lives[row], t, row.tokens[t + 1], states[i]))
        out = super()._catch_up(forwards)
        for reading in forwards.readings:
            if reading.tree is not None:
                self.drafted += 1
                if self.complete:
                    self.look(reading.row, reading.cursor.end + 1)
        return out

    def look(self, row: Row, count: int) -> None:
        assert row.table is not None
        if count < 2:
            return
        slots = torch.tensor(row.table.slots[1:count].tolist())
        key, value = self.pool.read(0, slots, torch.float32)
        self.seen.append((row.tokens[:count], key[:, 0, :2].clone(), value[:, 0].clone()))

    def propose(self, batch: Batch) -> Draft:
        draft = super().propose(batch)
        for row in batch.rows:
            self.look(row, self.filled(row))
            self.shared += row.cached is not None and row.cached > 0
        return draft

    def forget(self, row: Row, reason: str) -> None:
        super().forget(row, reason)
        self.log.lives[row] += 1


def use_drafter(
    checkpoint: str,
    plain: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    **options: Any,
) -> tuple[LLM, Any]:
    tree, truth = options.pop("tree", "dynamic"), KnownTexts()
    for prompt, p in zip(prompts, params):
        truth.learn(prompt, p.seed or 0, answer(plain, prompt, p).outputs)
    llm = LLM(checkpoint, dtype="float32", **options)
    drafter = Listening(llm.engine.target, truth, tree)
    drafter.depth = 3
    llm.engine.use(drafter, SpeculativeOptions.of({"method": "off", "num_speculative_tokens": 3}))
    return llm, drafter


def run(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], list(params), use_tqdm=False)


def check(llm: LLM, drafter: Listening, once: bool = True) -> None:
    """Compare pairs and K/V with the states that the target computes for the whole text."""
    truth: dict[tuple[int, ...], Tensor] = {}

    def states(tokens: Sequence[int]) -> Tensor:
        if (key := tuple(tokens)) not in truth:
            truth[key] = read(llm.engine.decoder, tokens, (FINAL,)).states[FINAL]
        return truth[key]

    for row, records in drafter.log.pairs.items():
        of_row = states(row.tokens)
        for life in {record[0] for record in records}:
            positions = [t for own, t, *_ in records if own == life]
            different = list(
                dict.fromkeys(positions)
            )  # the last of a chunk is read again for the first level
            assert different == list(range(positions[0], positions[0] + len(different))) or not once, (
                "a pair left out"
            )
            assert max(map(positions.count, different)) <= 2 or not once, "a pair again and again"
        for _, t, token, state in records:
            assert token == row.tokens[t + 1] and torch.equal(state, of_row[t])
    longest = sorted((tuple(tokens) for tokens, _, _ in drafter.seen), key=len, reverse=True)
    whole: dict[tuple[int, ...], tuple[int, ...]] = {}
    for tokens in longest:  # of beginnings of one text the states are computed once
        whole[tokens] = next(
            (other for other in set(whole.values()) if other[: len(tokens)] == tokens), tokens
        )
    for tokens, key, value in drafter.seen:
        count = len(tokens) - 1
        assert key[:, 0].tolist() == list(range(count)), "a pair lies beside another token than its own"
        assert key[:, 1].tolist() == tokens[1:]
        assert torch.equal(value, states(whole[tuple(tokens)])[:count, :WIDE])
    assert drafter.drafted > 0
    check_idle(llm)


def distribution(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 20, "ignore_eos": True, **more}
    )
