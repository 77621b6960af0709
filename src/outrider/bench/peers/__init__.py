"""Other installed engines on the same prompts, one request at a time, for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from outrider.bench.measure import Attempt, Run
from outrider.bench.peers import llama_cpp, openvino, transformers, vllm
from outrider.bench.peers.base import Answer, Job, Peer
from outrider.core.clock import Times
from outrider.errors import ConfigError, unknown

PEERS: Mapping[str, Peer] = {
    "transformers": transformers.PEER,
    "llama.cpp": llama_cpp.PEER,
    "openvino": openvino.PEER,
    "vllm": vllm.PEER,
}


def check(name: str, *models: str | None) -> None:
    """Raise ConfigError for an engine that is unknown or not installed, or cannot read these checkpoints."""
    if name not in PEERS:
        raise ConfigError(unknown("peer", name, PEERS))
    peer = PEERS[name]
    if find_spec(peer.module) is None:
        raise ConfigError(f"{name} is not installed here: pip install {peer.package}.")
    for model in models:
        if model is not None:
            peer.check(model)


def attempts(name: str, job: Job) -> dict[str, Attempt]:
    """Label -> what answers a group of prompts, for every mode of an engine.

    This and its calls raise ConfigError with the engine's message if it cannot run the models.
    """
    with _explained(name, job):
        return {label: _timed(name, job, answer) for label, answer in PEERS[name].modes(job).items()}


@contextmanager
def _explained(name: str, job: Job) -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConfigError(f"{name} cannot run {job.model!r}: {reason}") from error


def _timed(name: str, job: Job, answer: Answer) -> Attempt:
    def attempt(kind: str, group: list[Any]) -> Run:
        began = time.perf_counter()
        with _explained(name, job):
            answers = [answer(prompt["prompt_token_ids"]) for prompt in group]
        return Run(kind, time.perf_counter() - began, Times(), answers)

    return attempt
