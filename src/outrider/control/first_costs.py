"""What steps of a warm-up cost: the adaptive controller begins with it.

A trial of a drafter whose cost is unknown is short and beside few requests, and says little of what a deep
draft of many costs: most of the time of a draft on a device does not depend on its depth.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median_low

from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController
from outrider.control.plan import Load
from outrider.core.clock import Times, one_time, take_one_time
from outrider.core.step import Batch, Commit
from outrider.core.tree import Budget

LEAST = 2  # steps of a kind: the first one may find nothing in the caches


class FirstCosts(FixedController):
    """Drafts as the options say, and notes what steps took that had no one-time work.

    Steps with prompt tokens, and those of several drafters at once, tell nothing here.

    plain: rows -> (context, seconds, those of idle drafters) of each step.
    drafted: (drafter, rows, depth) -> seconds of its drafts.  began: one-time work before this step.
    """

    def __init__(self, limits: FixedController, evidence: Evidence) -> None:
        super().__init__(limits.options, limits.depth, limits.size, limits.vocabulary)
        self.evidence, self.began = evidence, (0, 0.0)
        self.plain = defaultdict[int, list[tuple[int, float, float]]](list)
        self.drafted = defaultdict[tuple[int, int, int], list[float]](list)
        self.verified = list[tuple[Load, int, float]]()

    def budget(self, batch: Batch) -> list[Budget]:
        self.began = one_time()
        return super().budget(batch)

    def learn(self, commit: Commit, times: Times) -> None:
        batch, load = commit.batch, Load.of(commit.batch, self.evidence.forward)
        if take_one_time(self.began) or not load.decodes_only:
            return
        nodes, depth = sum(len(step.tree.tokens) for step in batch), max(step.budget.depth for step in batch)
        seconds = times.forward + times.rest
        if nodes:
            self.verified.append((load, nodes, seconds))
            if (k := self._drafter(batch)) is not None:
                self.drafted[k, load.batch, depth].append(times.propose)
        elif not depth:
            self.plain[load.batch].append((load.context, seconds, times.propose))

    def _drafter(self, batch: Batch) -> int | None:
        """The only one that drafts in this step."""
        arms = self.evidence.arms
        names = {step.row.params.draft_method for step in batch}
        found = [k for k, arm in enumerate(arms) if names <= {*arm.sources} or len(arms) == 1]
        return found[0] if len(found) == 1 else None

    def teach(self) -> None:
        """Let the evidence have the costs."""
        forward, drafting = self.evidence.forward, self.evidence.drafting
        idle = dict[int, float]()
        for rows, steps in self.plain.items():
            if len(steps) >= LEAST:
                context, seconds, idle[rows] = map(median_low, zip(*steps))
                forward.learn_plain(rows, rows, int(context), seconds, len(steps))
        for load, nodes, seconds in self.verified:
            context = load.context + nodes * load.context // load.rows
            forward.learn_drafting(load.batch, load.rows + nodes, context, seconds)
        for (k, rows, depth), times in sorted(self.drafted.items()):
            if len(times) >= LEAST:
                own = max(0.0, median_low(times) - idle.get(rows, 0.0))
                drafting.learn(k, rows, depth, own / forward.pace(rows))
