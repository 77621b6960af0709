"""Deployments of Ray Serve without Ray: routing, autoscaling, options, and where ranks are placed."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from patience import HANG

ray_server = pytest.importorskip("outrider.serve.ray", reason="needs the extra ray", exc_type=ImportError)

from outrider import ConfigError  # noqa: E402
from outrider.parallel import ray as placing  # noqa: E402
from outrider.serve.options import ServerOptions  # noqa: E402
from outrider.serve.replicas.relay import Question  # noqa: E402
from outrider.serve.replicas.routing import BLOCK_TOKENS  # noqa: E402


def question(text: str) -> Any:
    body = json.dumps({"prompt": text}).encode()
    metadata = SimpleNamespace(internal_request_id=uuid4().hex)
    return SimpleNamespace(args=[Question.of("POST", "/v1/completions", [], body)], metadata=metadata)


class Routed:
    """A router of Ray's handles, without Ray."""

    def __init__(self, tokens: int = 10_000) -> None:
        self.router = object.__new__(ray_server.PrefixRouter)
        self.router.initialize_state()
        stats = {"tokens": tokens}
        self.replicas = [SimpleNamespace(replica_id=name, routing_stats=stats) for name in "abc"]
        self.open: dict[str, list[str]] = {name: [] for name in "abc"}

    def ask(self, text: str) -> str:
        """The replica of a request, which stays open."""
        request = question(text)
        ranked = asyncio.run(self.router.choose_replicas(self.replicas, request))
        chosen: str = ranked[0][0].replica_id
        assert sorted(one.replica_id for rank in ranked for one in rank) == [*"abc"]
        self.router.on_request_routed(request, chosen, None)
        self.open[chosen].append(request.metadata.internal_request_id)
        return chosen

    def end(self, replica: str) -> None:
        """Complete a request of a replica, if it has one."""
        for id in self.open[replica][:1]:
            self.router.on_request_completed(replica, id)
            self.open[replica].remove(id)


def test_a_conversation_returns_to_its_replica() -> None:
    routed, first = Routed(), "Anna walked through the village. " * 40
    place = routed.ask(first)
    routed.end(place)
    others = {routed.ask(f"{i}: another text. " * 40) for i in range(2)}
    assert place not in others and len(others) == 2
    for replica in others:
        routed.end(replica)
    assert routed.ask(first + "And then? " * 20) == place


def test_load_outweighs_a_short_prefix() -> None:
    routed, text = Routed(), "Anna walked through the village. " * 10
    place = routed.ask(text)
    assert routed.ask(text) != place, "128 tokens of work are more than the 80 that are cached"


def test_requests_that_a_replica_rejects_do_not_lower_its_load() -> None:
    """Ray reports their completion, and routes them again."""
    routed, text = Routed(), "Anna walked through the village. " * 10
    places = [routed.ask(text) for _ in range(3)]
    assert sorted(places) == [*"abc"]
    for _ in range(2):
        routed.router.on_request_completed(places[2], "rejected")
    assert routed.ask(text) == places[0], "the first one that was used, of three with the same load"


def test_replicas_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = Routed()
    for name in ("on_replica_actor_died", "update_replicas"):
        monkeypatch.setattr(ray_server.RequestRouter, name, lambda *_: None)
    for i in range(3):
        routed.ask(f"{i}: a text. " * 40)
    routed.router.on_replica_actor_died("a")
    routed.router.update_replicas(routed.replicas[1:2])
    for replica in "abc":
        routed.end(replica)
    assert [*routed.router.prefixes] == [*routed.router.open] == [*routed.router.used] == ["b"]
    assert not routed.router.open["b"]


def replica_with(app: Any) -> Any:
    replica = object.__new__(ray_server.Model)
    replica.app = app
    return replica.answer(Question("POST", "/v1/completions", (), b"{}"))


async def started(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})


def test_a_client_that_leaves_ends_the_request_of_a_replica() -> None:
    async def endless(_scope: Any, _receive: Any, send: Any) -> None:
        await started(send)
        while True:
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})

    async def task() -> None:
        parts = replica_with(endless)
        await anext(parts)
        await anext(parts)
        await asyncio.sleep(0.01)  # the queue is full
        await asyncio.wait_for(parts.aclose(), HANG)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(task())


def test_a_body_that_a_defect_cuts_raises_it() -> None:
    async def broken(_scope: Any, _receive: Any, send: Any) -> None:
        await started(send)
        raise ZeroDivisionError("a defect")

    async def task() -> None:
        parts = replica_with(broken)
        assert [await anext(parts), await anext(parts)] == [(200, {}), b"data: x\n\n"]
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await anext(parts)

    asyncio.run(task())


