"""The interface of a drafter.  docs/add-a-drafter.md walks through one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.cache.pages import Cache
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.checkpoints.hub import Checkpoint
from outrider.control.plan import Arm
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, Needs
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.models.base import Model
from outrider.sampling.sampler import Sampler

DEPTHS = {"num_speculative_tokens": (2, 3, 4, 6, 8)}  # that `outrider tune` tries
CPU_NODES = 7  # of a tree by default: with its root the 8 rows that kernels of a CPU multiply at once


@dataclass(frozen=True)
class Target:
    """Properties of the target and of the verification rule that a drafter may use."""

    decoder: Model
    checkpoint: Checkpoint
    sampler: Sampler
    vocabulary: int
    max_len: int
    # The methods that the tensors of a file name.
    methods_of: Callable[[Head], Sequence[str]] = lambda head: ()
    # Whether the verification rule compares p with the distribution q that a draft token was sampled from.
    needs_probs: bool = False
    # The rule's name in backends, which may have a kernel for it; "" for none.
    kernel: str = ""
    # Tokens that a drafter's forward computes at most, beside draft tokens.
    max_num_batched_tokens: int = 2048
    # Whether the controller chooses by the confidence of nodes.
    adaptive: bool = False
    # Offset of the random streams of sampled nodes.  Drafters that share a tree must not share streams.
    stream_id: int = 0

    def nodes(self, asked: int | None, published: int) -> int:
        """Maximum size of a tree: the option's value, or the method's published one, or CPU_NODES."""
        return asked or (CPU_NODES if self.on_cpu else published)

    @cached_property
    def probs_width(self) -> int:
        """Probabilities of a distribution q; 0 if the rule reads none."""
        return self.vocabulary if self.needs_probs else 0

    def probs_device(self, draft: torch.device) -> torch.device:
        """Where to keep distributions q that a model on the device `draft` samples from.

        That device, if the target is there and has a kernel of the verification rule; else the CPU.
        """
        verifier = self.decoder.backend.verifier
        kernels = verifier is not None and self.kernel in verifier.rules
        return draft if kernels and draft == self.decoder.device else torch.device("cpu")

    @property
    def on_cpu(self) -> bool:
        """Whether the target computes on a CPU."""
        return self.decoder.device.type == "cpu"


class Storage(NamedTuple):
    """K/V storage of a drafter.

    pools: at the target's slots.  caches: page allocators of other slots, for a drafter whose tokens are not
    the target's.
    """

    pools: Sequence[Pool] = ()
    caches: Sequence[Cache] = ()


class Drafter:
    """Proposes draft tokens.  Bad ones cost time and never change the output.

    A subclass is one file in `outrider/draft`.  `Options` is a frozen dataclass; its fields are the method's
    keys in speculative_config.  `depth` is the default of num_speculative_tokens.  `demo` maps labels to keys
    of speculative_config that `outrider demo` runs with the built-in models.  `tunable`: values of keys that
    `outrider tune` tries beside the defaults.  `adaptive`: default of the key of that name.
    `computes_prompts`: it computes prompts with a model of its own, and may skip those of rows that leave it
    out.  `sees_plain`: `observe` does something in steps in which it has drafted nothing.
    `heeds_floors`: it ends a draft at the floor of its budget.  `memory` holds what outlives a request: a
    benchmark copies it and restores it before it repeats a prompt.  Texts of requests with a cache_salt do
    not belong into it, but into a `SaltedMemory` (drafting/salts.py).

    Only one method sets `adaptive`, `computes_prompts`, `heeds_floors` or `grade` so far.  They are here
    because controllers and mixes read them of any drafter, and must not name a method.
    """

    Options: ClassVar[type[Any]]
    demo: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    tunable: ClassVar[Mapping[str, Sequence[Any]]] = {}
    adaptive: ClassVar[bool] = False
    computes_prompts: ClassVar[bool] = False
    sees_plain: bool = True
    heeds_floors: bool = False
    depth: int = 5
    needs: Needs = Needs()
    memory: Any = None

    def __init__(self, options: Any, target: Target) -> None:
        self.options, self.target = options, target

    @property
    def sources(self) -> Sequence[str]:
        """Names of the methods that draft: its own, or those of the drafters that it mixes."""
        return (type(self).__module__.removeprefix("outrider.draft.").split(".")[0],)

    @classmethod
    def create(cls, options: Any, target: Target) -> Drafter:
        """Return the drafter for these options: of this class, unless a method has several classes."""
        return cls(options, target)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Return a tiny, possibly random drafter.  The exactness tests run every method through it."""
        return cls(cls.Options(), target)

    def samples(self, row: Row) -> bool:
        """Whether draft tokens of this row should be sampled from q, and q be kept: not of greedy rows."""
        return self.target.needs_probs and row.distribution.temperature > 0

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        """Bytes of K/V for every slot of the target's cache, by device.  `device` is the target's."""
        return Counter()

    def state_bytes(self, device: torch.device) -> Counter[torch.device]:
        """Bytes of recurrent states for every request, by device.  `device` is the target's."""
        return Counter()

    def allocate(self, slots: int, pool: Pool) -> Storage:
        """Allocate K/V storage for `slots` slots.  Called once.  `pool` is the target's."""
        return Storage()

    def reserve_states(self, rows: int) -> None:
        """Allocate the recurrent states of so many requests, after `allocate`."""

    def arms(self, depth: int) -> list[Arm]:
        """What an adaptive controller chooses from, with trees of this depth at most."""
        arm = Arm(
            self.sources,
            depth,
            self.size,
            prefills=self.computes_prompts,
            behind=self.behind,
            grade=self.grade,
            stops=self.heeds_floors,
            grades=type(self).grade is not Drafter.grade,
        )
        return [arm]

    def size(self, depth: int) -> int:
        """Maximum number of nodes in a tree of this depth."""
        return depth

    def propose(self, batch: Batch) -> Draft:
        """Return one tree a row, within its budget.  Node i may use slot row.table.slots[step.end + i]."""
        raise NotImplementedError

    def observe(self, commit: Commit) -> None:
        """Take in the tokens that the step committed."""

    def forget(self, row: Row, reason: str) -> None:
        """Drop the state of a row that ended ("finished") or lost its cache ("preempted")."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights from the next step on.  tensors: as in the published file, on the CPU.

        What is known of rows stays, K/V of the old weights too: it only affects which tokens are drafted.
        """
        raise NotImplementedError

    def behind(self, row: Row) -> int:
        """Number of computed tokens of a row that this drafter has to compute before it can draft."""
        return 0

    def grade(self, row: Row) -> int:
        """Grade of the evidence for the next draft of a row, 0 for none.  Acceptance is learned by grade."""
        return 0

    def filled(self, row: Row) -> int:
        """Number of leading positions whose K/V this drafter has computed.  Pages below it may be shared."""
        return row.computed


class TextDrafter(Drafter):
    """A drafter that proposes from the text alone.  A draft model can use one to speed itself up.

    automatic: joined to every other method, for `guided` rows.
    certain: its text is certain to follow, so that other drafters may continue after it.
    """

    automatic: ClassVar[bool] = False
    certain: ClassVar[bool] = False

    def after(self, row: Row, ahead: Sequence[int], budget: Budget) -> DraftTree:
        """Return draft tokens after those of the row and `ahead`.

        `ahead` is itself a draft that may never be emitted, so the drafter must not learn from it.
        """
        raise NotImplementedError

    def propose(self, batch: Batch) -> Draft:
        return Draft(
            [self.after(step.row, (), step.budget) if step.budget.nodes else EMPTY_TREE for step in batch]
        )
