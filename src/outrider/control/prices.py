"""What asking a drafter costs and gains for one row, beside a load."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.control import choose
from outrider.control.acceptance import Reach
from outrider.control.choose import Option, Price
from outrider.control.evidence import Evidence
from outrider.control.plan import Arm, Load
from outrider.control.row_state import RowState

MARGIN = 1.2  # of a step's largest loss over its expected cost
FLOOR_NODES = 4  # of a row: what one of them costs sets its floor
MOST_FLOOR = 0.9
DOUBT = 1.25  # costs may be overestimated so much where no acceptance seems to pay


class Prices:
    """Prices of the drafters, by the measured costs and acceptance.

    Memoized for one load, until `clear`:
    hopes: drafter, depth -> `hopeful`.  exponents: of drafters that stop by themselves.
    """

    def __init__(self, arms: Sequence[Arm], evidence: Evidence) -> None:
        self.arms, self.evidence = arms, evidence
        self.hopes: dict[tuple[int, int], bool] = {}
        self.exponents: dict[int, float] = {}

    def clear(self) -> None:
        """Forget what holds for the last load."""
        self.hopes.clear()
        self.exponents.clear()

    def best(self, k: int, reach: Reach, z: float, load: Load, depth: int, crowd: int = 0) -> Option:
        """The best depth, up to this one, beside a load, with estimates z standard deviations higher.

        crowd: rows that ask together, by default all of them.
        """
        gains = reach.gains(z, depth)
        return choose.best_option(k, gains, self.price(k, reach, load, crowd), load.batch, load.decode, crowd)

    def trial_rows(self, k: int, load: Load) -> int:
        """Rows that a trial takes at least: so many that each costs at most twice what it costs if all ask.

        A draft for some rows takes `shared` seconds and `own` for each row.
        """
        n, reach = load.batch, self.evidence.reach[k]
        alone, together = (self.price(k, reach, load, rows).of(1) for rows in (1, n))
        if n == 1 or not math.isfinite(alone + together):
            return 1
        shared = max(0.0, (alone - together) * n / (n - 1))
        own = alone - shared
        return max(1, math.ceil(shared / (own + 2 * shared / n))) if shared else 1

    def hopeful(self, k: int, load: Load, most: int) -> bool:
        """Whether a drafter would pay if all its tokens were accepted."""
        key = k, min(most, self.arms[k].depth)
        if key not in self.hopes:
            price = self.price(k, self.evidence.reach[k], load)._replace(stops=False)
            best = choose.best_option(k, range(1, key[1] + 1), price, load.batch, load.decode)
            self.hopes[key] = math.isinf(best.cost) or DOUBT * best.gain * load.accepted_token > best.cost
        return self.hopes[key]

    def floor(self, state: RowState, option: Option, load: Load, crowd: int) -> float:
        """Confidence of a path behind which not even a sure token would pay."""
        k = option.drafter
        if not self.arms[k].stops:
            return 0.0
        reach = state.arms[k].reach
        price = self.price(k, reach, load, crowd)
        node = min(price.verify(1), price.verify(FLOOR_NODES) / FLOOR_NODES)
        least = min(MOST_FLOOR, load.rate * (price.per_level / reach.drafted + node))
        if k not in self.exponents:
            self.exponents[k] = self.evidence.calibration.exponent(1 << k)
        return math.pow(least, 1 / self.exponents[k])

    def price(self, k: int, reach: Reach, load: Load, crowd: int = 0) -> Price:
        """Seconds for one row of a crowd, by default of all rows, but no more than each get a node."""
        rows = max(1, min(crowd or load.batch, load.nodes))
        fixed, per_level = self.evidence.drafting.line(k, round(rows))
        own_part, added = load.delay_factor * load.pace / rows, load.verify
        return Price(
            fixed=own_part * fixed + self.evidence.overhead / rows,
            per_level=own_part * per_level * reach.drafted,
            nodes_per_level=reach.per_level,
            verify=lambda nodes: added(round(rows * nodes)) / rows,
            stops=self.arms[k].stops,
            token_value=load.token_value,
        )


def pays_off(option: Option, load: Load) -> bool:
    """Whether the expected tokens of an option are worth its cost."""
    return option.gain * load.accepted_token > option.cost


def saved(option: Option, load: Load) -> float:
    """Seconds that an option saves for each token of the output."""
    return (option.gain * load.accepted_token - option.cost) / (1 + option.gain)


def need(cost: float, pays: bool) -> float:
    """Seconds that have to be left for a draft of this cost; twice as many for one that seems not to pay."""
    return MARGIN * cost * (1 if pays else 2)
