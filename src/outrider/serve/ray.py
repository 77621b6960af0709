"""The server as deployments of Ray Serve, over any number of machines (the extra `ray`).

    proxy ── Front: keys, limits, relay ── handle, `PrefixRouter` ── Model: server, engine

`Front` has no model.  It reads bodies, which Ray's proxies do not, so that requests are routed by their
prompts; and it repeats those of replicas that end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from statistics import mean
from threading import Thread
from typing import Any
from urllib.parse import unquote

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.routing import Mount

from outrider.config import EngineOptions, SpeculativeOptions
from outrider.errors import ConfigError
from outrider.parallel.ray import bundle, start_ranks
from outrider.serve.app import make_app
from outrider.serve.guard import middleware
from outrider.serve.options import ServerOptions
from outrider.serve.replicas.app import HANDLERS, passed_on
from outrider.serve.replicas.relay import Answer, Pool, Question, ReplicaLost, whole_events
from outrider.serve.replicas.routing import BLOCK_TOKENS, Prefixes, work
from outrider.serve.run import WATCH_INTERVAL, Service
from outrider.serve.state import Server, cancelled

FRONT: dict[str, Any] = {
    "max_ongoing_requests": 1024,  # a Model has max_requests
    # on the head node, with which the cluster ends anyway
    "ray_actor_options": {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
}
KV_USE = "kv_cache_use"
TARGET_KV_USE = 0.8  # above which the autoscaler adds a replica
HEALTH_SECONDS = 5.0  # between two checks of a replica
log = logging.getLogger("outrider.serve")


def deployment(
    model: str,
    *,
    speculative_config: Mapping[str, Any] | None = None,
    server: ServerOptions | None = None,
    threads: int | None = None,
    replicas: int | Mapping[str, Any] = 1,
    actor: Mapping[str, Any] | None = None,
    placement: str | None = None,
    **engine: Any,
) -> serve.Application:
    """An application for `ray.serve.run`: OpenAI's routes on replicas of a model.

    model, speculative_config, engine: as for `LLM`.  threads: CPU threads of a replica.
    replicas: number of them, or Ray's autoscaling_config, such as {"min_replicas": 1, "max_replicas": 8,
        "target_ongoing_requests": 16}; K/V use above TARGET_KV_USE adds replicas, too
    actor: Ray's ray_actor_options of a replica, such as {"num_gpus": 1}
    placement: Ray's strategy for the ranks of a replica, such as "STRICT_SPREAD" over machines, each with the
        resources of `actor`; None: all ranks are processes of one machine

    Raises ConfigError.
    """
    options, resources = server or ServerOptions(), dict(actor or {})
    _check(options)
    ranks = EngineOptions(model=model, **engine).layout.size
    SpeculativeOptions.of(None if speculative_config is None else dict(speculative_config))
    placed: dict[str, Any] = {}
    if placement is not None:
        placed = {
            "placement_group_bundles": [bundle(resources)] * ranks,
            "placement_group_strategy": placement,
        }
    routed = serve.deployment(
        max_ongoing_requests=options.max_requests,
        ray_actor_options=dict(resources),
        request_router_config={"request_router_class": PrefixRouter},
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=HEALTH_SECONDS,
        **_number(replicas),
        **placed,
    )(Model)
    inner = replace(options, api_key=(), api_key_file=None, allowed_origins=(), root_path="")
    service = Service(inner, {"model": model, **engine}, speculative_config, threads)
    front = serve.deployment(graceful_shutdown_timeout_s=options.shutdown_timeout, **FRONT)(
        serve.ingress()(Front)
    )
    return front.bind(routed.bind(service, resources if placed else None), options)


def _check(options: ServerOptions) -> None:
    """Raise ConfigError for options that cannot be used on Ray, or for keys that cannot be read."""
    options.keys()
    if options.allow_lora_loading:
        raise ConfigError("allow_lora_loading reaches one replica of Ray's: name adapters in lora_modules.")
    if options.replicas != 1:
        raise ConfigError("ServerOptions.replicas is not for Ray: give deployment(replicas=…).")


def _number(replicas: int | Mapping[str, Any]) -> dict[str, Any]:
    """Options of `serve.deployment` for a number of replicas, or for one that follows the load."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    policy = AutoscalingPolicy(policy_function=replicas_for_load)
    return {"autoscaling_config": AutoscalingConfig(**{"policy": policy, **replicas})}


def replicas_for_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Ray's autoscaling policy: replicas needed for the open requests or the K/V use, whichever is more."""
    current = context.current_num_replicas
    assert context.config is not None, "Ray sets it"
    wanted = context.total_num_requests / context.config.get_target_ongoing_requests()
    if uses := (context.aggregated_metrics or {}).get(KV_USE):
        wanted = max(wanted, current * mean(uses.values()) / TARGET_KV_USE)
    return max(wanted, 1.0 if context.total_num_requests else 0.0), {}


