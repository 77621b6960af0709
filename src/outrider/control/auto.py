"""The adaptive controller: which drafters to ask, how deep, and which of their tokens to verify.

    budget   expected gain against cost of every drafter, by Thompson sampling; none asked: a plain step
    ask      a further drafter of a mix is asked if it pays beside what the cheaper ones have proposed
    trim     the nodes of the whole batch that pay, by calibrated probability
    learn    costs, acceptance, and the ledger that bounds what all of this may lose

A drafter that does not pay is asked again after a pause that keeps its expected loss below `EXPLORE` of the
time.  No decision changes the text under the rule "match".  Under the other rules the distribution stays, but
a seed does not repeat the text, because budgets depend on the clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.control import choose
from outrider.control.acceptance import Calibration, Reach, Reliability
from outrider.control.choose import Option, Price
from outrider.control.cost import DraftCost, ForwardCost
from outrider.control.fixed import FixedController
from outrider.control.ledger import GRACE, GRACE_STEPS, TOTAL_GRACE, Ledger
from outrider.control.plan import Arm, Load, Plan, RowState, asks_of, judged, keep, note_depths, share_of
from outrider.core.clock import Times
from outrider.core.row import DraftingSummary, Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import NO_BUDGET, Budget, Draft

EXPLORE = 0.005  # part of the time for each drafter that does not seem to pay
OPTIMISM = 0.7  # standard deviations of a draw of an estimate
LONGEST_PAUSE = 256  # steps
ANCHOR = 96  # steps with drafts after which a plain one measures its cost again
SURPRISE = 0.2  # logarithm of a step's seconds over the expected ones
MARGIN = 1.2  # of a step's largest loss over its expected cost
MAX_CLIP = 1.5  # of a step's seconds over the expected ones, in the ledger


class AutoController:
    """Controller that chooses by measured cost and acceptance.

    limits: upper bounds, from options that were given.  arms: the drafters of a mix, or the only one.
    grace, total_grace: seconds that a request, and all together, may lose (see ledger.py).
    clock: returns seconds.
    """

    def __init__(
        self,
        limits: FixedController,
        arms: Sequence[Arm],
        forward: ForwardCost | None = None,
        grace: float = GRACE,
        total_grace: float = TOTAL_GRACE,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self.limits, self.arms, self.clock, self.grace = limits, arms, clock, grace
        self.total_grace, self.ledger = total_grace, Ledger()
        self.forward = forward or ForwardCost()
        self.drafting = DraftCost(self.forward.base(1))
        self.calibration, self.reliability = Calibration(), Reliability()
        self.reach = [Reach() for _ in arms]
        # of each arm in `DraftTree.proposers`: the only one owns all nodes, those of its own drafters too
        self.bits = [1 << k for k in range(len(arms))] if len(arms) > 1 else [-1]
        self.total = DraftingSummary()
        self.states: dict[Row, RowState] = {}
        self.random = random.Random(seed)
        self.load, self.anchored = Load(), False
        self.plans: dict[int, Plan] = {}
        self.spent: dict[int, float] = {}  # seconds of each drafter of a mix in this step
        self.asking: list[float] = [1.0] * len(arms)  # moving average of the part of a batch that asks
        # steps with drafts since the last plain one, and those of them in a row that took other than expected
        self.since_plain = self.surprises = 0
        self.mark: tuple[int, float] | None = None

    @property
    def order(self) -> Sequence[int]:
        """Drafters of a mix, cheapest first."""
        return sorted(range(len(self.arms)), key=lambda k: self.drafting.line(k, 1)[::-1])

    def nodes(self, rows: int) -> int:
        """The largest number of draft nodes that one of so many rows may get."""
        return self.limits.nodes(rows)

    def state(self, row: Row) -> RowState:
        found = self.states.get(row)
        if found is None:
            self.states = RowState.of_open(self.states)  # rows aborted between steps
            row.drafting = DraftingSummary()
            reach = [Reach(above) for above in self.reach]
            found = self.states[row] = RowState(
                Calibration(self.calibration), reach, Ledger(), row.drafting, [0] * len(self.arms)
            )
        return found

    # ---- before drafting

    def budget(self, batch: Batch) -> list[Budget]:
        self.plans, self.mark = {}, None
        self.spent.clear()
        batch.asker = None
        self._measure_load(batch)
        budgets = [NO_BUDGET] * len(batch)
        drafting = [r for r, step in enumerate(batch) if step.emits and step.row.params.speculate]
        states = {r: self.state(batch[r].row) for r in drafting}
        self.anchored = self._anchor()
        if self.anchored:
            return budgets
        most = self.limits.depth_for(len(batch))
        # optimistic Thompson sampling; one draw for all rows, since they share what an ask costs
        zs = [OPTIMISM * abs(self.random.gauss(0.0, 1.0)) for _ in self.arms]
        for r, state in states.items():
            row = batch[r].row
            depth = min(most, row.draft_depth) if state.asleep <= row.steps else 0
            if depth and (plan := self._plan(state, row, depth, zs)):
                self.plans[r] = plan
                budgets[r] = self._bound(plan)
        if self.plans:
            batch.asker = self if len(self.arms) > 1 else None
        return budgets

    def _anchor(self) -> bool:
        """Whether a plain step is due, to measure its cost again."""
        seen = self.forward.plain_steps
        longest = min(ANCHOR, 4 << min(5, seen[self.load.batch])) if seen else 0
        return not self.load.batch or self.since_plain >= longest or self.surprises >= 4

    def forced(self, r: int) -> bool:
        """Whether row r may get forced text: not in a plain step.  Its drafters are not asked then."""
        self.plans.pop(r, None)
        return not self.anchored

    def _measure_load(self, batch: Batch) -> None:
        load = self.load
        load.batch = load.rows = load.context = 0
        for step in batch:
            load.batch += step.emits
            load.rows += step.known
            load.context += step.known * step.end
        load.pace = self.forward.pace(load.batch)
        load.plain = load.pace * self.forward.base(load.rows, load.context)
        load.rate = max(load.batch / load.plain, self.forward.rate(load.batch))

    def _bound(self, plan: Plan) -> Budget:
        depth = max(option.depth for option in plan.options)
        if len(self.arms) == 1:
            return Budget(depth, self.arms[0].size(depth))
        nodes = sum(self.arms[option.drafter].size(option.depth) for option in plan.options)
        return Budget(depth, min(nodes, self.limits.size(depth)))

    def _plan(self, state: RowState, row: Row, most: int, zs: Sequence[float]) -> Plan | None:
        """The drafters to ask for a row, if any is expected to pay or due for a try."""
        load, chosen, exploring, step = self.load, [], set(), row.steps
        grace = state.ledger.grace = max(self.grace, GRACE_STEPS * load.plain)
        self.ledger.grace = max(self.total_grace, grace)
        room = min(state.ledger.room, self.ledger.room)
        for k, arm in enumerate(self.arms):
            if not (depth := min(most, arm.depth)) or not row.drafts_with(arm.sources):
                continue
            reach, price = state.reach[k], self._price(k, state.reach[k])
            reach.fade(step)
            found = choose.options(k, reach.gains(zs[k], depth), price, load.batch, load.plain)
            best = choose.best_option(found, load.batch, load.plain)
            if best.gain * load.plain <= load.batch * best.cost:
                if step < state.retry[k] or 2 * MARGIN * best.cost > room:
                    continue
                exploring.add(k)
            if MARGIN * best.cost <= room:
                room -= MARGIN * best.cost
                chosen.append(best)
        if not chosen:
            state.asleep = max(step + 1, min(state.retry))
            return None
        chosen.sort(key=lambda option: option.cost)
        return Plan(state, chosen, exploring)

    def _price(self, k: int, reach: Reach) -> Price:
        """Seconds for one row, if as many ask as lately."""
        load, rows = self.load, max(1.0, self.asking[k] * self.load.batch)
        fixed, per_level = self.drafting.line(k, round(rows))
        share = load.pace / rows

        def verify(nodes: float) -> float:
            return self._verify(round(rows * nodes)) / rows

        return Price(share * fixed, share * per_level, reach.per_level, verify)

    def _verify(self, nodes: int) -> float:
        """Seconds that so many draft nodes add to the forward."""
        load = self.load
        context = nodes * load.context // max(1, load.rows)
        return load.pace * (self.forward.base(load.rows + nodes, context) - self.forward.base(load.rows))

    # ---- while drafting

    def ask(self, k: int, batch: Batch, drafts: Mapping[int, Draft]) -> list[Budget]:
        """Budgets of drafter k of a mix, after the drafts of the cheaper ones."""
        self._stop_clock()
        budgets = [NO_BUDGET] * len(batch)
        for r, plan in self.plans.items():
            option = next((option for option in plan.options if option.drafter == k), None)
            granted = batch[r].budget
            if option is None or not granted.nodes or not self._pays(plan, option, r, drafts):
                continue
            plan.asked[k] = min(option.depth, granted.depth)
            budgets[r] = granted.within(plan.asked[k], self.arms[k].size(plan.asked[k]))
        self.mark = (k, self.clock()) if any(k in plan.asked for plan in self.plans.values()) else None
        return budgets

    def _pays(self, plan: Plan, option: Option, r: int, drafts: Mapping[int, Draft]) -> bool:
        """Whether a drafter pays beside the trees that the row has: where their first tokens are wrong."""
        if option.drafter in plan.exploring:
            return True
        trees = [(1 << k, draft.trees[r]) for k, draft in drafts.items()]
        missed = choose.missed_by(trees, plan.state.calibration)
        return missed * option.gain > self.load.rate * option.cost

    def _stop_clock(self) -> None:
        if self.mark is not None:
            k, began = self.mark
            self.spent[k] = self.clock() - began
            self.mark = None

    def trim(self, batch: Batch) -> None:
        """Keep the nodes of the whole batch that pay, and one of each drafter that is being tried."""
        self._stop_clock()
        if len(self.arms) == 1:
            for r, plan in self.plans.items():  # now that the scheduler has cut the budgets
                plan.asked = {0: depth} if (depth := batch[r].budget.depth) else {}
        if not any(step.tree.tokens for step in batch):
            return
        rows: list[tuple[RowStep, Plan]] = []
        joints = []
        self.limits.trim(batch)
        for r, plan in self.plans.items():
            step = batch[r]
            if step.tree.tokens:
                note_depths(plan, step, self.bits)
                rows.append((step, plan))
                joints.append(choose.joint_probabilities(step.tree, plan.state.calibration)[: step.tree.size])
        kept, _ = choose.select(joints, self._verify, self.load.rate)
        for (step, plan), nodes, joint in zip(rows, kept, joints):
            if plan.exploring and not nodes and joint:
                nodes = [0]
            plan.expected = sum(joint[i] for i in nodes)
            keep(batch, step, nodes)

    # ---- after the step

    def learn(self, commit: Commit, times: Times) -> None:
        batch, load = commit.batch, self.load
        nodes = sum(len(step.tree.tokens) for step in batch)
        seconds, expected = times.forward + times.rest, load.plain
        if nodes:
            expected += self._verify(nodes)
            self.since_plain += 1
        elif load.batch:
            self.since_plain = 0
        if not batch.prefill and load.batch:
            context = load.context + nodes * load.context // max(1, load.rows)
            if nodes:
                surprise = self.forward.learn_drafting(load.batch, load.rows + nodes, context, seconds)
                self.surprises = self.surprises + 1 if abs(surprise) > SURPRISE else 0
            else:
                self.forward.learn_plain(load.batch, load.rows, context, seconds)
                self.surprises = max(0, self.surprises - 2)
            self._learn_drafting(times.propose)
        measured = expected if batch.prefill else min(seconds, MAX_CLIP * expected)
        propose = times.propose
        if not batch.prefill:
            propose = self.drafting.clipped(propose, asks_of(self.plans), load.pace)
        emitted = sum(len(step.emitted) for step in batch)
        self.forward.learn_rate(load.batch, emitted, propose + measured)
        extra = propose + (measured - load.plain if nodes else 0.0)
        self._settle(batch, extra)
        for r, plan in self.plans.items():
            self._learn_row(batch[r], plan)
        self.states = RowState.of_open(self.states)

    def _learn_drafting(self, propose: float) -> None:
        pace = self.load.pace
        for k, depths in asks_of(self.plans).items():
            self.asking[k] += 0.2 * (len(depths) / self.load.batch - self.asking[k])
            seconds = self.spent.get(k, propose)
            self.drafting.learn(k, len(depths), sum(depths) / len(depths), seconds / pace)

    def _settle(self, batch: Batch, extra: float) -> None:
        """Enter the step into the ledgers; what drafts cost is shared by the rows that asked for them."""
        plain = self.load.plain / max(1, self.load.batch)
        drafting = [r for r, step in enumerate(batch) if r in self.plans or step.tree.tokens]
        weights = {r: 1 + len(batch[r].tree.tokens) for r in drafting}
        total = sum(weights.values())
        for r, step in enumerate(batch):
            state = self.states.get(step.row)
            if not step.emits or state is None:
                continue
            share = weights.get(r, 0) / total if total else 1 / self.load.batch
            spent, saved = plain + share * extra, plain * len(step.emitted)
            plan = self.plans.get(r)
            names = "+".join(self.arms[k].name for k in sorted(plan.asked)) if plan else ""
            names = names or ("automatic" if step.tree.tokens else "off")
            expected = plan.expected if plan else 0.0
            state.ledger.add(spent, saved)
            self.ledger.add(spent, saved)
            for summary in (state.summary, self.total):
                summary.add(names, len(step.tree.tokens), expected, len(step.accepted), spent, saved)

    def _learn_row(self, step: RowStep, plan: Plan) -> None:
        state, row = plan.state, step.row
        ended = row.finish_reason is not None  # nodes behind the end were not judged
        for key, confidence, accepted in judged(step, ended):
            self.reliability.add(state.calibration.probability(key, confidence), accepted)
            state.calibration.learn(key, accepted)
            self.calibration.learn(key, accepted)
        for k, depth in plan.asked.items():
            depth_accepted, verified, nodes_per_level = share_of(step, self.bits[k])
            own = plan.proposed.get(k, 0)
            # not missed, but not known either: at the end of the text, of the budget, and where trim has cut
            missed = (
                not ended and depth_accepted < depth and (verified > depth_accepted or own <= depth_accepted)
            )
            if depth_accepted or missed:
                state.reach[k].learn(depth_accepted, missed, nodes_per_level, row.steps)
                self.reach[k].learn(depth_accepted, missed, nodes_per_level)
            if depth_accepted:
                state.retry[k] = row.steps
            elif k in plan.exploring:
                option = next(option for option in plan.options if option.drafter == k)
                cost = option.cost if own else option.ask_cost
                pause = math.ceil(cost * self.load.batch / (EXPLORE * self.load.plain))
                state.retry[k] = row.steps + min(LONGEST_PAUSE, pause)
        state.asleep = 0 if plan.expected or step.accepted else state.asleep

    def report(self) -> dict[str, Any]:
        """What was chosen and why: steps by arm, costs, acceptance, expected and real gain, the ledger."""
        pace = self.load.pace
        return {
            "summary": asdict(self.total) | {"gain": self.total.gain},
            "step_ms": {rows: 1e3 * pace * self.forward.base(rows) for rows in (1, 2, 4, 8, 16, 32)},
            "drafters": {
                arm.name: reach.report() | self.drafting.report(k, pace)
                for k, (arm, reach) in enumerate(zip(self.arms, self.reach))
            },
            "reliability": self.reliability.table(),
            "ledger": {"loss_ms": 1e3 * self.ledger.loss, "room_ms": 1e3 * self.ledger.room},
        }
