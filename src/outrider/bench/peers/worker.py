"""Run one engine in a process of its own.  Its interpreter needs the engine, and not Outrider.

Lines of JSON come in and go out: a `Job`, answered by the labels of the engine's modes; the label of the one
to load, which has this process to itself; then requests (token ids), each answered by tokens, their times
and seconds.  What fails is answered by an "error".
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files have the engines' names

import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Answer = tuple[list[int], list[float]]  # tokens, and seconds until each was there
Mode = Callable[[list[int]], Answer]  # answers a prompt
Modes = dict[str, Callable[[], Mode]]  # label -> what loads it


@dataclass(frozen=True)
class Job:
    """A model to load, and the parameters of all requests.

    model, draft: files or folders that it can read.  depth: of drafts.  ending: tokens at which an answer
    ends.  sampling: temperature, top_p, top_k and min_p.  tokens, context: the most of an answer, and with
    its prompt.
    """

    model: str
    draft: str | None
    depth: int
    ending: list[int]
    sampling: dict[str, Any]
    tokens: int
    seed: int
    context: int
    threads: int
    dtype: str
    device: str = "cpu"


def modes(name: str, job: Job) -> Modes:
    """The modes of the engine in the file of this name."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    assert spec is not None and spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    found: Modes = engine.modes(job)
    return found


def timed(answer: Mode, ids: list[int]) -> dict[str, Any]:
    began = time.perf_counter()
    tokens, times = answer(ids)
    return {"tokens": tokens, "times": times, "seconds": time.perf_counter() - began}


def main(name: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    os.register_at_fork(after_in_child=out.close)  # only the end of this process closes the pipe
    found: Modes = {}
    mode: Mode | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if not found:
                found = modes(name, Job(**asked))
                reply: dict[str, Any] = {"modes": [*found]}
            elif mode is None:
                mode = found[asked["load"]]()
                reply = asked
            else:
                reply = timed(mode, asked["ids"])
        except Exception as error:  # any, of an engine that we do not know
            reply = {"error": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    # the engines' files import these names, where Outrider may be missing
    sys.modules["outrider.bench.peers.worker"] = sys.modules["__main__"]
    main(sys.argv[1])
