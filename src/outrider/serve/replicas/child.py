"""Process of one replica: a server on a Unix socket."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading

from outrider.errors import OutriderError
from outrider.serve.run import Service, run


def main(service: Service) -> None:
    """Serve until SIGTERM, or the end of the router."""
    os.setsid()  # Ctrl-C is for the router
    if service.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(service.gpus)
    threading.Thread(target=_end_with_the_router, daemon=True).start()
    form = f"%(asctime)s %(levelname)s replica {service.number}: %(message)s"
    logging.basicConfig(format=form, level=logging.WARNING, force=True)
    logging.getLogger("outrider").setLevel(logging.INFO)
    try:
        run(service)
    except (OutriderError, OSError) as error:
        sys.exit(f"outrider: {error}")


def _end_with_the_router() -> None:
    router = multiprocessing.parent_process()
    assert router is not None
    router.join()
    os._exit(1)
