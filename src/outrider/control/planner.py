"""Plans of the adaptive controller: which drafters to ask for a row, and how deep.

A drafter is asked if its expected tokens pay for what asking and verification cost.  The estimates are drawn
by Thompson sampling, optimistic while the ledger has room.  One that does not seem to pay is tried again
after a pause that keeps its expected loss below `EXPLORE` of the time.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from outrider.control.acceptance import Reach
from outrider.control.accounts import Accounts
from outrider.control.alike import Candidate, Choice, Kind, Refusal, kind_of
from outrider.control.choose import Option
from outrider.control.crowds import Crowd, crowd_of, relieved, shrink
from outrider.control.evidence import FEW_TOKENS, KNOWN, LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController
from outrider.control.ledger import CROWD, USED, USUAL_GRACE, Grace
from outrider.control.plan import Load, Plan
from outrider.control.prices import MARGIN, Prices, need, pays_off, saved
from outrider.control.row_state import RowState
from outrider.core.clock import working_time
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import Budget

OPTIMISM = 0.2  # standard deviations of a draw of an estimate
DIGEST = 16  # steps that are taken in together, once the drafters are known
CAUTION = 2.0  # standard deviations below the estimates of drafts that surely pay


class Settings(NamedTuple):
    """Settings of an adaptive controller.

    grace: what requests may lose.  clock: returns seconds.  seed: of the draws of estimates.
    """

    grace: Grace = USUAL_GRACE
    clock: Callable[[], float] = working_time
    seed: int = 0


USUAL = Settings()


class Planner:
    """Chooses the drafters that each row asks, and their depth.

    load: of the step that was planned last.  order: drafters of a mix, cheapest first.

    Of the last plans:
    accounts: what they have left to lose.
    wait: steps until a row without a plan may get one.
    zs: drawn standard deviations, by drafter.  options: of rows that never asked, by acceptance, largest
    depth, and rows that ask together.  cautious: gains by a cautious estimate, by acceptance and depth.
    crowds: by drafter.  trying: drafters that some row tries.
    refused: kinds of rows that get no plan.  granted: kind -> what its first row got.
    prices: of the drafters beside that load.
    """

    def __init__(self, limits: FixedController, evidence: Evidence, settings: Settings = USUAL) -> None:
        arms = evidence.arms
        self.limits, self.arms, self.evidence = limits, arms, evidence
        self.accounts = Accounts(evidence, settings.grace)
        self.random = random.Random(settings.seed)
        self.load = Load(evidence.forward)
        self.order: Sequence[int] = range(len(arms))
        self.wait = LONGEST_PAUSE
        self.zs = [0.0] * len(arms)
        self.options: dict[tuple[Reach, int, int], Option] = {}
        self.cautious: dict[tuple[Reach, int], float] = {}
        self.crowds = [Crowd()] * len(arms)
        self.trying: set[int] = set()
        self.refused, self.granted = dict[Kind, Refusal](), dict[Kind | None, Choice]()
        self.prices = Prices(arms, evidence)

    def plans(
        self, batch: Batch, load: Load, steps: Sequence[RowStep] | None = None, others: Sequence[Plan] = ()
    ) -> dict[Row, Plan]:
        """The plans of rows with a drafter that is expected to pay or due for a try.

        steps: of the rows to plan for, by default all.  others: plans of further rows, which go on.

        What a row pays for a draft depends on the rows that ask with it.  At first all of them are assumed
        to; where far fewer find that it pays, their plans are made again.
        """
        evidence, most = self.evidence, self.limits.depth_for(len(batch))
        rows = [step.row for step in (batch if steps is None else steps) if step.emits]
        asking = Counter(option.drafter for plan in others for option in plan.options)
        aside = sum([plan.loss for plan in others])
        self._begin(load, rows, asking)
        plans, wait = self._plans(rows, most, aside), self.wait
        while shrink(self.crowds, plans.values(), asking):
            plans = self._plans(plans, most, aside)
            self.wait = wait = min(wait, self.wait)  # rows that had no plan before are not seen again
        for row, plan in plans.items():
            row.left_out -= {name for o in plan.options for name in self.arms[o.drafter].sources}
        if len(evidence.states) > len(batch):
            evidence.drop_ended()
        return plans

    def _begin(self, load: Load, rows: Collection[Row], asking: Counter[int]) -> None:
        """Prepare plans of rows beside a load, and beside others that ask drafters."""
        self.load, drafters = load, range(len(self.arms))
        self.prices.clear()
        self.cautious.clear()
        self.crowds = [
            crowd_of(k, rows, asking[k], self.evidence, self.prices.trial_rows(k, load)) for k in drafters
        ]
        # one draw for all rows, since they share what an ask costs
        self.zs = [OPTIMISM * abs(self.random.gauss(0.0, 1.0)) for _ in self.arms]
        if len(self.arms) > 1:
            line = self.evidence.drafting.line
            self.order = sorted(drafters, key=lambda k: line(k, 1)[::-1])

    def _plans(self, rows: Iterable[Row], most: int, aside: float) -> dict[Row, Plan]:
        """Plans for the present crowds.  aside: seconds that those of further rows may lose."""
        plans, self.wait = dict[Row, Plan](), LONGEST_PAUSE
        for of_last in (self.options, self.refused, self.granted, self.trying):
            of_last.clear()
        self.accounts.begin(self.load, aside)
        if self.load.batch and (lacks := self._lacks_room()):
            self.wait = min(LONGEST_PAUSE, lacks)
            return plans
        for row in rows:
            if (depth := min(most, row.draft_depth)) and (plan := self._plan(row, depth)):
                plans[row] = plan
        return plans

    def need(self, k: int, load: Load, pays: bool) -> float:
        """Seconds that have to be left for a draft of one token beside a load; infinite if unknown."""
        return need(self.prices.best(k, self.evidence.reach[k], 0.0, load, 1).cost, pays)

    def _lacks_room(self) -> int:
        """Steps until there is room for the shortest draft; 0 if there is, or it is none of known cost."""
        most, lacks, accounts = self.limits.depth_for(self.load.batch), list[float](), self.accounts
        for k, reach in enumerate(self.evidence.reach):
            least, sure = self.need(k, self.load, True), False
            if math.isfinite(least):
                if least > accounts.room and (depth := self.depth(k, reach, most)):
                    sure = self.surely_pays(reach, self._option(k, reach, 0.0, depth))
                lacks.append(least - accounts.room_of(sure))
        return accounts.until(min(lacks, default=0.0))

    def surely_pays(self, reach: Reach, option: Option) -> bool:
        """Whether a draft pays by a cautious estimate of what all requests have shown."""
        if reach.asked < KNOWN:
            return False
        place = reach, option.depth
        if place not in self.cautious:
            self.cautious[place] = reach.gains(-CAUTION, option.depth)[-1]
        return self.cautious[place] * self.load.accepted_token > option.cost

    def _plan(self, row: Row, most: int) -> Plan | None:
        """The plan of a row; without one, `wait` is at most the steps until there may be one."""
        self.evidence.promising(row)
        accounts, state = self.accounts, self.evidence.states.get(row)
        room = USED * accounts.row_grace
        if state is not None:
            self.evidence.credit(row, state, self.load)
            if state.asleep > row.steps and not (self.trying or relieved(self.load.batch, state.crowd)):
                self.wait = min(self.wait, state.asleep - row.steps)
                return None
            state.ledger.grace = accounts.row_grace
            room = state.ledger.room
        # beside few requests, one that is known is planned for by itself
        kind = self._kind(row, state, most) if state is None or self.load.batch > CROWD else None
        if kind is not None and kind in self.refused and room <= self.refused[kind].room:
            self.wait = min(self.wait, self.refused[kind].wait)
            return None
        choice = self.granted.get(kind)
        if choice is not None and self._takes(choice, room):
            return choice.plan._replace(state=self._begun(row))
        for arm in state.arms if state is not None else ():
            arm.reach.fade(row.steps)
        chosen, wait = self._choose(row, state, most, room)
        if chosen:
            chosen.sort(key=lambda candidate: candidate.option.cost)
            plan = self._plan_of(row, self._begun(row), chosen)
            # one row is enough to tell what computing a text costs a drafter
            known = [bool(self.evidence.prefills[k]) for k in plan.floors if self.arms[k].prefills]
            if kind is not None and (not plan.late or all(known)):
                self.granted[kind] = Choice(chosen, plan)
            return plan
        wait = max(wait, min(DIGEST, self.load.batch))  # with many rows one of them is always due
        if kind is not None:
            self.refused[kind] = Refusal(wait, room)  # that of all only shrinks while plans are made
        elif state is not None:
            state.asleep, state.crowd = row.steps + wait, self.load.batch
        self.wait = min(self.wait, wait)
        return None

    def _begun(self, row: Row) -> RowState:
        """The state of a row that gets a plan."""
        state = self.evidence.state(row)
        state.ledger.grace = self.accounts.row_grace
        return state

    def _takes(self, choice: Choice, room: float) -> bool:
        """Set aside what one more row may lose with these drafters, if there is room for it.

        room: seconds that the row may still lose.
        """
        accounts = self.accounts
        for candidate in choice.chosen:
            option, late, pays, _ = candidate
            if accounts.lacks(candidate, room) > 0:
                return False
            if not pays and accounts.wait(option.drafter, option.cost + late):
                return False
            room -= MARGIN * option.cost
        for candidate in choice.chosen:
            accounts.take(candidate)
        return True

    def _plan_of(self, row: Row, state: RowState, chosen: Sequence[Candidate]) -> Plan:
        options, floors = [candidate.option for candidate in chosen], dict[int, float]()
        for option in options:
            crowd = self.crowds[option.drafter].rows
            floors[option.drafter] = self.prices.floor(state, option, self.load, crowd)
        exploring = {candidate.option.drafter for candidate in chosen if not candidate.pays}
        return Plan(
            state,
            options,
            exploring,
            self._bound(options, floors),
            floors,
            loss=MARGIN * sum([option.cost for option in options]),
            late=any(self._lacks(k, row) for k in floors),
            sure=all(candidate.sure for candidate in chosen),
            tests=bool(exploring) or any(self.evidence.reach_of(k, row).asked < KNOWN for k in floors),
        )

    def _kind(self, row: Row, state: RowState | None, most: int) -> Kind:
        lacks = [self._lacks(k, row) for k, arm in enumerate(self.arms) if arm.prefills]
        return kind_of(row, state, most, lacks)

    def _choose(
        self, row: Row, state: RowState | None, most: int, room: float
    ) -> tuple[list[Candidate], int]:
        """Drafters for a row, and steps until there may be others.

        room: seconds that the row may still lose.
        """
        chosen, wait, found = list[Candidate](), LONGEST_PAUSE, dict[int, Option]()
        courage = self.accounts.courage(min(room, self.accounts.room_of(False)))
        for k, arm in enumerate(self.arms):
            if not row.accepts(arm.sources):
                continue
            if not row.steps and not row.drafts_with(arm.sources):
                wait = 1  # it computes no prompt, but may join later
                continue
            reach = self.evidence.reach_of(k, row)
            if depth := self.depth(k, reach, most):
                found[k] = self.best(k, state, reach, depth, courage)
        # the best one first: what it may lose is set aside, which may leave no room for others
        for k in sorted(found, key=lambda k: -saved(found[k], self.load)):
            if math.isinf(found[k].cost):
                wait = 1  # beside prompt tokens, or beyond the known costs
                continue
            candidate = self._candidate(k, row, state, found[k], courage, room)
            if candidate.late and chosen:  # beside another one, it is a trial to compute the text for it
                candidate = candidate._replace(pays=False, sure=False)
            retry = 0 if state is None else state.arms[k].retry - row.steps
            pause = self._pause(k, candidate, most, retry, room)
            if self._lacks(k, row) and not self.evidence.prefills[k]:
                pause = pause or int(k in self.trying)  # one row shows what it costs to compute a text
            if pause:
                wait = min(wait, pause)
                continue
            if not candidate.pays:
                self.trying.add(k)
            self.accounts.take(candidate)
            room -= MARGIN * candidate.option.cost
            chosen.append(candidate)
        return chosen, wait

    def _candidate(
        self, k: int, row: Row, state: RowState | None, best: Option, courage: float, room: float
    ) -> Candidate:
        """A drafter at its best depth, a shorter one where the best is too much for the room, or a trial."""
        reach, load = self.evidence.reach_of(k, row), self.load
        late, pays = self.evidence.prefill_cost[k] * self._lacks(k, row), pays_off(best, load)
        sure = pays and self.surely_pays(reach, best)
        room = min(room, self.accounts.room_of(sure))
        while (needed := need(best.cost, pays)) > room and best.depth > 1:
            fitting = int(best.depth * room / needed)  # 0 where no cost is known: it is infinite
            best = self.best(k, state, reach, max(1, min(best.depth // 2, fitting)), courage)
            pays = pays_off(best, load)
        if pays and self._lacks(k, row):
            pays = late < saved(best, load) * row.remaining and len(self.evidence.prefills[k]) > 0
        return Candidate(best, late, pays, sure and pays and self.surely_pays(reach, best))

    def _pause(self, k: int, candidate: Candidate, most: int, retry: int, room: float) -> int:
        """Steps until a drafter may be asked, by accounts and ledgers; 0: now.

        retry: until it may be tried again in this row.  room: seconds that the row may still lose.
        """
        option, late, pays, _ = candidate
        if not pays:
            if not self.prices.hopeful(k, self.load, most):
                return LONGEST_PAUSE
            rows = 1 if k in self.trying else self.crowds[k].trial
            pause = max(retry, self.accounts.wait(k, rows * (option.cost + late)))
            if pause > 0 or rows > self.crowds[k].due:
                return max(pause, DIGEST)
        return self.accounts.until(self.accounts.lacks(candidate, room))

    def best(self, k: int, state: RowState | None, above: Reach, depth: int, courage: float) -> Option:
        """The best depth of a drafter for a row; one for all rows of a grade that have not asked it."""
        own = None if state is None else state.arms[k]
        if own is not None and own.reach.above is not above:
            own.reach = Reach(above)  # the grade is another one
        if own is not None and own.reach.asked:
            return self._option(k, own.reach, courage, depth)
        place = above, depth, self.crowds[k].rows
        if place not in self.options:
            self.options[place] = self._option(k, Reach(above), courage, depth)
        return self.options[place]

    def _option(self, k: int, reach: Reach, courage: float, depth: int) -> Option:
        return self.prices.best(k, reach, courage * self.zs[k], self.load, depth, self.crowds[k].rows)

    def late(self, plan: Plan, row: Row) -> dict[int, int]:
        """Drafter of a plan -> tokens of a row that it lacks, if they are many."""
        lacks = {option.drafter: self._lacks(option.drafter, row) for option in plan.options}
        return {k: tokens for k, tokens in lacks.items() if tokens}

    def _lacks(self, k: int, row: Row) -> int:
        lacks = self.arms[k].behind(row) if self.arms[k].prefills else 0
        return lacks if lacks >= FEW_TOKENS else 0

    def depth(self, k: int, reach: Reach, most: int) -> int:
        """The deepest draft that a drafter may be asked for.  Its first ones are short: nothing is known."""
        return min(most, self.arms[k].depth, reach.most)

    def _bound(self, chosen: Sequence[Option], floors: Mapping[int, float]) -> Budget:
        depth = max(option.depth for option in chosen)
        nodes = sum(self.arms[option.drafter].size(option.depth) for option in chosen)
        if len(self.arms) == 1:
            return Budget(depth, nodes, floors[0])
        return Budget(depth, min(nodes, self.limits.size(depth)))
