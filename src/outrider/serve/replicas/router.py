"""State of the router: its replicas, and the choice among them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.backends.cpu.threads import limit
from outrider.errors import ConfigError
from outrider.serve.errors import ApiError, not_ready
from outrider.serve.replicas.relay import Answer, NotReached, Question, ReplicaLost
from outrider.serve.replicas.replica import Replica
from outrider.serve.replicas.routing import work
from outrider.serve.run import Service
from outrider.serve.state import cancelled
from outrider.serve.wire import dumps

LOADING, UNLOADING = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
log = logging.getLogger("outrider.serve")


class Router:
    """State shared by the router's routes; a `Pool` of its replicas.

    status: "loading", "ready" or "stopping".  model: its name in messages.
    folder: for the sockets, readable by this user only.
    hits, blocks: blocks of prompts that were at the chosen replica, and all.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self.options, self.status = service.options, "loading"
        self.model = (service.options.served_model_name or (service.engine["model"],))[0]
        self.retries, self.hits, self.blocks = 0, 0, 0
        self._changed, self._rolling, self._loading = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        self._adapters: dict[str, Question] = {}  # name -> how it was loaded
        self._uses = itertools.count(1)
        self.replicas = [
            Replica(part, service.options.replica_timeout, self._prepare, self._changed)
            for part in parts(service, folder)
        ]

    @property
    def open(self) -> int:
        """Samples that are queued or running."""
        return sum(replica.open for replica in self.replicas)

    def ready(self) -> Collection[int]:
        return [replica.number for replica in self.replicas if replica.state == "ready"]

    def check_ready(self) -> None:
        """Raise ApiError unless the router runs and has replicas, some of which may be starting."""
        if self.status != "ready":
            raise not_ready(self.status)

    def check_room(self, samples: int = 1) -> None:
        """Raise ApiError with status 429 if all replicas are full."""
        most = self.options.max_requests * len(self.replicas)
        if self.open + samples > most:
            raise ApiError(429, f"all {most} places are taken: try again later.", retry_after=1)

    def note_retry(self) -> None:
        self.retries += 1

    async def run(self, announce: Callable[[], Awaitable[None]]) -> None:
        """Start all replicas and keep them running.  Raises EngineError if one does not start.

        announce: called once all are ready.
        """
        tasks = [asyncio.create_task(replica.run()) for replica in self.replicas]
        ready = asyncio.create_task(self._await_all(announce))
        try:
            await asyncio.gather(*tasks, ready)
        finally:
            await cancelled([*tasks, ready])
            await self.end()

    async def _await_all(self, announce: Callable[[], Awaitable[None]]) -> None:
        while len(self.ready()) < len(self.replicas):
            self._changed.clear()
            await self._changed.wait()
        if self.status == "loading":
            self.status = "ready"
            await announce()

    async def roll(self) -> None:
        """Restart all replicas, one after the other."""
        async with self._rolling:
            for replica in self.replicas:
                log.info("replica %d is restarted", replica.number)
                await replica.restart()

    async def end(self) -> None:
        """End all replicas, and with them every request."""
        self.status = "stopping"
        await asyncio.gather(*(replica.end() for replica in self.replicas))

    @asynccontextmanager
    async def ask(self, question: Question, avoid: Collection[int] = ()) -> AsyncGenerator[Answer]:
        replica = await self._pick(question, avoid)
        self.blocks += len(question.blocks)
        self.hits += replica.prefixes.match(question.blocks)
        replica.used = next(self._uses)
        async with replica.ask(question) as answer:
            yield answer

    async def _pick(self, question: Question, avoid: Collection[int]) -> Replica:
        """The ready replica with the least work for a question.  Waits until there is one."""
        try:
            async with asyncio.timeout(self.options.request_timeout):
                while not (ready := [replica for replica in self.replicas if replica.state == "ready"]):
                    if self.status == "stopping":
                        raise not_ready(self.status)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ApiError(503, "no replica is ready.", code="loading", retry_after=5) from None
        allowed = [replica for replica in ready if replica.number not in avoid] or ready
        return min(allowed, key=lambda each: (*work(each.prefixes, each.open, question.blocks), each.used))

    # ---- adapters: what one replica has, all have

    async def everywhere(self, question: Question, name: Any) -> tuple[Answer, bytes]:
        """Load or unload an adapter on all ready replicas; the others catch up once they are ready.

        Returns the first refusal, after which no replica is changed, or the last answer.
        """
        found: tuple[Answer, bytes] | None = None
        async with self._rolling, self._loading:
            for replica in [each for each in self.replicas if each.state == "ready"]:
                try:
                    found = await self._change(replica, question, name)
                except (NotReached, ReplicaLost):
                    continue
                if found[0].status != 200:
                    for each in self.replicas:
                        if each.state == "ready":
                            await self._catch_up(each)
                    return found
            if found is None:
                raise ApiError(503, "no replica is ready.", code="loading", retry_after=5)
            if question.target.startswith(UNLOADING):
                self._adapters.pop(name, None)
            else:
                self._adapters[name] = question
        return found

    async def _change(self, replica: Replica, question: Question, name: Any) -> tuple[Answer, bytes]:
        """Load or unload an adapter on one replica."""
        async with replica.ask(question) as answer:
            body = await answer.read()
        if answer.status == 200 and question.target.startswith(UNLOADING):
            replica.adapters.pop(name, None)
        elif answer.status == 200:
            replica.adapters[name] = question
        return answer, body

    async def _prepare(self, replica: Replica) -> bool:
        """Give a replica that starts or comes back the adapters of the others.  False if it is lost."""
        async with self._loading:
            return await self._catch_up(replica)

    async def _catch_up(self, replica: Replica) -> bool:
        had, wanted = replica.adapters, self._adapters
        gone = [name for name, question in had.items() if wanted.get(name) is not question]
        asked = [(name, _unloading(name)) for name in gone]
        asked += [(name, each) for name, each in wanted.items() if had.get(name) is not each]
        try:
            for name, question in asked:
                answer, _ = await self._change(replica, question, name)
                if answer.status != 200:
                    log.error("replica %d refuses %s of %r", replica.number, question.target, name)
        except (NotReached, ReplicaLost):
            return False
        return True


