"""Steps whose forward has begun.  On a pipeline several are in flight, each of other rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.control import Controller
from outrider.control.auto import AutoController
from outrider.core.clock import working_time
from outrider.core.device import DeviceEvent
from outrider.core.step import Batch
from outrider.engine.runner import ForwardOutput


@dataclass(slots=True, eq=False)
class Flight:
    """A step whose forward has begun.

    complete: waits for the forward.  propose, forward, rest: its seconds so far, as in `Times`.
    drafted: reached when a device has drafted; None if its time is not asked for.
    """

    batch: Batch
    controller: Controller
    complete: Callable[[], ForwardOutput]
    propose: float = 0.0
    forward: float = 0.0
    rest: float = 0.0
    drafted: DeviceEvent | None = None

    def result(self) -> tuple[ForwardOutput, float]:
        """Wait for the drafters and the forward.  Returns its output, and the `working_time` at its end."""
        began = working_time()
        if self.drafted is not None:
            self.drafted.wait()
            drafted = working_time()
            self.propose += drafted - began
            began = drafted
        output = self.complete()
        ended = working_time()
        self.forward += ended - began
        return output, ended


def controller_of(
    batch: Batch, controllers: Sequence[AutoController], flights: Collection[Flight]
) -> AutoController:
    """The controller without a step in flight that had most rows of this batch before.

    A step is charged with its drafting and with the time that the driver waits for it.  So steps that are in
    flight together divide the time among them, and a longer one is charged with the difference.
    """
    flying = [flight.controller for flight in flights]
    free = [each for each in controllers if each not in flying]
    chosen, *others = sorted(free, key=lambda each: -each.shared(batch.rows))
    for other in others:
        other.release(batch.rows)
    return chosen


def report_of(controllers: Sequence[Controller]) -> dict[str, Any]:
    """The reports of the controllers of an engine as one.

    All have the same evidence.  Decisions of their own become lists, with an entry for each step in flight:
    `resting`, and the `outlook` of each drafter under the load of that controller's rows.
    """
    report, *others = reports = [controller.report() for controller in controllers]
    if others:
        report["resting"] = [each["resting"] for each in reports]
        for name, drafter in report["drafters"].items():
            drafter["outlook"] = [each["drafters"][name]["outlook"] for each in reports]
    return report
