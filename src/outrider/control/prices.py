"""What asking a drafter costs and gains for one row, beside a load."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.control import choose
from outrider.control.acceptance import Reach
from outrider.control.choose import Option, Price
from outrider.control.evidence import Evidence
from outrider.control.plan import Arm, Load, RowState

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

    def best(self, k: int, reach: Reach, z: float, load: Load, depth: int) -> Option:
        """The best depth, up to this one, beside a load, with estimates z standard deviations higher."""
        gains = reach.gains(z, depth)
        return choose.best_option(k, gains, self.price(k, reach, load), load.batch, load.decode)

    def hopeful(self, k: int, load: Load, most: int) -> bool:
        """Whether a drafter would pay if all its tokens were accepted."""
        key = k, min(most, self.arms[k].depth)
        if key not in self.hopes:
            price = self.price(k, self.evidence.reach[k], load)._replace(stops=False)
            best = choose.best_option(k, range(1, key[1] + 1), price, load.batch, load.decode)
            self.hopes[key] = math.isinf(best.cost) or DOUBT * best.gain * load.token > best.cost
        return self.hopes[key]

    def floor(self, state: RowState, option: Option, load: Load) -> float:
        """Confidence of a path behind which not even a sure token would pay."""
        k = option.drafter
        if not self.arms[k].stops:
            return 0.0
        reach = state.reach[k]
        price = self.price(k, reach, load)
        node = min(price.verify(1), price.verify(FLOOR_NODES) / FLOOR_NODES)
        least = min(MOST_FLOOR, load.rate * (price.per_level / reach.drafted + node))
        if k not in self.exponents:
            self.exponents[k] = self.evidence.calibration.exponent(1 << k)
        return math.pow(least, 1 / self.exponents[k])

    def price(self, k: int, reach: Reach, load: Load) -> Price:
        """Seconds for one row, if as many ask as lately, and no more than each get a node."""
        rows = max(1.0, min(self.evidence.asking[k] * load.batch, load.nodes))
        fixed, per_level = self.evidence.drafting.line(k, round(rows))
        share, overhead, added = load.pace / rows, self.evidence.overhead / rows, load.verify
        return Price(
            fixed=share * fixed + overhead,
            per_level=share * per_level * reach.drafted,
            nodes_per_level=reach.per_level,
            verify=lambda nodes: added(round(rows * nodes)) / rows,
            stops=self.arms[k].stops,
        )


def pays_off(option: Option, load: Load) -> bool:
    """Whether the expected tokens of an option are worth its cost."""
    return option.gain * load.token > option.cost


def saved(option: Option, load: Load) -> float:
    """Seconds that an option saves for each token of the output."""
    return (option.gain * load.token - option.cost) / (1 + option.gain)


def need(cost: float, pays: bool) -> float:
    """Seconds that have to be left for a draft of this cost; twice as many for one that seems not to pay."""
    return MARGIN * cost * (1 if pays else 2)