class Model:
    """A replica: the server's application on an engine of its own."""

    def __init__(self, service: Service, placed: Mapping[str, Any] | None = None) -> None:
        """placed: ray_actor_options of ranks that Ray places; None: ranks are processes of this machine."""
        if placed is not None:
            start_ranks(placed)
        self.server = Server(service.options, service.engine["model"])
        self.server.started(service.load())
        self.app = make_app(self.server)
        Thread(target=self._end_with_engine, daemon=True).start()

    def _end_with_engine(self) -> None:
        """End this process once the engine has stopped: Ray notices that sooner than its checks would."""
        while self.server.engine.is_running:
            time.sleep(WATCH_INTERVAL)
        log.error("%s", self.server.engine.error)
        os._exit(1)

    async def check_health(self) -> None:
        """Raise EngineError if the engine has stopped."""
        await self.server.engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Share of the K/V cache's pages that rows hold."""
        cache = self.server.llm.engine.cache
        return {KV_USE: 1 - cache.available / cache.pages}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Tokens of K/V, for the router's estimate of what is cached."""
        return {"tokens": self.server.llm.engine.cache.pages * BLOCK_TOKENS}

    async def answer(self, question: Question) -> AsyncGenerator[Any]:
        """Yield (status, headers), then the body in parts.  Raises what cut the body."""
        parts: asyncio.Queue[Any] = asyncio.Queue(1)
        bodies = iter([{"type": "http.request", "body": question.body, "more_body": False}])

        async def receive() -> Any:
            return next(bodies, None) or await asyncio.Event().wait()

        async def run() -> None:
            try:
                await self.app(_scope(question), receive, parts.put)
            except Exception:  # when cancelled, no task reads the mark of the end
                await parts.put(None)
                raise
            await parts.put(None)

        task, whole = asyncio.create_task(run()), False
        try:
            while (part := await parts.get()) is not None:
                if part["type"] == "http.response.start":
                    names = [
                        (name.decode("latin-1"), value.decode("latin-1")) for name, value in part["headers"]
                    ]
                    yield part["status"], dict(names)
                else:
                    whole = not part.get("more_body")
                    if part.get("body"):
                        yield part["body"]
            if not whole:
                await task
        finally:
            await cancelled([task])


def _scope(question: Question) -> dict[str, Any]:
    """The scope of a request, for an ASGI application."""
    path, _, query = question.target.partition("?")
    return {
        "type": "http",
        "http_version": "1.1",
        "method": question.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in question.headers],
        "root_path": "",
    }


class Front(Pool):
    """Front end for clients: a pool of one handle, behind which Ray chooses the replica."""

    def __init__(self, handle: DeploymentHandle, options: ServerOptions) -> None:
        self.handle, self.options, self.status = handle.options(stream=True), options, "ready"

    def __serve_build_asgi_app__(self) -> Starlette:
        route = Mount("/", passed_on(self, self.options.root_path))
        return Starlette(routes=[route], middleware=middleware(self), exception_handlers=HANDLERS)

    def check_ready(self) -> None:
        """Accept every request: Ray queues them while no replica is ready."""

    def check_room(self, samples: int = 1) -> None:
        """Accept every request: a replica that is full answers 429."""

    @asynccontextmanager
    async def ask(self, question: Question, avoid: Collection[int]) -> AsyncGenerator[Answer]:
        parts = self.handle.answer.remote(question)
        try:
            status, headers = await _next(parts)
            yield RayAnswer(status, headers, parts)
        finally:
            with suppress(RayError):
                parts.cancel()


async def _next(parts: Any) -> Any:
    """The next part that a replica yields.  Raises StopAsyncIteration at the end, and ReplicaLost."""
    try:
        return await anext(parts)
    except RayError as error:
        raise ReplicaLost from error


@dataclass(frozen=True)
class RayAnswer:
    """The response of a replica, as a generator of another process."""

    status: int
    headers: Mapping[str, str]
    parts: Any
    replica: int = 0
    planned: bool = False

    async def _bodies(self) -> AsyncGenerator[bytes]:
        with suppress(StopAsyncIteration):
            while True:
                yield await _next(self.parts)

    async def read(self) -> bytes:
        async with aclosing(self._bodies()) as bodies:
            return b"".join([part async for part in bodies])

    async def events(self) -> AsyncIterator[str]:
        async for event in whole_events(part.decode() async for part in self._bodies()):
            yield event


class PrefixRouter(RequestRouter):
    """Ray's choice of a replica by cached prefixes and load, for one `Front`."""

    def initialize_state(self, **_: Any) -> None:
        self.prefixes: dict[ReplicaID, Prefixes] = {}
        self.open: dict[ReplicaID, set[str]] = defaultdict(set)  # ids of requests
        self.used: dict[ReplicaID, int] = {}
        self.uses = itertools.count(1)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, the one with the least work for the request first."""
        keys = _blocks(pending_request)
        for replica in candidate_replicas:
            self.prefixes.setdefault(replica.replica_id, Prefixes())
            if tokens := replica.routing_stats.get("tokens"):
                self.prefixes[replica.replica_id].capacity = max(1, tokens // BLOCK_TOKENS)
        ranked = sorted(candidate_replicas, key=lambda replica: self._work(replica.replica_id, keys))
        return [[replica] for replica in ranked]

    def _work(self, id: ReplicaID, keys: Sequence[int]) -> tuple[int, int, int]:
        return *work(self.prefixes[id], len(self.open[id]), keys), self.used.get(id, 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.open[replica_id].add(pending_request.metadata.internal_request_id)
        self.used[replica_id] = next(self.uses)
        self.prefixes.setdefault(replica_id, Prefixes()).add(_blocks(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended.  Ray also calls it for rejected ones, without `on_request_routed`."""
        if replica_id in self.open:  # not of a replica that has been forgotten
            self.open[replica_id].discard(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget({replica_id})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._forget({*self.prefixes, *self.open, *self.used} - {replica.replica_id for replica in replicas})

    def _forget(self, ids: Collection[ReplicaID]) -> None:
        for state in (self.prefixes, self.open, self.used):
            for id in ids:
                state.pop(id, None)


def _blocks(request: PendingRequest | None) -> Sequence[int]:
    """Keys of the prompt of the `Question` that a request is; none of a health check."""
    given = request.args[0] if request is not None and request.args else None
    return given.blocks if isinstance(given, Question) else ()
