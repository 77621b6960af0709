"""Training of a head or draft model on the target's outputs, between the steps of the engine.

    observe   the states of the step's tokens, and whether drafts were accepted
    train     one unit of work, if time was earned: forward and backward of one text, or its loss for judging
    taken     the time spent, which is not the step's
    charged   a step's times, with the time earned for training

Time is earned in every step, `share` of the whole, and spent in units that are longer than a step.  Counting
it as earned spreads the cost evenly, so that an adaptive controller sees it in every step's drafting time.

Weights change between steps only:

    candidate ── more tokens of held-out texts right ──▶ in use ── fewer accepted than before ──▶ the old ones
        └─────── nor a lower loss, 4 times ──▶ a rest, until further texts were seen

Match verification makes the text independent of the drafts, so none of this changes an output.  An error in
training ends it: the engine goes on drafting with the weights in use.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import torch

from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import FINAL, Commit, Needs
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError, first_line
from outrider.online.candidate import Candidate, Weights
from outrider.online.judging import Acceptance, Drafted, Judgement, Score, Trial
from outrider.online.options import Online
from outrider.online.store import Store, hashed
from outrider.online.texts import Text, Texts, teaches

ROUND = 32  # texts, each a step of the optimizer, between two judgements
FIRST, HELD = 8, 4  # texts to begin with, for training and for judging
MISSES = 4  # judgements in a row without a better candidate, before a rest
DRAFTS = 200  # at the first look at new weights
HISTORY, SHOWN = 50, 10  # entries of the statistics; judgements in the report
PAUSE = 0.2  # seconds between two reports, at least
log = logging.getLogger("outrider")


class Learner:
    """Trains a copy of a drafter's weights, and gives them to it when they are better.

    swaps, returns: times that weights were taken into use, and that the old ones came back.
    stopped: after an error, which was logged.
    """

    def __init__(self, drafter: Drafter, options: Online, owner: object = None) -> None:
        """owner: the engine.  Raises ConfigError for a drafter, device or folder that cannot be used."""
        self.drafter, self.options, self.stopped = drafter, options, False
        target = drafter.target
        if (device := target.decoder.device).type != "cpu":
            raise ConfigError(
                f"online: drafters learn on a CPU, and the model is on {str(device)!r}: leave online out, or "
                "load the model with device='cpu'."
            )
        self.candidate = Candidate(drafter, options.rate)
        self.texts = Texts(sorted({*drafter.needs.states, FINAL}))
        drafter.needs |= Needs(states=(FINAL,))
        self.in_use = self.candidate.weights()
        self.store = Store(options.path, target.checkpoint.fingerprint or "", hashed(self.in_use), owner)
        self.swaps = self.returns = self.steps = 0
        self.history: list[dict[str, Any]] = []
        self.judgements: list[Judgement] = []
        self.known = dict[Text, Score]()  # of the weights in use
        self.random, self.units = random.Random(0), 0
        self.misses = self.setbacks = self.rest = 0
        self.now = Acceptance()  # of whole requests: later tokens of a text are easier
        self.drafted: dict[Row, Drafted] = {}
        self.old: Weights | None = None  # while new weights are on trial
        self.trial = Trial(Acceptance(), DRAFTS)
        self.earned = self.spent = 0.0  # seconds left to spend; spent by the last `train`
        self.worked_seconds = self.trained_seconds = 0.0
        self.reported = 0.0  # time of the last report
        self.fault = self.why = ""  # that it stopped, that it rests
        self._resume()
        self._begin()

    def _resume(self) -> None:
        if (found := self.store.load()) is None:
            return
        self.in_use, about = found
        self.swaps, self.returns = about["swaps"], about["returns"]
        self.steps, self.history = about["steps"], about["history"]
        self.texts.count, self.texts.tokens = about["texts"], about["tokens"]
        self.drafter.adopt(self.in_use)

    def _begin(self) -> None:
        """Start training from the weights in use."""
        self.candidate.begin(self.in_use)
        self.work, self.misses = self._rounds(), 0

    # ---- in a step

    @property
    def active(self) -> bool:
        enough = len(self.texts.kept) >= FIRST and len(self.texts.held) >= HELD
        return enough and self.texts.count >= self.rest and not self.stopped

    def train(self) -> None:
        """Before a step drafts: one unit of work, if enough time was earned.

        An error is logged and ends learning.  An interrupt is raised, and learning goes on afterwards.
        """
        began = time.perf_counter()
        try:
            self._conclude()
            if self.active and self.earned > 0:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self.units)
                    next(self.work)
                self.units += 1
        except Exception as error:
            log.exception("online: learning stops, and the weights in use stay")
            self.fault = first_line(error)
            self._stop()
        except BaseException:  # it has closed the generator
            self._begin()
            raise
        finally:
            self.spent = time.perf_counter() - began

    def _stop(self) -> None:
        """Train no more, and free what only training needs."""
        self.stopped, self.old = True, None
        self.work.close()
        self.candidate.end()
        self.known.clear()
        self.drafted.clear()
        self.texts.drop()

    def observe(self, commit: Commit) -> None:
        if self.stopped:
            return
        self.texts.observe(commit)
        for step in commit.batch:
            row = step.row
            if teaches(row) and not row.guided and step.emitted and step.tree.size:
                drafted = self.drafted.setdefault(row, Drafted(self.swaps + self.returns))
                drafted.drafts += 1
                drafted.accepted += bool(step.accepted)

    def forget(self, row: Row) -> None:
        self.texts.close(row)
        drafted = self.drafted.pop(row, None)
        if drafted is not None and drafted.weights == self.swaps + self.returns:
            self.now.add(drafted.drafts, drafted.accepted)
        if not self.texts.records:  # no request is left
            self._report()

    def taken(self) -> float:
        """Seconds of the last `train`, which are then paid."""
        spent, self.spent = self.spent, 0.0
        self.earned -= spent
        self.trained_seconds += spent
        return spent

    def charged(self, times: Times) -> Times:
        """The times of a step without training, with what it earns for training as drafting."""
        share = self.options.share
        earned = share / (1 - share) * sum(times) if self.active else 0.0
        self.earned += earned
        self.worked_seconds += sum(times)
        return times._replace(propose=times.propose + earned)

    # ---- units of work

    def _rounds(self) -> Generator[None]:
        while True:
            for _ in range(ROUND):
                self.candidate.learn(self.texts, self.random.choice(self.texts.kept))
                self.steps += 1
                yield
            yield from self._judge()

    def _judge(self) -> Generator[None]:
        """Compare the candidate with the weights in use on held-out texts, and act on it."""
        held, scores = list(self.texts.held), list[Score]()
        for text in held:
            scores.append(self.candidate.score(self.candidate.mean, self.texts, text))
            yield
            if text not in self.known:
                self.known[text] = self.candidate.score(self.in_use, self.texts, text)
                yield
        in_use = [self.known[text] for text in held]
        self.known = dict(zip(held, in_use))
        found = Judgement.of(self.texts.count, self.steps, scores, in_use)
        self.judgements = [*self.judgements, found][-SHOWN:]
        log.info("online: %s", found)
        if found.better and self.old is None:
            self._swap({name: tensor.clone() for name, tensor in self.candidate.mean.items()})
        elif not found.finite:
            self.candidate.begin(self.in_use)
        elif not found.better and not found.learning:
            self._miss()
        self._report()
        yield  # the work may be that of another candidate now

    def _miss(self) -> None:
        """Go on with a candidate that does not get better, or begin anew, after a rest."""
        self.misses += 1
        if self.misses >= MISSES and self.old is None:
            self._set_back("no candidate was better")

    def _swap(self, weights: Weights) -> None:
        """Take new weights into use, on trial."""
        self.drafter.adopt(weights)
        if self.now.drafts:
            self._note()
        self.old, self.in_use, self.swaps, self.misses = self.in_use, weights, self.swaps + 1, 0
        self.trial, self.now = Trial(self.now, DRAFTS), Acceptance()
        self.known.clear()
        self._save()

    def _conclude(self) -> None:
        """At a look at new weights on trial: the old ones come back if acceptance fell."""
        old = self.old
        if old is None or (fallen := self.trial.fallen(self.now)) is None:
            return
        self.old = None
        if not fallen:
            self.setbacks = 0
            return
        self.drafter.adopt(old)
        log.info("online: acceptance fell from %.3f to %.3f", self.trial.before.share, self.now.share)
        self._note()
        self.in_use, self.returns, self.now = old, self.returns + 1, Acceptance()
        self.known.clear()
        self._set_back("acceptance fell")
        self._save()

    def _set_back(self, why: str) -> None:
        """Begin anew with the weights in use, after further texts: twice as many each time."""
        self.why, self.setbacks = why, self.setbacks + 1
        self.rest = self.texts.count + FIRST * 2 ** min(self.setbacks, 10)
        self._begin()

    # ---- what is stored

    def _save(self) -> None:
        about = {"swaps": self.swaps, "returns": self.returns, "steps": self.steps, "history": self.history}
        about |= {"texts": self.texts.count, "tokens": self.texts.tokens}
        try:
            self.store.save(self.candidate.trained.config, self.in_use, about)
        except OSError as error:
            log.warning("online: the weights in use were not stored: %s", error)

    def _note(self) -> None:
        """Add the acceptance of the weights in use to the statistics."""
        entry = {"swaps": self.swaps, "drafts": self.now.drafts, "accepted": round(self.now.share, 4)}
        self.history = [*self.history, {**entry, "tokens": self.texts.tokens}][-HISTORY:]

    def _report(self) -> None:
        if time.perf_counter() - self.reported >= PAUSE:
            self.store.report(report(self))
            self.reported = time.perf_counter()


def report(learner: Learner) -> dict[str, Any]:
    """What was seen and learned, and why no further weights were taken into use, of this process."""
    texts, now, total = learner.texts, learner.now, learner.worked_seconds + learner.trained_seconds
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": state(learner),
        "seen": {"texts": texts.count, "tokens": texts.tokens, "short": texts.short, "apart": texts.apart},
        "trained": {"texts": learner.steps, "rate": learner.candidate.rate},
        "share": {
            "allowed": learner.options.share,
            "used": round(learner.trained_seconds / max(total, 1e-9), 4),
        },
        "weights": {"taken": learner.swaps, "taken_back": learner.returns},
        "acceptance": [
            *learner.history,
            {"swaps": learner.swaps, "drafts": now.drafts, "accepted": round(now.share, 4)},
        ],
        "judgements": [each.about() for each in learner.judgements],
    }


def state(learner: Learner) -> str:
    """What happens at present, and what it waits for."""
    texts, kept, held = learner.texts, len(learner.texts.kept), len(learner.texts.held)
    if learner.stopped:
        return f"stopped by an error: {learner.fault}"
    if texts.count < learner.rest:
        return f"resting until {learner.rest} texts were seen: {learner.why}"
    if not learner.active:
        return f"collecting texts: {kept} of {FIRST} to train on, {held} of {HELD} held out"
    if learner.old is not None:
        before = learner.trial.before.share
        return (
            f"new weights on trial: {learner.now.drafts} of {learner.trial.look} drafts, "
            f"{learner.now.share:.3f} accepted, {before:.3f} before"
        )
    ahead = ROUND - learner.candidate.steps % ROUND
    return f"training: {ahead} texts before the next judgement"
