"""Metrics of all replicas, each with the label `replica`, and of the router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from outrider.serve.metrics import PREFIX
from outrider.serve.replicas.router import Router


async def metrics_of(router: Router) -> bytes:
    """The text format of Prometheus."""
    texts = {
        replica.number: await replica.metrics() for replica in router.replicas if replica.state == "ready"
    }
    registry = CollectorRegistry()
    registry.register(_Families([*labelled(texts), *_own(router)]))
    return generate_latest(registry)


def labelled(texts: Mapping[int, str]) -> list[Metric]:
    """Metrics of several replicas as those of one program."""
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sample.labels["replica"] = str(number)
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            families[family.name].samples += family.samples
    return list(families.values())


def _own(router: Router) -> Iterable[Metric]:
    counters = {
        "router_retries": ("Attempts that failed: requests that another replica repeats.", router.retries),
        "router_prompt_blocks": ("Blocks of routed prompts.", router.blocks),
        "router_prompt_block_hits": ("Blocks of which the chosen replica has the K/V.", router.hits),
    }
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(f"{PREFIX}{name}", help, value=value)
    up = GaugeMetricFamily(f"{PREFIX}router_replica_up", "1 while it accepts requests.", labels=("replica",))
    held = GaugeMetricFamily(f"{PREFIX}router_open_samples", "Queued or running.", labels=("replica",))
    restarts = CounterMetricFamily(f"{PREFIX}router_restarts", "Processes that ended.", labels=("replica",))
    for replica in router.replicas:
        label = [str(replica.number)]
        up.add_metric(label, float(replica.state == "ready"))
        held.add_metric(label, replica.open)
        restarts.add_metric(label, replica.restarts)
    yield from (up, held, restarts)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families
