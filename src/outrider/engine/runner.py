"""The target's forward: known tokens and guesses of all rows at once, and the laws at the nodes that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.attention.plan import Plan
from outrider.cache.pool import Pool
from outrider.errors import ModelError
from outrider.models.decoder import Decoder
from outrider.sampling.sampler import Sampler
from outrider.types import Batch, Draft, Guesses, Row


class Seen:
    """What a forward saw.  Laws are evaluated when the verifier asks: along the path, level by level."""

    def __init__(self, batch: Batch, logits: Tensor, roots: dict[int, int], sampler: Sampler) -> None:
        """logits float32 [M, V]; the law after the root of row r is in row roots[r], that after node i in roots[r] + 1 + i."""
        self.batch, self.logits, self.roots, self.sampler = batch, logits, roots, sampler

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        here = self.batch.rows[row]
        try:
            return self.sampler.pick(here, path, self.logits, self.roots[row] + 1 + node)
        except ModelError as error:  # this row ends here (see Scheduler.clip), the others go on
            here.error = error
            return -1


class Runner:
    def __init__(self, decoder: Decoder, pool: Pool, sampler: Sampler) -> None:
        self.decoder, self.pool, self.sampler = decoder, pool, sampler

    def forward(self, batch: Batch, draft: Draft) -> Seen:
        plan = Plan()
        wanted: list[int] = []
        roots: dict[int, int] = {}
        for r, (row, guesses) in enumerate(zip(batch.rows, draft.trees)):
            add_row(plan, row, batch.starts[r], batch.end(r), guesses)
            if batch.emits[r]:
                roots[r] = len(wanted)
                wanted.extend(range(plan.length - len(guesses.tokens) - 1, plan.length))
        x = self.decoder.forward(plan.build(), self.pool)
        return Seen(batch, self.decoder.logits(x, wanted), roots, self.sampler)


def add_row(plan: Plan, row: Row, start: int, end: int, guesses: Guesses) -> None:
    """The known tokens start … end - 1 of a row and the tree that hangs from the last of them; node i lies in slot end + i."""
    assert row.table is not None
    slots, known = row.table.slots, row.tokens[start:end]
    if all(parent == i - 1 for i, parent in enumerate(guesses.parents)):  # a chain lies in its natural slots
        plan.chain(slots, start, known + guesses.tokens)
        return
    plan.chain(slots, start, known)
    paths: list[list[int]] = []
    for i, (token, parent) in enumerate(zip(guesses.tokens, guesses.parents)):
        paths.append([*(paths[parent] if parent >= 0 else ()), slots[end + i]])
        plan.node(slots, end, paths[i], token)
