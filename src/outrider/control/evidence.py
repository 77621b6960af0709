"""What steps have shown: costs, acceptance by request and over all of them, and the ledgers.

Steps are taken in by several at once (`Evidence.learn`): code that runs in a row costs a quarter of what it
costs right behind a forward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from outrider.control.acceptance import FIRST_GRADED, FIRST_UNGRADED, PAUSE, Calibration, Reach, Reliability
from outrider.control.cost import OUTLIER, RATE, Ask, ForwardCost
from outrider.control.ledger import FIRST_TRIALS, MOST_KEPT, MOST_TRIALS, Ledger, Moment, Trials
from outrider.control.memory import EVERY, Memory, learned
from outrider.control.module import Corrected, Module
from outrider.control.outcomes import judged, outcome_of
from outrider.control.plan import Arm, Load, StepRecord, Try
from outrider.control.row_state import RowArm, RowState
from outrider.control.sums import StepSums
from outrider.control.tail import Tail
from outrider.core.row import DraftingSummary, Row
from outrider.core.step import Batch, RowStep

LONGEST_PAUSE = 256  # steps
MOST_LOST = 4  # times a prompt's prefill and a plain step, by the requests that a drafter read
KNOWN = 8  # asks after which a drafter is known
SURPRISE = 0.2  # logarithm of a step's seconds over the expected ones
FEW_TOKENS = 16  # of a prompt: fewer tell nothing of what its prefill costs, or are those of a draft
PREFILLS = 5  # of which the median counts
Asks = dict[tuple[int, int], list[tuple[float, float]]]  # (drafter, rows) -> depths and seconds
JUDGED = 8  # rows of a step whose drafts are judged node by node
MAX_CLIP = 1.1  # of a step's seconds over the expected ones, in the ledger; more is noise of the machine


class Evidence:
    """Estimates of an adaptive controller.

    graded: acceptance by drafter and grade of its next draft, for grades above 0.  trials: by drafter.
    states: of the open rows that a drafter was considered for.  known: drafters that were asked often before
    this start.  decided: rows whose prefill was decided on -> seconds of it that the ledger has so far.
    idle: moving average of the seconds that drafters take in a step that asks none.  surprises: drafting
    steps in a row that took other than expected.
    host: seconds of the controller itself that no ledger has yet.  overhead: their mean in drafting steps.
    prefill_cost: seconds of a drafter for a token of a prompt, the median of `prefills`; prefill_seconds: for
    all prompts so far.  worth: seconds that drafts have saved beyond them in the requests that it read.
    sums: of the steps that are being taken in.  turn: number of steps whose drafts were judged.
    history: the last sums, some steps apart.  module: corrects acceptance.  memory: for the next start.
    pending: some rows have ended and are still to be completed.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        forward: ForwardCost | None = None,
        memory: Memory | None = None,
        module: Module | None = None,
    ) -> None:
        self.arms, self.memory, self.module = arms, memory, module
        self.forward = forward or ForwardCost()
        plain, by_level = self.forward.base(1), {k for k, arm in enumerate(arms) if arm.prefills}
        self.learned = found = learned(memory and memory.read(), len(arms), plain, by_level)
        self.calibration, self.reach, self.drafting, self.prefill_cost, self.ledger, self.graded = found
        for arm, reach in zip(arms, self.reach):
            if arm.grades:
                reach.expected = FIRST_UNGRADED
        self.ledger.loss = max(self.ledger.loss, -MOST_KEPT * plain)
        # of each arm in `DraftTree.proposers`: the only one owns all nodes, those of its own drafters too
        self.bits = [1 << k for k in range(len(arms))] if len(arms) > 1 else [-1]
        self.known = [reach.asked >= KNOWN for reach in self.reach]
        self.trials = [Trials((MOST_TRIALS if old else FIRST_TRIALS) * plain) for old in self.known]
        self.prefills = [deque([cost] if cost else [], maxlen=PREFILLS) for cost in self.prefill_cost]
        self.worth, self.prefill_seconds = [0.0] * len(arms), 0.0
        self.states, self.decided, self.pending = dict[Row, RowState](), dict[Row, float](), False
        self.sums, self.total, self.tail = StepSums(arms), DraftingSummary(), Tail()
        self.history = deque[Moment](maxlen=2000)  # for a picture
        self.reliability, self.turn = Reliability(), 0
        self.idle = self.host = self.overhead = 0.0
        self.surprises, self.kept_at = 0, -math.inf

    def state(self, row: Row) -> RowState:
        found = self.states.get(row)
        if found is None:
            row.drafting = DraftingSummary()
            above, module = self.calibration, self.module
            own = Corrected(above, module, row) if module else Calibration(above)
            arms = [RowArm(Reach(above)) for above in self.reach]
            found = self.states[row] = RowState(own, arms, Ledger(), row.drafting)
        return found

    def reach_of(self, k: int, row: Row) -> Reach:
        """Acceptance over all requests at the grade that the next draft of a row has."""
        grade = self.arms[k].grade(row)
        return self.graded.setdefault((k, grade), Reach(expected=FIRST_GRADED)) if grade else self.reach[k]

    def promising(self, row: Row) -> bool:
        """Whether more speaks for a draft than at the last look.  The row sleeps no more then."""
        grades = [arm.grade(row) for arm in self.arms]
        state = self.state(row) if any(grades) else self.states.get(row)
        return state is not None and state.promising(grades)

    def learn(self, records: Sequence[StepRecord]) -> None:
        """Take in steps, oldest first."""
        asked = Asks()
        host = self.host / len(records)
        if any(record.usual for record in records):
            self.overhead += (1 - (1 - RATE) ** len(records)) * (host - self.overhead)
        for record in records:
            extra = self._costs(record, asked)
            spent, plain = self.sums.add(record, self.states, extra, self.idle / max(1, record.load.batch))
            self._earn(spent, plain, record.load, record.emitted)
            self._judge(record, host)
        for (k, rows), asks in asked.items():
            depths, seconds = zip(*asks)
            self.drafting.learn(k, rows, sum(depths) / len(asks), sum(seconds) / len(asks))
        self._remember()

    def refresh(self, rows: Iterable[Row] | None = None) -> None:
        """Let ledgers, summaries and probabilities of rows, by default of all, count the steps taken in."""
        for row in [*self.sums.sums] if rows is None else rows:
            self._enter_sums(row)
            if row is not None and (state := self.states.get(row)) is not None:
                state.calibration.refresh()
        self.calibration.refresh()

    def _enter_sums(self, row: Row | None) -> None:
        """Enter what was summed up of a row into its ledger and summary, and the summary of all."""
        for names, own in self.sums.sums.pop(row, {}).items():
            self.total.add(names, own.spent + own.idle, own.plain, own.steps, own.drafted)
            if row is not None:
                self.state(row).enter(names, own.spent, own.plain, own.steps, own.drafted, own.idle)

    def _remember(self) -> None:
        total, ledger = self.total, self.ledger
        self.history.append(
            Moment({**total.steps}, total.seconds, total.plain_seconds, ledger.loss, ledger.room)
        )

    def rested(self, load: Load, seconds: Sequence[float], propose: float, beside: int = 0) -> None:
        """Take in a rest: seconds of plain steps and their idle drafters, tokens emitted beside prompts."""
        batch = load.batch
        if count := len(seconds):
            typical = median_low(seconds)
            self.forward.learn_plain(batch, load.rows, load.context, typical, count)
            self.forward.learn_rate(batch, batch, typical + propose / count, count)
            self.surprises = 0
            self.idle += (1 - (1 - RATE) ** count) * (propose / count - self.idle)
        tokens, host, self.host = count * batch + beside, self.host, 0.0
        self._earn((plain := tokens * load.token) + host, plain, load, tokens)
        self.total.add("off", plain + host + propose, plain, steps=tokens)
        self._remember()

    def _earn(self, spent: float, plain: float, load: Load, tokens: int) -> None:
        """Enter seconds, and those of plain decoding, into the ledger of all requests."""
        self.ledger.add_steps(spent, plain, load.loss_share)
        self.tail.credit(plain, tokens)
        for trials in self.trials:
            trials.earn(plain, load.decode, load.allowance)

    def credit(self, row: Row, state: RowState, load: Load) -> None:
        """Enter the plain steps of a row during which nothing was decided."""
        if (count := row.steps - state.steps) > 0:
            state.enter("off", plain := count * load.token, plain, steps=count)

    def close(self, row: Row, load: Load) -> None:
        """Complete the summary of a row that has ended, and enter the prefill that the ledger lacks."""
        self._enter_sums(row)
        state, unpaid = self.states.pop(row, None), -self.decided.pop(row, 0.0)
        if state is not None:
            self.credit(row, state, load)
        elif row.steps:  # no drafter was considered
            row.drafting = DraftingSummary()
            row.drafting.add("off", plain := row.steps * load.token, plain, steps=row.steps)
        for k, arm in enumerate(self.arms):
            if arm.prefills and row.params.speculate and not row.left_out.issuperset(arm.sources):
                lost = self.prefill_cost[k] * (row.prompt - (row.cached or 0))
                most = MOST_LOST * (lost + load.token)
                least = min(self.worth[k], -2 * most)  # so that a few good requests make up for many bad ones
                earned = state.arms[k].earned if state is not None else 0.0
                self.worth[k] = max(least, min(self.worth[k] + earned - lost, most))
                unpaid += lost
        self.ledger.add(max(0.0, unpaid), 0.0)

    def finish(self, rows: Sequence[Row], batch: Batch, load: Load) -> None:
        """Complete what is known of rows that have ended in a step."""
        for row in rows:
            self.close(row, load)
        if never_saved := self.tail.learn(batch.rows, rows, self.forward):
            self.ledger.add(never_saved, 0.0)
            self.total.plain_seconds -= never_saved

    def drop_ended(self) -> None:
        """Forget rows that ended outside a step, unless some are still to be completed."""
        for row in [row for row in self.sums.sums if row is not None and row.finish_reason is not None]:
            self._enter_sums(row)
        if not self.pending:
            self.states = {row: state for row, state in self.states.items() if row.finish_reason is None}
            self.decided = {row: paid for row, paid in self.decided.items() if row.finish_reason is None}

    def save(self, now: float) -> None:
        """Remember what was learned for the next start, at most every `EVERY` seconds."""
        if self.memory is not None and now - self.kept_at >= EVERY:
            self.kept_at = now
            self.memory.write(self.learned.written())

    # ---- costs

    def _costs(self, record: StepRecord, asked: Asks) -> float:
        """Learn what a step has cost.  Returns what drafts cost in it, for the ledgers.

        asked: (drafter, rows) -> depths and seconds of its asks, to be added to.
        """
        batch, load, nodes, asks = record.batch, record.load, record.nodes, record.asks
        seconds, propose = record.seconds, record.propose
        expected = load.plain + (load.added(nodes) if nodes else 0.0)
        if record.once:  # its times tell nothing of later steps; all requests profit from its work
            usual = self._expected(load, asks) + expected - load.plain
            lost, host, self.host = record.lost(usual), self.host, 0.0
            self.ledger.add_once(lost, load.plain)
            self.total.seconds += lost
            self._charge_late(record, math.inf)
            return usual + host
        measured = expected
        if load.decodes_only:
            self._forward(load, nodes, min(seconds, expected) if record.cold and nodes else seconds)
            measured = seconds
            if self.forward.settled(load.rows + nodes):
                measured = max(expected, min(seconds, MAX_CLIP * expected))
            elif nodes:
                measured = min(seconds, OUTLIER * expected)
        late = record.late
        if batch.prefill or late:
            propose = self._prefill(record, asks, late)
        else:
            propose = self._propose(record, asks, asked)
        if load.decodes_only:
            self.forward.learn_rate(load.batch, record.emitted, propose + self.idle + measured)
        extra = propose + (measured - load.plain if nodes else 0.0) + self.host
        self.host = 0.0
        return extra

    def _expected(self, load: Load, asks: Mapping[int, Ask]) -> float:
        """Seconds that drafting is expected to take."""
        return load.pace * sum(self.drafting.expected(k, *ask) for k, ask in asks.items())

    def _forward(self, load: Load, nodes: int, seconds: float) -> None:
        if not nodes:
            self.forward.learn_plain(load.batch, load.rows, load.context, seconds)
            self.surprises = max(0, self.surprises - 2)
            return
        context = load.context + nodes * load.context // max(1, load.rows)
        surprise = self.forward.learn_drafting(load.batch, load.rows + nodes, context, seconds)
        self.surprises = self.surprises + 1 if abs(surprise) > SURPRISE else 0

    def _prefill(self, record: StepRecord, asks: Mapping[int, Ask], late: Mapping[int, int]) -> float:
        """Note what drafters take for prefill.  Returns the seconds of a step that fall to drafts.

        Prefill and catching up (`late`: tokens by drafter) are decided on before, by what they are expected
        to save, so no row's ledger is charged with them.  That of all requests is charged with catching up
        at once, with doubtful prefill where that is decided (prefill_choice.py), with other at the row's end.
        """
        prefill, drafting = record.batch.prefill, min(record.propose, self._expected(record.load, asks))
        self.prefill_seconds += record.propose - drafting
        for k, arm in enumerate(self.arms):
            rows = [s for s in record.batch if s.known > 1 and not s.row.left_out.issuperset(arm.sources)]
            # where pages are shared, the drafter may have had more to read than the target
            alone = not any(step.row.cached for step in rows)
            tokens = sum(step.known for step in rows) + late.get(k, 0)
            if arm.prefills and (alone or not prefill) and tokens >= FEW_TOKENS:
                each = min(record.propose - drafting, record.seconds if prefill else math.inf) / tokens
                self.prefills[k].append(each)
                self.prefill_cost[k] = median_low(self.prefills[k])
        self._charge_late(record, record.propose - drafting)
        return drafting

    def _charge_late(self, record: StepRecord, most: float) -> None:
        """Enter what catching up is known to cost, at most so many seconds."""
        for r, tried in record.tries.items():
            for k, tokens in tried.late.items():
                cost, row = self.prefill_cost[k] * tokens, record.batch[r].row
                self.trials[k].room -= cost if k in tried.plan.exploring else 0.0
                self.decided[row] = self.decided.get(row, 0.0) + cost
        known = sum([self.prefill_cost[k] * tokens for k, tokens in record.late.items()])
        if caught := min(most, known):
            self.ledger.add_steps(caught, 0.0, 0.0)
            self.total.seconds += caught

    def _propose(self, record: StepRecord, asks: Mapping[int, Ask], asked: Asks) -> float:
        """Note what drafting has cost.  Returns its seconds beyond those of idle drafters, an outlier cut."""
        load, propose, expected = record.load, record.propose, self.idle
        # merging and trimming their trees takes time, too
        shared = max(0.0, propose - sum(record.spent.values()) - self.idle) / max(1, len(asks))
        for k, ask in asks.items():
            usual = self.drafting.expected(k, *ask)
            expected += load.pace * usual
            seconds = (record.spent.get(k, 0.0) + shared) / load.pace
            if record.cold and self.drafting.known(k):
                seconds = min(seconds, usual)
            asked.setdefault((k, ask.rows), []).append((ask.depth, seconds))
        if expected:
            propose = min(propose, OUTLIER * expected)
        if not asks:
            self.idle += RATE * (propose - self.idle) if self.idle else propose
        return max(0.0, propose - self.idle)

    # ---- acceptance

    def _judge(self, record: StepRecord, host: float) -> None:
        """Learn from the drafts of a step: of `JUDGED` rows about, in turns, and of all that try a drafter.

        The drafts of so many rows tell enough, and judging all of a large batch costs more than it gains.
        host: seconds of the controller in this step, for all rows.
        """
        self.turn += 1
        host /= max(1, len(record.tries))
        every = min(PAUSE, -(-len(record.tries) // JUDGED))
        for r, tried in record.tries.items():
            if tried.plan.exploring:
                self._row(record, record.batch[r], tried, host, 1)
            elif (r + self.turn) % every == 0:
                self._row(record, record.batch[r], tried, host, every)

    def _row(self, record: StepRecord, step: RowStep, tried: Try, host: float, steps: int) -> None:
        """Learn what the drafts of a row show.  steps: those of the row since the last judged one."""
        state, row = tried.plan.state, step.row
        ended = record.last and row.finish_reason is not None  # nodes behind the end were not judged
        for key, accepted in judged(step, ended):
            self.reliability.add(state.calibration.probability(key), accepted)
            state.calibration.learn(key, accepted)
            self.calibration.learn(key, accepted)
        for k in tried.asked:
            own, outcome = state.arms[k], outcome_of(step, tried, k, self.bits[k], ended)
            right, proposed = outcome.accepted, tried.proposed.get(k, 0)
            if right or outcome.missed:
                own.reach.learn(outcome, row.steps)
                (own.reach.above or self.reach[k]).learn(outcome)
            option = tried.plan.option(k)
            cost = option.cost if proposed else option.ask_cost
            own.earned += steps * (right * record.load.accepted_token - cost)
            if right:
                own.retry = row.steps
            elif k in tried.plan.exploring:
                self.trials[k].room -= cost + host
                if self.reach[k].asked >= KNOWN:  # the next trials are for other rows, or for other text
                    pause = math.ceil(cost / (record.load.explore * record.load.token))
                    own.retry = row.steps + min(LONGEST_PAUSE, pause)
        if tried.expected or step.accepted:
            state.asleep = 0
