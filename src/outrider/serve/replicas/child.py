"""Process of one replica: a server on a Unix socket."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError
from outrider.serve.options import ServerOptions
from outrider.serve.run import loader, run


@dataclass(frozen=True)
class Job:
    """What a replica serves.

    engine: its options, with the model.  config: its speculative_config.  socket: path where it listens
    """

    options: ServerOptions
    engine: dict[str, Any]
    config: dict[str, Any] | None
    threads: int | None
    number: int = 0
    socket: str = ""
    gpus: Sequence[str] = ()


def main(job: Job) -> None:
    """Serve until SIGTERM, or the end of the router."""
    os.setsid()  # Ctrl-C is for the router
    if job.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
    threading.Thread(target=_end_with_the_router, daemon=True).start()
    form = f"%(asctime)s %(levelname)s replica {job.number}: %(message)s"
    logging.basicConfig(format=form, level=logging.WARNING, force=True)
    logging.getLogger("outrider").setLevel(logging.INFO)
    try:
        load = loader(job.options, job.engine, job.config, job.threads)
        run(job.options, job.engine["model"], load, job.socket)
    except (OutriderError, OSError) as error:
        sys.exit(f"outrider: {error}")


def _end_with_the_router() -> None:
    router = multiprocessing.parent_process()
    assert router is not None
    router.join()
    os._exit(1)
