"""What a drafter is.  docs/add-a-drafter.md walks through one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from outrider.cache.pages import Cache
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.checkpoints.hub import Checkpoint
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import Budget, Draft, DraftTree
from outrider.errors import ConfigError
from outrider.models.base import Model
from outrider.sampling.sampler import Sampler


@dataclass(frozen=True)
class Target:
    """What a drafter may know of the model that it rides ahead of."""

    decoder: Model
    checkpoint: Checkpoint
    sampler: Sampler
    vocabulary: int
    max_len: int
    methods_of: Callable[[Head], Sequence[str]] = lambda head: ()  # methods that a file's tensors name


def refuse_idle(options: Any, on: bool, switch: str, *names: str) -> None:
    """Raises ConfigError where one of these options is set although what it is about is not `on`."""
    for name in names:
        if not on and getattr(options, name) != getattr(type(options), name):
            raise ConfigError(
                f"{name} = {getattr(options, name)!r} has no effect without {switch}: set that too, or leave it out."
            )


def refuse_parallel(size: Any) -> None:
    """vLLM's draft_tensor_parallel_size, which its users write.  Raises ConfigError for more than one device."""
    if size != 1:
        raise ConfigError(f"draft_tensor_parallel_size must be 1, got {size!r}: one device runs the draft.")


class Drafter:
    """Guesses what the target will say.  Guesses can be arbitrarily bad: they cost time, never a token.

    A subclass is one file in this folder.  Class attributes: `Options`, a frozen dataclass whose fields are the method's
    keys in speculative_config; `depth`, the default of num_speculative_tokens.
    """

    Options: ClassVar[type[Any]]
    depth: int = 5
    demo: ClassVar[
        Mapping[str, Mapping[str, Any]]
    ] = {}  # label -> keys: what `outrider demo` shows on the built-in pair
    needs: Needs = Needs()
    memory: Any = (
        None  # what it keeps from request to request: a measurement puts it back before it repeats a prompt
    )
    drawn: bool = False  # the verification rule judges guesses by the laws they were drawn from: draw them, and say those (see Guesses)
    stream_id: int = 0  # added to the numbers of the nodes that it draws: several drafters of one tree must not share their dice
    slot_bytes: int = 0  # K/V that the drafter keeps for every slot of the target's cache
    caches: Sequence[
        Cache
    ] = ()  # allocators of its own, after `allocate`, where its K/V does not lie at the target's slots

    def __init__(self, options: Any, target: Target) -> None:
        self.options, self.target = options, target

    @classmethod
    def create(cls, options: Any, target: Target) -> Drafter:
        """The drafter for these options: this class, unless a method has several."""
        return cls(options, target)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A tiny, possibly random drafter for `target`: the exactness suite runs every method through it."""
        return cls(cls.Options(), target)

    @classmethod
    def claims(cls, head: Head) -> int:
        """Whether a file is for this method: 2 its tensors say so, 1 its config does, 0 no.  For speculative_config without a method."""
        return 0

    @classmethod
    def check(cls, head: Head) -> None:
        """Raises ModelError for a file of this method that no target can use: its config and the names in it are looked at."""

    def draft_by_sampling(self, on: bool) -> None:
        """Called once, by the engine: whether the verification rule judges draft tokens by the q they were sampled from."""
        self.drawn = on

    def draws(self, row: Row) -> bool:
        """Whether guesses for this row should be drawn, and say from what; a greedy law leaves nothing to draw."""
        return self.drawn and row.distribution.temperature > 0

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        """`slot_bytes`, by the device where they lie; `device` is the target's."""
        return Counter({device: self.slot_bytes})

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        """Called once, when the number of slots is known.  Returns the drafter's own pools, at the slots of `pool`, the target's."""
        return []

    def size(self, depth: int) -> int:
        """How many nodes a tree of `depth` levels has at most."""
        return depth

    def propose(self, batch: Batch) -> Draft:
        """One tree a row, within its budget.  Node i of a row may use slot row.table.slots[step.end + i] in this step."""
        raise NotImplementedError

    def after(self, row: Row, said: Sequence[int], budget: Budget) -> DraftTree:
        """Guesses behind `said`, which the row has not said yet and may never say: nothing of it is kept.  For a drafter that guesses
        from the text alone, so that it can speed up another one."""
        raise NotImplementedError

    def observe(self, commit: Commit) -> None:
        """Learns what became certain."""

    def forget(self, row: Row, reason: str) -> None:
        """The row ended ("finished") or lost its cache ("preempted"): drop what is kept for it."""

    def filled(self, row: Row) -> int:
        """How many of the row's positions have all the K/V that this drafter needs; such pages can be shared."""
        return row.computed
