"""The processes of `torchrun` or `accelerate launch`: each computes a part of every batch.

All have the same weights: gradients are summed over the processes, and each takes the same step.  The first
process alone has the target answer, fills the cache of features, evaluates and writes; the others read the
cache, so they need its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as library
from torch import Tensor

from outrider.errors import ConfigError

LONGEST = timedelta(days=30)  # that the others wait for the first: answers take long


@dataclass(frozen=True)
class Processes:
    """rank: number of this process, of `count`."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def joined() -> Processes:
        """The processes of the launcher; one without a launcher.  Chooses the CUDA device of this process.

        Raises ConfigError if a launcher's variables are incomplete.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not library.is_initialized():
            try:
                library.init_process_group("nccl" if cuda else "gloo", timeout=LONGEST)
            except ValueError as error:
                raise ConfigError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the processes cannot join ({error}): "
                    "start them with `torchrun` or `accelerate launch`, or unset it."
                ) from error
        return Processes(library.get_rank(), library.get_world_size())

    def leave(self) -> None:
        """End what `joined` has begun."""
        if self.count > 1:
            library.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, places: Iterable[int]) -> list[int]:
        """The places of a batch that this process computes."""
        return [place for place in places if place % self.count == self.rank]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients by their sums over the processes."""
        for parameter in parameters if self.count > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            library.all_reduce(parameter.grad)

    def total(self, value: float) -> float:
        """The sum of a number over the processes."""
        if self.count == 1:
            return value
        device = torch.device("cuda") if library.get_backend() == "nccl" else torch.device("cpu")
        whole = torch.tensor(value, dtype=torch.float64, device=device)
        library.all_reduce(whole)
        return float(whole)

    def same(self, key: str) -> bool:
        """Whether all processes have the same key."""
        keys: list[str] = [key] * self.count
        if self.count > 1:
            library.all_gather_object(keys, key)
        return len({*keys}) == 1
