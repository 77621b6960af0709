"""Budgets of the drafters of a mix: one is asked if it pays beside what the cheaper ones proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outrider.control import choose
from outrider.control.choose import Option
from outrider.control.plan import Load, Try
from outrider.control.planner import Planner
from outrider.core.step import Batch
from outrider.core.tree import NO_BUDGET, Budget, Draft


class MixAsks:
    """Asks of one step.

    tries: row of the batch -> its drafts, which get the depths that are asked for.
    seconds: of each drafter.
    """

    def __init__(
        self, planner: Planner, load: Load, tries: Mapping[int, Try], clock: Callable[[], float]
    ) -> None:
        self.planner, self.load, self.tries, self.clock = planner, load, tries, clock
        self.seconds: dict[int, float] = {}
        self.mark: tuple[int, float] | None = None  # the one that drafts now, and when it began

    @property
    def order(self) -> Sequence[int]:
        """Drafters, cheapest first."""
        return self.planner.order

    def budgets_of(self, k: int, batch: Batch, drafts: Mapping[int, Draft]) -> list[Budget]:
        """Budgets of drafter k, after the drafts of the cheaper ones."""
        self.stop_clock()
        budgets, size = [NO_BUDGET] * len(batch), self.planner.arms[k].size
        asks = self._asks(k, batch, drafts)
        for r, option in asks.items():
            tried, granted = self.tries[r], batch[r].budget
            tried.asked[k] = depth = min(option.depth, granted.depth)
            tried.gains[k] = option.gain
            budgets[r] = Budget(depth, min(granted.nodes, size(depth)), tried.plan.floors[k])
        self.mark = (k, self.clock()) if asks else None
        return budgets

    def _asks(self, k: int, batch: Batch, drafts: Mapping[int, Draft]) -> dict[int, Option]:
        """Rows that ask drafter k: those in which it pays beside the trees that they have, if these rows
        together pay for a draft of so many.  Their options have the gain beside those trees.
        """
        asks, gain, verify, depth, tried_by_some = dict[int, Option](), 0.0, 0.0, 0, False
        for r, tried in self.tries.items():
            for option in tried.plan.options:
                if option.drafter == k and batch[r].budget.nodes:
                    own, exploring = self._missed(r, drafts) * option.gain, k in tried.plan.exploring
                    if exploring or own > self.load.rate * option.cost:
                        asks[r] = option._replace(gain=own)
                        gain += own
                        verify += option.cost - option.ask_cost
                        depth, tried_by_some = max(depth, option.depth), tried_by_some or exploring
        if tried_by_some or not asks:
            return asks
        load, costs = self.load, self.planner.evidence.drafting
        drafting = load.delay_factor * load.pace * costs.expected(k, len(asks), depth)
        return asks if gain > self.load.rate * (verify + drafting) else {}

    def _missed(self, r: int, drafts: Mapping[int, Draft]) -> float:
        """Probability that the first tokens of the trees that a row has are wrong."""
        trees = [(1 << k, draft.trees[r]) for k, draft in drafts.items()]
        return choose.missed_by(trees, self.tries[r].plan.state.calibration) if trees else 1.0

    def stop_clock(self) -> None:
        if self.mark is not None:
            k, began = self.mark
            self.seconds[k] = self.clock() - began
            self.mark = None
