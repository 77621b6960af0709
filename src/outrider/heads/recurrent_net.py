"""Network of a recurrent head (recurrent.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.heads.choose import Chooser
from outrider.heads.growth import Front, GrowthPlan, GrowthShape, LevelInput, grow
from outrider.heads.layer import Stack
from outrider.heads.outer import lm_logits
from outrider.heads.reader import Reader


class Net:
    """The packed network of a head.

    taps: the target's layers whose states it reads.  ids: int32 [Vd], the target's token of each of its
    own, None if they are the same.  norm: before the lm_head, None without one.  g [n, width]: its input in
    place of a state; o [n, width]: its output.
    """

    taps: tuple[int, ...] = (FINAL,)
    ids: Tensor | None = None
    norm: Tensor | None = None
    lm_head: Any = None  # the target's
    scale = 1.0
    stack: Stack

    def __init__(self, reader: Reader, target: Target) -> None:
        self.reader, self.head, self.backend, self.model = reader, reader.head, reader.backend, target.decoder

    def from_states(self, states: Tensor) -> Tensor:
        """g for the target's states [n, taps * hidden]."""
        return states

    def from_output(self, o: Tensor) -> Tensor:
        """g for an output, which takes the place of the next state."""
        return o

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        """o for the pairs of g and the ids of `step_input`; K/V goes to the pool."""
        raise NotImplementedError

    def catch_up(self, steps: Sequence[StepInput], pool: Pool, states: Tensor, numbers: Any) -> Tensor:
        """`Launched`: o for the pairs of the target's states and the ids of the only step."""
        return self.forward(steps[0], pool, self.from_states(states))

    def catch_up_and_grow(
        self,
        steps: Sequence[StepInput],
        pool: Pool,
        states: Tensor,
        numbers: Sequence[Any],
        choose: Chooser,
        shape: GrowthShape,
    ) -> Tensor:
        """`Launched`: `catch_up`, then trees that grow after some of its rows, by the other steps.

        numbers: those rows, then `GrowthPlan.numbers`
        """
        last_rows, *rest = numbers
        row_counts = [step.length for step in steps[1:]]
        plan = GrowthPlan.of_numbers(shape, row_counts, rest)
        root = self.catch_up(steps, pool, states, ()).index_select(0, last_rows)

        def advance(level: int, o: Tensor, given: LevelInput) -> Front[Tensor]:
            steps[level].put(given.ids, given.paths)
            parents = self.from_output(o.index_select(0, given.sources))
            nodes = self.forward(steps[level], pool, parents)
            return Front(nodes, self.logits(nodes))

        return grow(plan, choose, Front(root, self.logits(root)), advance)

    def logits(self, o: Tensor) -> Tensor:
        """float32 [n, Vd]."""
        x = o.contiguous() if self.norm is None else self.normed(o)
        out = lm_logits(self.model, x, self.lm_head, self.columns)
        return out if self.scale == 1.0 else out * self.scale

    @cached_property
    def columns(self) -> Tensor | None:
        """`ids` where the logits are."""
        return None if self.ids is None else self.ids.long().to(self.backend.device)

    def normed(self, o: Tensor) -> Tensor:
        assert self.norm is not None
        return self.backend.rms_norm(o.contiguous(), self.norm, self.stack.eps)
