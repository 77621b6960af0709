"""Hidden states of the target for all texts: computed once, kept in a memory-mapped file.

    states.bin   bfloat16 [places, states * hidden]     the first texts, as far as the limit allows
    done.json    {"texts": n}                           texts whose states are complete

States of the texts beyond the limit are computed whenever they are needed, with the same rounding.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.step import FINAL
from outrider.errors import ConfigError
from outrider.heads.sample import Sample, read_states, target_logits
from outrider.models.base import Model
from outrider.train.answers import OutOfTime, Text
from outrider.train.base import replace_text

SAVE_EVERY = 64  # texts


class Features:
    """Training samples of texts.

    wanted: states that the method reads, as in `Needs.states`.  logits: whether it reads the target's.
    folder: of the file, None without one.  limit: most bytes of it.
    """

    def __init__(
        self,
        model: Model,
        texts: Sequence[Text],
        wanted: Sequence[int],
        logits: bool,
        folder: Path | None,
        limit: float,
    ) -> None:
        self.model, self.texts, self.wanted, self.logits, self.folder = model, texts, wanted, logits, folder
        self.kept = tuple(sorted({*wanted, FINAL} if logits else {*wanted}))
        self.width = len(self.kept) * model.spec.hidden
        self.starts = [0]
        for text in texts:
            self.starts.append(self.starts[-1] + len(text.ids))
        places = int(limit // (2 * self.width)) if folder else 0
        self.cached = sum(start <= places for start in self.starts[1:])
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
        progress = self.folder / "done.json"
        stored = json.loads(progress.read_text(encoding="utf-8"))["texts"] if progress.exists() else 0
        done = min(stored, self.cached)
        size = self.width * self.starts[self.cached]
        shape = (self.starts[self.cached], self.width)
        path = self.folder / "states.bin"
        _check_space(path, self.bytes)
        self.store = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(shape)
        tick(done)
        for i in range(done, self.cached):
            self.store[self.starts[i] : self.starts[i + 1]] = self._states(i)
            late = time.perf_counter() > deadline
            if late or (i + 1) % SAVE_EVERY == 0 or i + 1 == self.cached:
                replace_text(progress, json.dumps({"texts": i + 1}))
                if late and i + 1 < self.cached:
                    raise OutOfTime
            tick(1)

    def sample(self, *numbers: int) -> Sample:
        """The sample of the texts of these numbers, one behind the other, on the target's device."""
        texts, device = [self.texts[i] for i in numbers], self.model.device
        parts = torch.cat([self._kept(i) for i in numbers]).to(device).float().chunk(len(self.kept), dim=-1)
        states = {which: part.contiguous() for which, part in zip(self.kept, parts)}
        counted = [text.prompt <= t < len(text.ids) for text in texts for t in range(1, len(text.ids) + 1)]
        mask = torch.tensor(counted, device=device)
        logits = torch.empty(0, device=device)
        if self.logits:  # where they are read only
            logits = torch.zeros(len(mask), self.model.spec.vocabulary, device=device)
            logits[mask] = target_logits(self.model, states[FINAL][mask])
        tokens = torch.tensor([token for text in texts for token in text.ids], device=device)
        return Sample(tokens, states, logits, mask, [len(text.ids) for text in texts])

    def _kept(self, i: int) -> Tensor:
        """bfloat16 [T, width] of text i."""
        if self.store is not None and i < self.cached:
            return self.store[self.starts[i] : self.starts[i + 1]]
        return self._states(i)

    def _states(self, i: int) -> Tensor:
        """bfloat16 [T, width]."""
        states = read_states(self.model, self.texts[i].ids, self.kept)
        return torch.cat([states[which] for which in self.kept], dim=-1).to(torch.bfloat16)


def _check_space(path: Path, size: int) -> None:
    """Raise ConfigError if the disk has no room for what a file of this size lacks: it is made with holes."""
    held = path.stat().st_blocks * 512 if path.exists() else 0
    if size - held > (free := shutil.disk_usage(path.parent).free):
        raise ConfigError(
            f"the features need {(size - held) / 1e9:.1f} GB in {str(path.parent)!r}, which has "
            f"{free / 1e9:.1f} GB left: give a smaller cache_gb, or another folder as cache."
        )
