"""Small measured facts kept on disk between starts, in the folder of the compiled kernels."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from outrider.backends.cpu.build import cache_folder
from outrider.backends.cpu.compiler import BuildError
from outrider.backends.cpu.targets import processor
from outrider.version import VERSION

log = logging.getLogger("outrider")


class StoredJson:
    """JSON in a file named by a hash of `about`, of the machine, its threads and the version.

    The value may be lost: an unreadable file counts as none, and a file that cannot be written is logged
    once.  path: None if nothing can be stored.
    """

    def __init__(self, kind: str, *about: Any) -> None:
        parts = VERSION, platform.node(), sorted(processor()), os.cpu_count(), torch.get_num_threads(), *about
        name = f"{kind}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"
        self.path: Path | None = None
        with suppress(BuildError):
            self.path = cache_folder(os.environ) / name

    def read(self) -> Any:
        """The stored value; None if there is none, or if it cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            return json.loads(self.path.read_text(encoding="utf-8")) if self.path is not None else None
        return None

    def write(self, value: Any) -> None:
        """Replace the stored value."""
        if self.path is None:
            return
        try:
            with NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, delete=False, encoding="utf-8"
            ) as made:
                made.write(json.dumps(value))  # `dump` takes several times as long
            os.replace(made.name, self.path)
        except OSError as error:
            log.warning("what was measured is not kept for the next start: %s", error)
            self.path = None
