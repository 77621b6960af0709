"""Training of a head or draft model on the target's outputs, between the steps of the engine.

    observe   the states of the step's tokens, and whether drafts were accepted
    train     one unit of work, if time was earned: forward and backward of one text, or its loss for judging
    taken     the time spent, which is not the step's
    charged   a step's times, with the time earned for training

Time is earned in every step, `share` of the whole, and spent in units that are longer than a step.  Counting
it as earned spreads the cost evenly, so that an adaptive controller sees it in every step's drafting time.

Weights change between steps only:

    candidate ── lower loss on held-out texts ──▶ in use ── fewer drafts accepted than before ──▶ the old ones

Match verification makes the text independent of the drafts, so none of this changes an output.  An error in
training ends it: the engine goes on drafting with the weights in use.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.clock import Times
from outrider.core.row import Row
from outrider.core.step import FINAL, Commit, Needs
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError
from outrider.heads.sample import TargetWeights
from outrider.online.networks import Trainable
from outrider.online.options import Online
from outrider.online.store import Store, hashed
from outrider.online.texts import Text, Texts, teaches

BATCH, ROUND = 4, 8  # texts of an optimizer step, optimizer steps between two judgements
FIRST, HELD = 8, 2  # texts to begin with, for training and for judging
DRAFTS = 200  # that decide whether new weights stay
SIGMAS = 2.0  # by which acceptance must fall
BETAS, CLIP, BASE_RATE, MOST_RATE = (0.9, 0.95), 1.0, 3e-5 * 4096, 1e-3
HISTORY = 50  # entries of the statistics
log = logging.getLogger("outrider")
Weights = dict[str, Tensor]


@dataclass
class Acceptance:
    """Drafts, and those whose first token was accepted."""

    drafts: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.drafts)

    def fell_since(self, before: Acceptance) -> bool:
        """Whether it is lower by more than chance explains."""
        if not before.drafts or not self.drafts:
            return False
        mean = (self.accepted + before.accepted) / (self.drafts + before.drafts)
        spread = math.sqrt(mean * (1 - mean) * (1 / self.drafts + 1 / before.drafts))
        return before.share - self.share > SIGMAS * spread


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
        self.trained = Trainable.of(drafter)
        self.network = self.trained.network
        self.outer = TargetWeights.of(target.decoder)
        self.texts = Texts(sorted({*drafter.needs.states, FINAL}))
        drafter.needs |= Needs(states=(FINAL,))
        self.in_use = self._copy()
        self.store = Store(options.path, target.checkpoint.fingerprint or "", hashed(self.in_use), owner)
        self.swaps = self.returns = self.steps = 0
        self.history: list[dict[str, Any]] = []
        self.rate = options.rate or min(MOST_RATE, BASE_RATE / target.decoder.spec.hidden)
        self.random, self.units, self.rest = random.Random(0), 0, 0
        self.now, self.before = Acceptance(), Acceptance()
        self.old: Weights | None = None  # while new weights are on trial
        self.earned = self.spent = 0.0  # seconds left to spend; spent by the last `train`
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
        self._reset()
        self.work = self._rounds()

    def _reset(self) -> None:
        self.network.load_state_dict(self.in_use)
        self.network.zero_grad(set_to_none=True)
        self.adam = torch.optim.AdamW(self.network.parameters(), lr=self.rate, betas=BETAS, weight_decay=0.0)

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
            if self.old is not None and self.now.drafts >= DRAFTS:
                self._conclude()
            if self.active and self.earned > 0:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self.units)
                    next(self.work)
                self.units += 1
        except Exception:
            log.exception("online: learning stops, and the weights in use stay")
            self._stop()
        except BaseException:  # it has closed the generator
            self._begin()
            raise
        finally:
            self.spent = time.perf_counter() - began

    def _stop(self) -> None:
        """Train no more, and free what only training needs."""
        self.stopped, self.old = True, None
        self.network.zero_grad(set_to_none=True)
        self.work.close()
        self.adam.state.clear()
        self.texts = Texts(self.texts.wanted)

    def observe(self, commit: Commit) -> None:
        if self.stopped:
            return
        self.texts.observe(commit)
        for step in commit.batch:
            row = step.row
            if teaches(row) and not row.guided and step.emitted and step.tree.size:
                self.now.drafts += 1
                self.now.accepted += bool(step.accepted)

    def forget(self, row: Row) -> None:
        self.texts.close(row)

    def taken(self) -> float:
        """Seconds of the last `train`, which are then paid."""
        spent, self.spent = self.spent, 0.0
        self.earned -= spent
        return spent

    def charged(self, times: Times) -> Times:
        """The times of a step without training, with what it earns for training as drafting."""
        share = self.options.share
        earned = share / (1 - share) * sum(times) if self.active else 0.0
        self.earned += earned
        return times._replace(propose=times.propose + earned)

    # ---- units of work

    def _rounds(self) -> Generator[None]:
        while True:
            for _ in range(ROUND):
                for _ in range(BATCH):
                    self.network.train()
                    text = self.random.choice(self.texts.kept)
                    (self._loss(text) / BATCH).backward()  # type: ignore[no-untyped-call]
                    yield
                nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
                self.adam.step()
                self.adam.zero_grad(set_to_none=True)
                self.steps += 1
            yield from self._judge()

    def _judge(self) -> Generator[None]:
        """Compare the candidate with the weights in use on held-out texts."""
        held, candidate, means = list(self.texts.held), self._copy(), []
        for weights in (candidate, self.in_use):
            losses = []
            for text in held:
                self.network.load_state_dict(weights)
                self.network.eval()
                with torch.no_grad():
                    losses.append(float(self._loss(text)))
                yield
            means.append(sum(losses) / len(losses))
        self.network.load_state_dict(candidate)
        if not math.isfinite(means[0]):
            self._reset()
        elif means[0] < means[1] and self.old is None:
            self._swap(candidate)

    def _loss(self, text: Text) -> Tensor:
        sample = self.texts.sample(text, self.outer.logits)
        return self.trained.loss(sample, self.outer)

    def _swap(self, candidate: Weights) -> None:
        """Take the candidate into use, on trial."""
        self.drafter.adopt(candidate)
        if self.now.drafts:
            self._note()
        self.old, self.in_use, self.swaps = self.in_use, candidate, self.swaps + 1
        self.before, self.now = self.now, Acceptance()
        self._save()

    def _conclude(self) -> None:
        """End the trial of new weights: they stay unless acceptance fell."""
        old = self.old
        if old is None or not self.now.fell_since(self.before):
            self.old = None
            return
        self.drafter.adopt(old)
        log.info("online: acceptance fell from %.3f to %.3f", self.before.share, self.now.share)
        self._note()
        self.in_use, self.old, self.returns, self.now = old, None, self.returns + 1, Acceptance()
        self.rest = self.texts.count + FIRST * 2 ** min(self.returns, 10)  # back off: that many further texts
        self._begin()
        self._save()

    def _save(self) -> None:
        about = {"swaps": self.swaps, "returns": self.returns, "steps": self.steps, "history": self.history}
        about |= {"texts": self.texts.count, "tokens": self.texts.tokens}
        try:
            self.store.save(self.trained.config, self.in_use, about)
        except OSError as error:
            log.warning("online: the weights in use were not stored: %s", error)

    def _note(self) -> None:
        """Add the acceptance of the weights in use to the statistics."""
        entry = {"swaps": self.swaps, "drafts": self.now.drafts, "accepted": round(self.now.share, 4)}
        self.history = [*self.history, {**entry, "tokens": self.texts.tokens}][-HISTORY:]

    def _copy(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}
