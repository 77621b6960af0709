"""The training loop, and checkpoints from which a run resumes bit for bit.

A step depends on the saved state and the step's number alone; where the rate follows the time, on that too.
The order of the texts is a function of seed and epoch, and the random numbers of a loss are seeded by the
place of the text.  So several processes take the steps of one, but for the order of sums.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError, first_line, writing
from outrider.train.base import Method
from outrider.train.features import Features
from outrider.train.optimizers import optimizers
from outrider.train.options import TrainOptions, differences
from outrider.train.processes import Processes
from outrider.train.schedule import Schedule

HOST_JOINED, JOINED = 2048, 16384  # tokens of padded texts that one call of a loss takes together
STATE = {"run", "network", "optimizers", "step", "losses", "records", "done", "seen"}  # of a checkpoint
SEEDS = 1 << 63  # that torch takes
LOGIT_BYTES = 1 << 30  # of their logits in float32; a loss holds several times as much


class _Item(NamedTuple):
    """A text of a step: its number, its length, the tokens of its answer, and the seed of its loss."""

    number: int
    length: int
    tokens: int
    seed: int


class Trainer:
    """State of a run.

    chosen: the texts to train on, by number.  data: hash of what the texts depend on.
    losses: of every step so far.  records: evaluations so far.
    seconds: by "features", "loss", "optimizer" and "evaluation", of this process.
    tokens: answer tokens of the steps of this process.  seen: of all steps so far.
    """

    def __init__(
        self,
        method: Method,
        features: Features[Any],
        chosen: Sequence[int],
        steps: int | None,
        data: str = "",
        processes: Processes = Processes(),  # noqa: B008 - it never changes
    ) -> None:
        """steps: None if the rate follows the time."""
        self.method, self.features, self.chosen, self.steps = method, features, chosen, steps
        self.schedule, self.epoch, self.order = Schedule(steps), -1, list[int]()
        self.data, self.processes = data, processes
        self.options: TrainOptions = method.options
        self.parameters = [p for p in method.network.parameters() if p.requires_grad]
        options = self.options
        self.optimizers = optimizers(
            method.network, len(method.outer.lm_head), options.optimizer, method.rate, options.weight_decay
        )
        self.device = features.model.device
        self.step, self.losses = 0, list[float]()
        self.records: list[dict[str, Any]] = []
        self.seconds, self.tokens, self.seen = defaultdict[str, float](float), 0, 0

    @property
    def done(self) -> float:
        """The share of the run that is done, the same in all processes: the first one's clock counts."""
        done = self.schedule.done(self.step)
        if self.steps is not None:
            return done
        return self.processes.total(done if self.processes.first else 0.0)

    def advance(self) -> float:
        """One optimizer step; returns the loss per counted place."""
        self.method.network.train()
        rate = self.method.rate * self.schedule.factor(self.step, self.done, self.options.warmup)
        first = self.step * self.options.batch
        batch = [self._item(place) for place in range(first, first + self.options.batch)]
        tokens = sum(item.tokens for item in batch)
        losses = [self._backward(group, tokens) for group in self._groups(batch)]
        with self._timed("loss"):  # the only wait for a device
            total = self.processes.total(math.fsum(torch.stack(losses).tolist()) if losses else 0.0)
        self.processes.sum_gradients(self.parameters)
        if not math.isfinite(total):
            raise ConfigError(f"the loss is {total} at step {self.step + 1}: take a smaller rate.")
        self._optimize(rate)
        self.step += 1
        self.tokens, self.seen = self.tokens + tokens, self.seen + tokens
        self.losses.append(total)
        return total

    def _item(self, place: int) -> _Item:
        number = self._text(place)
        text, seed = self.features.texts[number], 1_000_003 * self.options.seed + place
        return _Item(number, len(text.ids), len(text.ids) - text.prompt, seed)

    def _groups(self, batch: Sequence[_Item]) -> list[list[_Item]]:
        """This process's part of the batch, in groups that one call of the loss takes.

        Texts of similar lengths are together, since attention pads them to the longest.
        """
        own = [batch[i] for i in self.processes.part(range(len(batch)))]
        most_tokens = HOST_JOINED if self.device.type == "cpu" else JOINED
        most_rows = LOGIT_BYTES // (4 * self.method.target.vocabulary)
        groups: list[list[_Item]] = []
        longest = 0  # text of the last group, its first
        for item in sorted(own, key=lambda item: -item.length):
            count = len(groups[-1]) + 1 if groups else 0
            full = count * longest > most_tokens or count * self.method.logit_rows(longest) > most_rows
            if not groups or full or not self.method.joins:
                groups.append([])
                longest = item.length
            groups[-1].append(item)
        return groups

    def _backward(self, group: Sequence[_Item], batch_tokens: int) -> Tensor:
        """Add the gradients of some texts.  Returns their part of the loss, without a wait for the device."""
        torch.manual_seed(group[0].seed % SEEDS)
        with self._timed("features"):
            numbers = [item.number for item in group]
            sample = self.features.sample(*numbers, seeds=[item.seed for item in group])
        with self._timed("loss"):
            with self._autocast():
                loss = self.method.loss(sample) * (sum(item.tokens for item in group) / batch_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _optimize(self, rate: float) -> None:
        """Change the weights by their gradients, and clear these."""
        with self._timed("optimizer"):
            nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def held_loss(self, texts: Sequence[int]) -> float:
        """Mean loss of held-out texts."""
        torch.manual_seed(self.options.seed % SEEDS)
        self.method.network.eval()
        with self._autocast():
            return sum(float(self.method.loss(self.features.sample(i))) for i in texts) / len(texts)

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it."""
        path = self.options.work / "checkpoint.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "run": self._identity(),
            "network": self.method.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "losses": self.losses,
            "records": self.records,
            "done": self.schedule.done(self.step),
            "seen": self.seen,
        }
        with writing(path, RuntimeError), path.with_suffix(".tmp").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)

    def load(self) -> bool:
        """Resume from the checkpoint, if there is one.  Raises ConfigError if it is of another run."""
        if (state := read_checkpoint(self.options, self.device)) is None:
            return False
        check_same_run(self.options, state["run"], self._identity())
        # the states of optimizers are in this order
        same = list(state["network"]) == list(self.method.network.state_dict())
        if not same:
            raise _other_version(self.options)
        self.method.network.load_state_dict(state["network"])
        for optimizer, its in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(its)
        self.step, self.losses, self.records = state["step"], state["losses"], state["records"]
        self.schedule.earlier, self.seen = state["done"], state["seen"]
        return True

    def _identity(self) -> dict[str, Any]:
        """All that the weights depend on."""
        return {**identity(self.method), "data": self.data, "steps": self.steps}

    def _text(self, place: int) -> int:
        """The text at a place of the endless sequence of epochs."""
        epoch, i = divmod(place, len(self.chosen))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(self.chosen)
            random.Random(f"{self.options.seed} {epoch}").shuffle(self.order)
        return self.order[i]

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began


def read_checkpoint(options: TrainOptions, device: Any = "cpu", mmap: bool = False) -> dict[str, Any] | None:
    """The checkpoint in `options.work`; None without one.  mmap: tensors are read when they are used.

    Raises ConfigError if it is damaged.
    """
    path = options.work / "checkpoint.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise ConfigError(
            f"the checkpoint {str(path)!r} cannot be read ({first_line(error)}): remove it to begin anew."
        ) from error
    if not isinstance(state, dict) or not state.keys() >= STATE:
        raise _other_version(options)
    return state


def _other_version(options: TrainOptions) -> ConfigError:
    return ConfigError(
        f"{options.out!r} holds a run of another version of this method: give another folder as out."
    )


def identity(method: Method) -> dict[str, Any]:
    """All that the weights depend on, as far as it is known without the texts."""
    options: TrainOptions = method.options
    target = method.target.checkpoint.fingerprint
    known = {"method": type(method).__module__, "target": target}
    return {**options.decisive, **known}


def check_same_run(options: TrainOptions, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names what differs, unless the run in `out` was begun with these values."""
    changed = differences(before, now)
    if "method" in changed:
        own = str(before.get("method")).rpartition(".")[2]
        raise ConfigError(f"{options.out!r} holds a run of the method {own!r}: give another folder as out.")
    if changed:
        raise ConfigError(
            f"{options.out!r} holds a run with other values of {', '.join(changed)}: give the same, or "
            "another folder as out."
        )
