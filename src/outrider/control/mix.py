"""Budgets of the drafters of a mix: one is asked if it pays beside what the cheaper ones proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outrider.control import choose
from outrider.control.choose import Option
from outrider.control.plan import Load, Plan, Try
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
        budgets, asking, size = [NO_BUDGET] * len(batch), False, self.planner.arms[k].size
        for r, tried in self.tries.items():
            plan, granted = tried.plan, batch[r].budget
            for option in plan.options:
                if option.drafter == k and granted.nodes and self._pays(plan, option, r, drafts):
                    tried.asked[k] = depth = min(option.depth, granted.depth)
                    budgets[r], asking = Budget(depth, min(granted.nodes, size(depth)), plan.floors[k]), True
        self.mark = (k, self.clock()) if asking else None
        return budgets

    def _pays(self, plan: Plan, option: Option, r: int, drafts: Mapping[int, Draft]) -> bool:
        """Whether a drafter pays beside the trees that the row has: where their first tokens are wrong."""
        if option.drafter in plan.exploring:
            return True
        trees = [(1 << k, draft.trees[r]) for k, draft in drafts.items()]
        missed = choose.missed_by(trees, plan.state.calibration) if trees else 1.0
        return missed * option.gain > self.load.rate * option.cost

    def stop_clock(self) -> None:
        if self.mark is not None:
            k, began = self.mark
            self.seconds[k] = self.clock() - began
            self.mark = None
