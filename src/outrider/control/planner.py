"""Plans of the adaptive controller: which drafters to ask for a row, and how deep.

A drafter is asked if its expected tokens pay for what asking and verification cost.  The estimates are drawn
by Thompson sampling, optimistic while the ledger has room.  One that does not seem to pay is tried again
after a pause that keeps its expected loss below `EXPLORE` of the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.control.acceptance import Reach
from outrider.control.choose import Option
from outrider.control.evidence import FEW_TOKENS, KNOWN, LONGEST_PAUSE, Evidence
from outrider.control.fixed import FixedController
from outrider.control.ledger import KNOWN_GRACE, MOST_GRACE, USED, USUAL_GRACE, Grace, Trials
from outrider.control.plan import Load, Plan, RowState
from outrider.control.prices import MARGIN, Prices, need, pays_off, saved
from outrider.core.clock import working_time
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import Budget

OPTIMISM = 0.2  # standard deviations of a draw of an estimate
DIGEST = 16  # steps that are taken in together, once the drafters are known
LATE = 64  # tokens that drafters lack: rows are alike up to so many
SPARE = 0.1  # part of what drafts have saved that one request may lose again


class Settings(NamedTuple):
    """Settings of an adaptive controller.

    grace: what requests may lose.  clock: returns seconds.  seed: of the draws of estimates.
    """

    grace: Grace = USUAL_GRACE
    clock: Callable[[], float] = working_time
    seed: int = 0


USUAL = Settings()


class Candidate(NamedTuple):
    """A drafter that one row may ask.

    option: its best depth.  late: seconds to catch up with the row's text.  pays: it is expected to.
    """

    option: Option
    late: float
    pays: bool


class Planner:
    """Chooses the drafters that each row asks, and their depth.

    grace: what requests may lose.
    load: of the step that was planned last.  order: drafters of a mix, cheapest first.

    Of the last plans:
    room, row_grace: seconds left of the ledger of all requests, and what each request may lose.
    wait: steps until a row without a plan may get one.  trials: what the plans have left of them.
    zs: drawn standard deviations, by drafter.  of_new: options of rows that never asked, by acceptance and
    largest depth.
    refused: kind of such rows that get no plan -> their `wait`.
    prices: of the drafters beside that load.
    """

    def __init__(self, limits: FixedController, evidence: Evidence, settings: Settings = USUAL) -> None:
        arms = evidence.arms
        self.limits, self.arms, self.evidence, self.grace = limits, arms, evidence, settings.grace
        if all(evidence.known):
            self.grace = self.grace._replace(total=min(self.grace.total, KNOWN_GRACE))
        self.random = random.Random(settings.seed)
        self.load = Load(evidence.forward)
        self.order: Sequence[int] = range(len(arms))
        self.room = self.row_grace = 0.0
        self.wait = LONGEST_PAUSE
        self.trials: Sequence[Trials] = ()
        self.zs = [0.0] * len(arms)
        self.of_new: dict[tuple[Reach, int], Option] = {}
        self.refused: dict[tuple[Any, ...], int] = {}
        self.prices = Prices(arms, evidence)

    def plans(
        self, batch: Batch, load: Load, steps: Sequence[RowStep] | None = None, aside: float = 0.0
    ) -> dict[Row, Plan]:
        """The plans of rows with a drafter that is expected to pay or due for a try.

        steps: of the rows to plan for, by default all.  aside: seconds that the plans of others may lose.
        """
        self._begin(load)
        self.room -= aside
        evidence, most, plans = self.evidence, self.limits.depth_for(len(batch)), dict[Row, Plan]()
        if load.batch and (lacks := self._lacks_room()):
            self.wait, steps = min(LONGEST_PAUSE, self._until(lacks)), ()
        for step in batch if steps is None else steps:
            row = step.row
            if step.emits and (depth := min(most, row.draft_depth)) and (plan := self._plan(row, depth)):
                plans[row] = plan
        if len(evidence.states) > len(batch):
            evidence.drop_ended()
        return plans

    def _begin(self, load: Load) -> None:
        """Prepare plans beside a load."""
        self.load = load
        self.set_grace(load)
        self.room, self.wait = self.evidence.ledger.room, LONGEST_PAUSE
        self.trials = [replace(trials) for trials in self.evidence.trials]
        # one draw for all rows, since they share what an ask costs
        self.zs = [OPTIMISM * abs(self.random.gauss(0.0, 1.0)) for _ in self.arms]
        for of_last in (self.of_new, self.refused, self.prices):
            of_last.clear()
        if len(self.arms) > 1:
            line = self.evidence.drafting.line
            self.order = sorted(range(len(self.arms)), key=lambda k: line(k, 1)[::-1])

    def set_grace(self, load: Load) -> None:
        """Set what each request, and all together, may lose beside such a step."""
        ledger, alone = self.evidence.ledger, load.pace * load.forward.base(1)
        plain = max(load.decode or alone, self.grace.least)  # a chunk of a prompt emits nothing
        self.row_grace = load.allowance * self.grace.each * plain + SPARE * max(0.0, -ledger.loss)
        most = max(MOST_GRACE, KNOWN_GRACE * max(alone, self.grace.least))
        ledger.grace = min(load.allowance * self.grace.total * plain, most)

    def closed(self) -> int:
        """Steps after the last plans until a new row may get one."""
        most, waits = self.limits.depth_for(self.load.batch), [LONGEST_PAUSE]
        courage = self._courage(min(self.room, USED * self.row_grace))
        for k, trials in enumerate(self.trials):
            reach = self.evidence.reach[k]
            if (depth := self.depth(k, reach, most)) and self.prices.hopeful(k, self.load, most):
                best = self._best(k, None, reach, depth, courage)
                if math.isinf(best.cost):
                    waits.append(1)
                    continue
                pause = 0 if (pays := pays_off(best, self.load)) else self._wait(trials, best.cost)
                waits.append(max(pause, self._until(need(best.cost, pays) - self.room)))
        return min(waits)

    def may_pay(self, row: Row, load: Load) -> bool:
        """Whether a drafter pays for a row by what speaks for its draft, or may be tried to learn that."""
        most = min(self.limits.depth_for(load.batch), row.draft_depth)
        for k, arm in enumerate(self.arms):
            if arm.grade(row):
                reach = self.evidence.reach_of(k, row)
                best = self.prices.best(k, reach, OPTIMISM, load, self.depth(k, reach, most))
                tried = reach.asked < KNOWN and self.evidence.trials[k].room >= best.cost
                if tried or pays_off(best, load):
                    return True
        return False

    def least_need(self) -> float:
        """Seconds that have to be left for a trial of one token, of the cheapest drafter; 0 if unknown."""
        needs = [self.need(k, self.load, False) for k in range(len(self.arms))]
        return min(filter(math.isfinite, needs), default=0.0)

    def need(self, k: int, load: Load, pays: bool) -> float:
        """The same for a draft of drafter k beside a load; infinite if unknown."""
        return need(self.prices.best(k, self.evidence.reach[k], 0.0, load, 1).cost, pays)

    def _lacks_room(self) -> float:
        """Seconds that the ledger lacks for the shortest draft; 0 if it has them, or none of known cost."""
        least = min(self.need(k, self.load, True) for k in range(len(self.arms)))
        return max(0.0, least - self.room) if math.isfinite(least) else 0.0

    def _courage(self, room: float) -> float:
        """Standard deviations by which a draw counts: -1 where a row has used what it may lose, up to 1."""
        return max(-1.0, min(1.0, 2 * room / (USED * self.row_grace) - 1))

    def _until(self, lacks: float) -> int:
        """Plain steps until the ledgers have room for so many more seconds."""
        load = self.load
        return max(0, math.ceil(lacks * load.batch / (load.share * load.decode)))

    def _wait(self, trials: Trials, cost: float) -> int:
        """Plain steps until a trial may cost so much, at most `LONGEST_PAUSE`."""
        return int(min(LONGEST_PAUSE, trials.wait(cost, self.load.decode, self.load.allowance)))

    def outlook(self, k: int) -> dict[str, Any]:
        """What a drafter is expected to do for a new request beside those of the last plans."""
        load, reach = self.load, self.evidence.reach[k]
        if not load.batch or not (depth := self.depth(k, reach, self.limits.depth_for(load.batch))):
            return {}
        best = self._option(k, reach, 0.0, depth)
        return {
            "depth": best.depth,
            "tokens": round(best.gain, 3),
            "ms": round(1e3 * best.cost, 3),
            "pays": pays_off(best, self.load),
        }

    def interval(self, plans: Iterable[Plan]) -> int:
        """Steps until plans are made again, while losses leave room: few while drafters are new."""
        interval, most = DIGEST, DIGEST * self.load.batch  # many rows lose little by a few of them
        for plan in plans:
            asked = [plan.state.reach[option.drafter] for option in plan.options]
            for own in asked:
                others = own.above.asked if own.above else 0
                interval = min(interval, 1 + (own.asked + min(others, most)) // 4)
        return interval

    def _plan(self, row: Row, most: int) -> Plan | None:
        """The plan of a row; without one, `wait` is at most the steps until there may be one."""
        self.evidence.promising(row)
        state, room = self.evidence.states.get(row), min(self.room, USED * self.row_grace)
        if state is not None:
            self.evidence.credit(row, state, self.load)
            if state.asleep > row.steps and not relieved(self.load.batch, state.crowd):
                self.wait = min(self.wait, state.asleep - row.steps)
                return None
            for reach in state.reach:
                reach.fade(row.steps)
            state.ledger.grace = self.row_grace
            room = min(self.room, state.ledger.room)
        kind = None if state is not None else self._kind(row, most)
        if kind is not None and kind in self.refused:
            self.wait = min(self.wait, self.refused[kind])
            return None
        chosen, exploring, wait = self._choose(row, state, most, room)
        if chosen:
            chosen.sort(key=lambda option: option.cost)
            state = state or self.evidence.state(row)
            state.ledger.grace = self.row_grace
            floors = {option.drafter: self.prices.floor(state, option, self.load) for option in chosen}
            loss = MARGIN * sum([option.cost for option in chosen])
            late = any(self._lacks(option.drafter, row) for option in chosen)
            return Plan(state, chosen, exploring, self._bound(chosen, floors), floors, loss, late)
        wait = max(wait, min(DIGEST, self.load.batch))  # with many rows one of them is always due
        if state is not None:
            state.asleep, state.crowd = row.steps + wait, self.load.batch
        if kind is not None:
            self.refused[kind] = wait  # the room only shrinks while plans are made
        self.wait = min(self.wait, wait)
        return None

    def _kind(self, row: Row, most: int) -> tuple[Any, ...]:
        """What the plan of a row without a state depends on, roughly.

        Nothing speaks for drafts for such a row: its grades are 0.
        """
        late = [self._lacks(k, row) // LATE for k, arm in enumerate(self.arms) if arm.prefills]
        return most, row.steps > 0, row.left_out, row.params.draft_method, *late

    def _choose(
        self, row: Row, state: RowState | None, most: int, room: float
    ) -> tuple[list[Option], set[int], int]:
        """Options of a row, those that do not seem to pay, and steps until there may be others."""
        chosen, exploring, wait = list[Option](), set[int](), LONGEST_PAUSE
        courage, found = self._courage(room), dict[int, Option]()
        for k, arm in enumerate(self.arms):
            wanted = row.accepts(arm.sources) if row.steps else row.drafts_with(arm.sources)
            if wanted and (depth := self.depth(k, reach := self.evidence.reach_of(k, row), most)):
                found[k] = self._best(k, state, reach, depth, courage)
        # the best one first: what it may lose is set aside, which may leave no room for others
        for k in sorted(found, key=lambda k: -saved(found[k], self.load)):
            best = found[k]
            if math.isinf(best.cost):
                wait = 1  # beside prompt tokens, or beyond the known costs
                continue
            while need(best.cost, pays_off(best, self.load)) > room and best.depth > 1:  # try a shorter one
                best = self._best(k, state, self.evidence.reach_of(k, row), best.depth // 2, courage)
            late = self.evidence.prefill_cost[k] * self._lacks(k, row)
            pays = pays_off(best, self.load) and (not late or late < saved(best, self.load) * row.remaining)
            retry = 0 if state is None else state.retry[k] - row.steps
            if pause := self._pause(k, Candidate(best, late, pays), most, retry, room):
                wait = min(wait, pause)
                continue
            if not pays:
                exploring.add(k)
                self.trials[k].room -= best.cost + late
            if row.left_out:
                row.left_out -= frozenset(self.arms[k].sources)
            room -= MARGIN * best.cost
            self.room -= MARGIN * best.cost + late
            chosen.append(best)
        return chosen, exploring, wait

    def _pause(self, k: int, candidate: Candidate, most: int, retry: int, room: float) -> int:
        """Steps until a drafter may be asked, by accounts and ledgers; 0: now.

        retry: until it may be tried again in this row.  room: seconds that the row may still lose.
        """
        (option, late, pays), load = candidate, self.load
        if not pays:
            if not self.prices.hopeful(k, load, most):
                return LONGEST_PAUSE
            pause = max(retry, self._wait(self.trials[k], option.cost + late))
            if pause > 0:
                return pause
        lacks = need(option.cost, pays) - min(room, self.room - late)
        return self._until(lacks) if lacks > 0 else 0

    def _best(self, k: int, state: RowState | None, above: Reach, depth: int, courage: float) -> Option:
        """The best depth of a drafter for a row; one for all rows of a grade that have not asked it."""
        if state is not None and state.reach[k].above is not above:
            state.reach[k] = Reach(above)  # the grade is another one
        if state is not None and state.reach[k].asked:
            return self._option(k, state.reach[k], courage, depth)
        if (above, depth) not in self.of_new:
            self.of_new[above, depth] = self._option(k, Reach(above), courage, depth)
        return self.of_new[above, depth]

    def _option(self, k: int, reach: Reach, courage: float, depth: int) -> Option:
        return self.prices.best(k, reach, courage * self.zs[k], self.load, depth)

    def late(self, plan: Plan, row: Row) -> dict[int, int]:
        """Drafter of a plan -> tokens of a row that it lacks, if they are many."""
        lacks = {option.drafter: self._lacks(option.drafter, row) for option in plan.options}
        return {k: tokens for k, tokens in lacks.items() if tokens}

    def _lacks(self, k: int, row: Row) -> int:
        lacks = self.arms[k].behind(row) if self.arms[k].prefills else 0
        return lacks if lacks >= FEW_TOKENS else 0

    def depth(self, k: int, reach: Reach, most: int) -> int:
        """The deepest draft that a drafter may be asked for.  Its first ones are short: nothing is known."""
        return min(most, self.arms[k].depth, 1 << min(10, reach.asked))

    def _bound(self, chosen: Sequence[Option], floors: Mapping[int, float]) -> Budget:
        depth = max(option.depth for option in chosen)
        nodes = sum(self.arms[option.drafter].size(option.depth) for option in chosen)
        if len(self.arms) == 1:
            return Budget(depth, nodes, floors[0])
        return Budget(depth, min(nodes, self.limits.size(depth)))


def relieved(now: int, before: int) -> bool:
    """Whether so many fewer rows run that what did not pay may pay."""
    return 2 * now <= before
