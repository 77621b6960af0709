"""What recurrent layers read of a step: state slots, the last known token of each request, and replays.

A *state slot* holds the recurrent states of one request.  They are those after its last known token, so the
draft nodes of a step leave no trace in them.  The next forward *replays* the accepted nodes: it computes the
states after them from the inputs that the last forward kept, in front of its own rows.

    step 1     state ── t5 ●─ n0 ── n1          ● is saved; the inputs of n0, n1 and n2 are kept
                           └─ n2
    accepted   n0, n1; t8 is emitted
    step 2     state ── n0 ── n1 ── t8 ●─ …     n0 and n1 are replayed

A state after a replayed node or a known token may also be copied to another slot, as a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NO_COPIES: Mapping[int, int] = {}


class Replay(NamedTuple):
    """Accepted nodes of one request.

    kept:   their numbers among the draft nodes of the last forward
    copies: place in `kept` -> another slot that the state after that node is written to
    """

    slot: int
    kept: Sequence[int]
    copies: Mapping[int, int] = NO_COPIES


@dataclass(slots=True)
class RecurrentRows:
    """The requests of a step, in its order, and the replays of any requests.

    slots: [B], state slots
    last_known: [B], the row of the last known token; later rows of a request are draft nodes
    copies: row of a known token -> another slot that the state after it is written to
    """

    slots: list[int] = field(default_factory=list)
    last_known: list[int] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def add(self, slot: int, last_known: int) -> None:
        self.slots.append(slot)
        self.last_known.append(last_known)
