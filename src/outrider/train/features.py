"""Hidden states of the target for all texts: computed once, kept in a memory-mapped file.

    states.bin   bfloat16 [places, states * hidden]     the first texts, as far as the limit allows
    done.json    {"texts": n}                           texts whose states are complete

States of the texts beyond the limit are computed whenever they are needed, with the same rounding.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.core.device import to_device
from outrider.core.step import FINAL
from outrider.core.validate import is_whole
from outrider.errors import ConfigError, writing
from outrider.heads.sample import CHUNK, Sample, read_states, target_logits
from outrider.models.base import Model
from outrider.train.answers import OutOfTime, Text
from outrider.train.base import replace_text

SAVE_EVERY = 64  # texts


class States:
    """States of the target for texts, as far as the limit allows in a file.

    kept: layers and FINAL, in the order of the file's columns.  folder: of the file, None without one.
    limit: most bytes of it.
    """

    def __init__(
        self, model: Model, texts: Sequence[Text], kept: Sequence[int], folder: Path | None, limit: float
    ) -> None:
        self.model, self.texts, self.kept, self.folder = model, texts, tuple(kept), folder
        self.width = len(self.kept) * model.spec.hidden
        self.starts = [0]
        for text in texts:
            self.starts.append(self.starts[-1] + len(text.ids))
        self.cached = sum(2 * self.width * start <= limit for start in self.starts[1:]) if folder else 0
        self.store: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return 2 * self.width * self.starts[self.cached]

    def fill(self, tick: Callable[[int], None], deadline: float = math.inf) -> None:
        """Compute what the file lacks.  tick(texts) is called for those that are done.

        Raises OutOfTime if states are missing at `deadline`, of `perf_counter`.
        """
        if not self.cached or self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        progress, path = self.folder / "done.json", self.folder / "states.bin"
        done, saved = self._stored(progress, path), 0
        size = self.width * self.starts[self.cached]
        shape = (self.starts[self.cached], self.width)
        if not done:  # before the file has its size: after a kill, the old count would say that it is full
            progress.unlink(missing_ok=True)
        _reserve(path, self.bytes)
        self.store = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(shape)
        tick(done)
        for first, end in self._parts(done):
            self.store[self.starts[first] : self.starts[end]] = self._computed(range(first, end))
            late, saved = time.perf_counter() > deadline, saved + end - first
            if late or saved >= SAVE_EVERY or end == self.cached:
                replace_text(progress, json.dumps({"texts": end}))
                saved = 0
                if late and end < self.cached:
                    raise OutOfTime
            tick(end - first)

    def of(self, numbers: Sequence[int]) -> Tensor:
        """bfloat16 [T, width] of these texts, one behind the other, on the host or on the target's device."""
        if self.store is None or max(numbers) >= self.cached:
            return self._computed(numbers)
        return gathered([self.store[self.starts[i] : self.starts[i + 1]] for i in numbers], self.model.device)

    def _stored(self, progress: Path, path: Path) -> int:
        """Texts whose states are in the file: none if one of the two files is missing, damaged or too short.

        What is missing in a file would be read as zeros.
        """
        try:
            stored = json.loads(progress.read_text(encoding="utf-8"))["texts"]
            size = path.stat().st_size
        except (OSError, ValueError, TypeError, KeyError):
            return 0
        done = min(stored, self.cached) if is_whole(stored, 0) else 0
        return done if size >= 2 * self.width * self.starts[done] else 0

    def _parts(self, first: int) -> Iterator[tuple[int, int]]:
        """Texts from `first` on that one forward computes: on a CPU each alone."""
        most = 1 if self.model.device.type == "cpu" else CHUNK
        while first < self.cached:
            end = first + 1
            while end < self.cached and self.starts[end + 1] - self.starts[first] <= most:
                end += 1
            yield first, end
            first = end

    def _computed(self, numbers: Sequence[int]) -> Tensor:
        states = read_states(self.model, [self.texts[i].ids for i in numbers], self.kept)
        return torch.cat([states[which] for which in self.kept], dim=-1).to(torch.bfloat16)


class Stored(Protocol):
    """States of texts by their numbers, as `States`."""

    @property
    def kept(self) -> tuple[int, ...]: ...
    def of(self, numbers: Sequence[int]) -> Tensor: ...


S = TypeVar("S", bound=Stored)


class Features(Generic[S]):
    """Training samples of texts.

    logits: whether the method reads the target's.  states: `needed_states` of the texts.
    """

    def __init__(self, model: Model, texts: Sequence[Text], logits: bool, states: S) -> None:
        self.model, self.texts, self.logits, self.states = model, texts, logits, states

    def sample(self, *numbers: int, seeds: Sequence[int] = ()) -> Sample:
        """The sample of the texts of these numbers, one behind the other, on the target's device."""
        device, kept = self.model.device, self.states.kept
        ids, lengths, masks = list[int](), list[int](), list[Tensor]()
        for text in (self.texts[i] for i in numbers):
            ids += text.ids
            lengths.append(len(text.ids))
            counts = torch.arange(1, len(text.ids) + 1) >= text.prompt
            counts[-1] = False  # nothing follows the last token of a text
            masks.append(counts)
        parts = to_device(self.states.of(numbers), device).float().chunk(len(kept), dim=-1)
        states = {which: part.contiguous() for which, part in zip(kept, parts)}
        mask, logits = torch.cat(masks), torch.empty(0, device=device)
        if self.logits:  # where they are read only
            counted = to_device(mask.nonzero().flatten(), device)
            logits = torch.zeros(len(mask), self.model.spec.vocabulary, device=device)
            logits[counted] = target_logits(self.model, states[FINAL][counted])
        return Sample(to_device(torch.tensor(ids), device), states, logits, mask, lengths, seeds)


def gathered(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Parts [n, width] of a file, one behind the other, in memory that a CUDA device reads by itself."""
    count, pinned = sum(map(len, parts)), device.type == "cuda"
    rows = torch.empty(count, parts[0].shape[1], dtype=parts[0].dtype, pin_memory=pinned)
    return torch.cat(list(parts), out=rows)


def needed_states(wanted: Sequence[int], logits: bool) -> tuple[int, ...]:
    """The states to keep for a method that reads these, and the target's logits if `logits`."""
    return tuple(sorted({*wanted, FINAL} if logits else {*wanted}))


def _reserve(path: Path, size: int) -> None:
    """Allocate a file's blocks: a write to a mapped file on a full disk would end the process.

    Raises ConfigError if the disk lacks it.
    """
    held = path.stat().st_blocks * 512 if path.exists() else 0
    if size - held > (free := shutil.disk_usage(path.parent).free):
        raise ConfigError(
            f"the features need {(size - held) / 1e6:,.1f} MB in {str(path.parent)!r}, which has "
            f"{free / 1e6:,.1f} MB left: give a smaller cache_gb, or another folder as cache."
        )
    if hasattr(os, "posix_fallocate"):
        path.touch()
        with writing(path), path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:  # of file systems that cannot: the file is sparse there
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
