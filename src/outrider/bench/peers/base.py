"""The interface of another engine: a request is token ids, and each of its modes answers one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from outrider.checkpoints.hub import Checkpoint, locate
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.export import write
from outrider.outputs import CompletionOutput

Answer = Callable[[list[int]], CompletionOutput]


@dataclass(frozen=True)
class Job:
    """What is asked of another engine.  llm: ours, with the same target.  depth: of drafts."""

    llm: LLM
    params: SamplingParams
    draft: str | None
    depth: int

    @property
    def model(self) -> str:
        return self.llm.engine.options.model

    @property
    def ending(self) -> list[int]:
        """Tokens at which an answer ends."""
        return [] if self.params.ignore_eos else sorted(self.llm.engine.ending)

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters of the distribution under the names that all engines use."""
        return {name: getattr(self.params, name) for name in ("temperature", "top_p", "top_k", "min_p")}


class Peer(NamedTuple):
    """package: for pip.  module: to import.  modes: label -> what answers.  check: refuses a checkpoint."""

    package: str
    module: str
    modes: Callable[[Job], dict[str, Answer]]
    check: Callable[[str], None] = lambda model: None


@contextmanager
def readable(name: str) -> Iterator[Path]:
    """Folder of a checkpoint.  A compressed-tensors one is copied unquantised, as any engine can read it."""
    scheme = Checkpoint.open(name).scheme
    if scheme is None or scheme.method != "compressed-tensors":
        yield locate(name)
        return
    with TemporaryDirectory() as folder:
        write(name, Path(folder), 32)
        yield Path(folder)