def _unloading(name: str) -> Question:
    headers = [("content-type", "application/json")]
    return Question.of("POST", UNLOADING, headers, dumps({"lora_name": name}).encode())


def parts(service: Service, folder: Path) -> list[Service]:
    """The service of every replica: its threads and GPUs, without what the router does."""
    given, replicas = service.options, service.options.replicas
    options = replace(
        given, api_key=(), api_key_file=None, ssl_certfile=None, ssl_keyfile=None, allowed_origins=()
    )
    limit()
    threads = service.threads
    if threads is None and not os.environ.get("OMP_NUM_THREADS"):
        threads = max(1, torch.get_num_threads() // replicas)
    found = [] if service.engine.get("device") == "cpu" else visible_gpus()
    ranks = (service.engine.get("tensor_parallel_size") or 1) * (
        service.engine.get("pipeline_parallel_size") or 1
    )
    gpus = shares(found, replicas, ranks) if found else [[] for _ in range(replicas)]
    return [
        replace(service, options=options, threads=threads, number=i, socket=str(folder / str(i)), gpus=own)
        for i, own in enumerate(gpus)
    ]


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use; none on a machine without."""
    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def shares(gpus: Sequence[str], replicas: int, ranks: int) -> list[list[str]]:
    """GPUs of every replica, `ranks` each.  Raises ConfigError if there are too few."""
    if len(gpus) < replicas * ranks:
        raise ConfigError(
            f"{replicas} replicas of {ranks} GPUs need {replicas * ranks}, and {len(gpus)} are visible: "
            "lower --replicas, or choose --device cpu."
        )
    return [list(gpus[i * ranks : (i + 1) * ranks]) for i in range(replicas)]
