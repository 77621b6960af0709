"""What drafts may lose: the room of ledgers and trials, as the plans of a step use it up."""

from __future__ import annotations

import math
from dataclasses import replace

from outrider.control.alike import Candidate
from outrider.control.evidence import LONGEST_PAUSE, Evidence
from outrider.control.ledger import KNOWN_GRACE, MOST_GRACE, USED, Grace, Trials
from outrider.control.plan import Load
from outrider.control.prices import MARGIN, need

SPARE = 0.1  # part of what drafts have saved that one request may lose again


class Accounts:
    """Seconds that the plans beside a load may lose.

    grace: what requests may lose.
    room, row_grace: left of the ledger of all requests, and what each request may lose.
    reserve: left for drafts that surely pay, where there is no room.
    trials: what the plans have left of them, by drafter.
    """

    def __init__(self, evidence: Evidence, grace: Grace) -> None:
        if all(evidence.known):
            grace = grace._replace(total=min(grace.total, KNOWN_GRACE))
        self.evidence, self.grace = evidence, grace
        self.load = Load(evidence.forward)
        self.room = self.reserve = self.row_grace = 0.0
        self.trials: list[Trials] = []

    def begin(self, load: Load, aside: float) -> None:
        """Prepare plans beside a load.  aside: seconds that the plans of other rows may lose."""
        self.load = load
        self.set_grace(load)
        ledger = self.evidence.ledger
        self.room, self.reserve = ledger.room - aside, ledger.reserve
        self.trials = [replace(trials) for trials in self.evidence.trials]

    def set_grace(self, load: Load) -> None:
        """Set what each request, and all together, may lose beside such a step."""
        ledger, alone = self.evidence.ledger, load.pace * load.forward.base(1)
        plain = max(load.decode or alone, self.grace.least)  # a chunk of a prompt emits nothing
        self.row_grace = load.allowance * self.grace.each * plain + SPARE * max(0.0, -ledger.loss)
        most = max(MOST_GRACE, KNOWN_GRACE * max(alone, self.grace.least))
        ledger.grace = min(load.allowance * self.grace.total * plain, most)

    def room_of(self, sure: bool, late: float = 0.0) -> float:
        """Seconds left for a draft, and to catch up with its text in `late` seconds.

        sure: it pays even by a cautious estimate, so that it is the way out of debt.
        """
        if sure and self.evidence.ledger.reserve > 0 and self.reserve >= late:
            return math.inf
        return max(self.room, self.reserve) - late

    def lacks(self, candidate: Candidate, room: float) -> float:
        """Seconds missing for a draft; 0 or less if there is room.  room: what its row may still lose."""
        option, late, pays, sure = candidate
        return need(option.cost, pays) - min(room, self.room_of(sure, late))

    def take(self, candidate: Candidate) -> None:
        """Set aside what a draft may lose, and what catching up takes."""
        option, late, pays, sure = candidate
        if not pays:
            self.trials[option.drafter].room -= option.cost + late
        cost = MARGIN * option.cost
        if self.room >= cost + late:
            self.room -= cost + late
        else:
            self.reserve -= late if sure else cost + late

    def courage(self, room: float) -> float:
        """Standard deviations by which a draw counts: -1 where a row has used what it may lose, up to 1."""
        return max(-1.0, min(1.0, 2 * room / (USED * self.row_grace) - 1))

    def until(self, lacks: float) -> int:
        """Plain steps until the ledgers have room for so many more seconds."""
        load = self.load
        return math.ceil(lacks * load.batch / (load.loss_share * load.decode)) if lacks > 0 else 0

    def wait(self, k: int, cost: float) -> int:
        """Plain steps until a trial of drafter k may cost so much, at most `LONGEST_PAUSE`."""
        load = self.load
        return int(min(LONGEST_PAUSE, self.trials[k].wait(cost, load.decode, load.allowance)))