def test_a_small_cache_is_forgotten() -> None:
    routed, first = Routed(tokens=20 * BLOCK_TOKENS), "Anna walked through the village. " * 30
    place = routed.ask(first)
    routed.end(place)
    assert routed.router.prefixes[place].match(question(first).args[0].blocks) > 10
    for i in range(9):
        routed.end(routed.ask(f"{i}: another text. " * 60))
    assert not routed.router.prefixes[place].match(question(first).args[0].blocks)


def replicas_for(requests: float, uses: dict[str, float]) -> float:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8)
    context = SimpleNamespace(
        current_num_replicas=2,
        total_num_requests=requests,
        aggregated_metrics={ray_server.KV_USE: uses},
        config=config,
    )
    wanted, _ = ray_server.replicas_for_load(context)
    return float(wanted)


def test_replicas_follow_requests_and_kv_use() -> None:
    assert replicas_for(32, {"a": 0.1, "b": 0.1}) == 4
    assert replicas_for(8, {"a": 1.0, "b": 1.0}) == 2 / ray_server.TARGET_KV_USE
    assert replicas_for(1, {}) == 1 and replicas_for(0, {}) == 0


def test_a_bundle_has_all_that_an_actor_asks_for() -> None:
    asked = {"num_cpus": 0.5, "memory": 10**9, "resources": {"disk": 1}}
    assert placing.bundle(asked) == {"CPU": 0.5, "memory": 10**9, "disk": 1}


LAYOUTS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


def test_streams_have_the_time_of_shutdown_timeout_in_both_deployments() -> None:
    """Ray's own limit, 20 seconds, would cut those that pass through `Front`."""
    app = ray_server.deployment("builtin-draft", server=ServerOptions(shutdown_timeout=70.0))
    front = app._bound_deployment
    model = front.init_args[0]._bound_deployment
    limits = [each._deployment_config.graceful_shutdown_timeout_s for each in (front, model)]
    assert limits == [70.0, 70.0]


@pytest.mark.parametrize(("layout", "ranks"), [*zip(LAYOUTS, (2, 2, 4))])
def test_every_rank_of_a_layout_gets_a_bundle(layout: dict[str, int], ranks: int) -> None:
    app = ray_server.deployment("builtin-draft", placement="SPREAD", actor={"num_gpus": 1}, **layout)
    (model,) = app._bound_deployment.init_args[:1]
    config = model._bound_deployment._replica_config
    assert config.placement_group_bundles == [{"CPU": 1, "GPU": 1}] * ranks
    assert config.placement_group_strategy == "SPREAD"


def test_ranks_of_one_machine_follow_one_another() -> None:
    """From rank 0 on, which is in bundle 0."""
    assert placing.bundles_by_rank({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]


def test_other_ranks_start_in_bundles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment of a launcher, and its tasks lost with their rank."""
    started, task = list[Any](), SimpleNamespace()
    task.options = lambda **given: SimpleNamespace(remote=lambda env: started.append((given, env)))
    group, remote = object(), lambda **given: lambda run: started.append(given) or task
    monkeypatch.setattr(placing, "ray", SimpleNamespace(remote=remote))
    monkeypatch.setattr(placing, "get_current_placement_group", lambda: group)
    nodes = {"bundles_to_node_id": {0: "b", 1: "a", 2: "b"}}
    monkeypatch.setattr(placing, "placement_group_table", lambda given: nodes)
    monkeypatch.setattr(placing, "get_node_ip_address", lambda: "10.0.0.2")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", own := dict[str, str]())
        placing.start_ranks({"num_gpus": 1})
    assert started[0] == {"max_retries": 0, "num_gpus": 1}
    strategies = [given["scheduling_strategy"] for given, _ in started[1:]]
    assert [each.placement_group_bundle_index for each in strategies] == [2, 1]
    assert all(each.placement_group is group for each in strategies)
    assert [given["name"] for given, _ in started[1:]] == ["rank 1", "rank 2"]
    environments = [own, *(env for _, env in started[1:])]
    assert [env.pop("RANK") for env in environments] == ["0", "1", "2"]
    port = own["MASTER_PORT"]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    assert environments == [common] * 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"speculative_config": {"method": "nothing"}}, "nothing"),
        ({"server": ServerOptions(allow_lora_loading=True)}, "allow_lora_loading"),
        ({"server": ServerOptions(replicas=2)}, "replicas"),
        ({"placement": "PACK", "actor": {"num_cpus": 0}}, "give each rank num_cpus"),
        ({"server": ServerOptions(api_key=(" ",))}, "api_key"),
    ],
)
def test_wrong_options_are_refused_before_ray_starts(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ray_server.deployment("builtin-draft", **options)
