"""Metrics of the server, for Prometheus.  Names are vLLM's with the prefix `outrider:`.

Counts of the engine are read at each scrape, so a step pays nothing for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.async_llm import AsyncLLM
from outrider.core.block_table import PAGE
from outrider.engine.engine import Engine
from outrider.errors import EngineError
from outrider.outputs import RequestOutput

PREFIX = "outrider:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def _of_steps(name: str) -> Callable[[Engine], float]:
    """A sum over prefill and decode steps."""
    return lambda engine: float(getattr(engine.prefill, name) + getattr(engine.decode, name))


# Metric -> its help, and how it is read.
COUNTERS: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "prompt_tokens": ("Prompt tokens computed.", _of_steps("prompt")),
    "generation_tokens": ("Emitted tokens.", _of_steps("emitted")),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.", attrgetter("scheduler.prefix_queries"),
    ),
    "prefix_cache_hits": ("Prompt tokens found there.", attrgetter("scheduler.prefix_hits")),
    "num_preemptions": ("Preempted samples.", attrgetter("scheduler.preemptions")),
    "engine_steps": ("Steps of the engine.", attrgetter("steps")),
    "engine_propose_seconds": ("Time in drafting.", attrgetter("times.propose")),
    "engine_forward_seconds": ("Time in the target's forward.", attrgetter("times.forward")),
    "engine_other_seconds": ("Time in the rest of steps.", attrgetter("times.rest")),
    "spec_decode_num_drafts": ("Draft trees verified.", _of_steps("drafts")),
    "spec_decode_num_draft_tokens": ("Draft tokens.", _of_steps("drafted")),
    "spec_decode_num_accepted_tokens": ("Accepted draft tokens.", _of_steps("accepted")),
}  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Registry with what the server observes at the end of requests, and what the engine counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        count, histogram = self._counter, self._histogram
        self.success = count("request_success", "Finished requests.", "finished_reason")
        self.failures = count("request_failure", "Requests that ended with an error.", "error")
        self.refused = count("request_refused", "Requests refused with status 429.")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens; 0 within one step.")
        mean = "Mean time between tokens of a request."
        self.per_token = histogram("request_time_per_output_token_seconds", mean)
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self.queued = histogram("request_queue_time_seconds", "Arrival to admission.")
        self.prefill = histogram("request_prefill_time_seconds", "Admission to first token.")
        self.decode = histogram("request_decode_time_seconds", "First to last token.")
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self.output_tokens = histogram("request_generation_tokens", "Output tokens.", TOKENS)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float] = SECONDS) -> Distribution:
        made = Distribution(name, help, buckets)
        self.registry.register(made)
        return made

    def watch(self, engine: AsyncLLM) -> None:
        """Add the counts of an engine."""
        self.registry.register(EngineMetrics(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def finished(self, output: RequestOutput) -> None:
        """Observe a finished request."""
        self.prompt_tokens.observe(len(output.prompt_token_ids))
        if output.queued_seconds is not None:
            self.queued.observe(output.queued_seconds)
        for sample in output.outputs:
            self.success.labels(sample.finish_reason or "").inc()
            self.output_tokens.observe(len(sample.token_ids))
            self._times(sample.token_times, output.queued_seconds or 0.0)

    def _times(self, times: list[float], queued: float) -> None:
        """Observe a sample by the arrivals of its tokens, in seconds since that of the request."""
        if not times:
            return
        self.first_token.observe(times[0])
        self.prefill.observe(times[0] - queued)
        self.latency.observe(times[-1])
        self.decode.observe(times[-1] - times[0])
        if len(times) > 1:
            self.per_token.observe((times[-1] - times[0]) / (len(times) - 1))
        for before, after in pairwise(times):
            self.inter_token.observe(after - before)

    def failed(self, error: BaseException) -> None:
        kind = "engine" if isinstance(error, EngineError) else "abort"
        self.failures.labels(kind).inc()


class Distribution(Collector):
    """Histogram that one thread observes: prometheus_client's takes ten times as long, for its locks.

    buckets: upper bounds.
    """

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self.name, self.help, self.buckets = f"{PREFIX}{name}", help, buckets
        self.counts, self.sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    def collect(self) -> Iterator[Metric]:
        bounds = list(zip(map(floatToGoString, (*self.buckets, math.inf)), accumulate(self.counts)))
        yield HistogramMetricFamily(self.name, self.help, buckets=bounds, sum_value=self.sum)


class EngineMetrics(Collector):
    """State and sums of an engine, read at each scrape."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine, self.core = engine, engine.llm.engine

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._depths()
        yield from self._adaptive()

    def _gauges(self) -> Iterator[Metric]:
        core, cache, scheduler = self.core, self.core.cache, self.core.scheduler
        yield _gauge("num_requests_running", "Samples in the batch.", len(scheduler.running))
        yield _gauge("num_requests_waiting", "Samples that wait for admission.", len(scheduler.waiting))
        used = 1 - cache.available / cache.pages
        yield _gauge("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", used)
        yield _gauge("kv_cache_tokens", "Tokens the KV cache has room for.", cache.pages * PAGE)
        yield _gauge("engine_up", "1 while requests are accepted.", float(self.engine.is_running))
        work = core.decode
        per_step = work.emitted / work.rows if work.rows else 0.0
        yield _gauge("spec_decode_tokens_per_step", "Tokens a decode step emits for one sample.", per_step)
        times = core.times
        share = times.propose / (sum(times) or 1.0)
        yield _gauge("spec_decode_draft_time_share", "Part of all step time that drafting takes.", share)

    def _counters(self) -> Iterator[Metric]:
        for name, value in counts_of(self.core).items():
            yield CounterMetricFamily(f"{PREFIX}{name}", COUNTERS[name][0], value=value)
        restarts, undone = f"{PREFIX}engine_restarts", "Steps that failed and were undone."
        yield CounterMetricFamily(restarts, undone, value=self.engine.restarts)

    def _depths(self) -> Iterator[Metric]:
        found = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by depth, from 0.",
            labels=("position",),
        )
        works = self.core.prefill, self.core.decode
        lengths = [dict(work.accepted_lengths) for work in works]  # the engine changes them
        deepest = max(max(work, default=0) for work in lengths)
        for depth in range(deepest):
            value = sum(n for work in lengths for length, n in work.items() if length > depth)
            found.add_metric((str(depth),), value)
        yield found

    def _adaptive(self) -> Iterator[Metric]:
        """Choices of the adaptive controllers, and their ledger."""
        if not (controllers := self.core.adaptive):
            return
        evidence = controllers[0].evidence  # of all
        chosen = CounterMetricFamily(
            f"{PREFIX}spec_decode_chosen", "Steps of samples by the drafters asked.", labels=("drafters",)
        )
        for names, count in dict(evidence.total.steps).items():  # the engine changes it
            chosen.add_metric((names,), count)
        yield chosen
        yield _gauge("spec_decode_gain", "Time of plain decoding over the time taken.", evidence.total.gain)
        resting = sum(each.rest is not None for each in controllers) / len(controllers)
        yield _gauge("spec_decode_resting", "Part of the controllers that consider no drafter.", resting)
        ledger = evidence.ledger
        yield _gauge("spec_decode_ledger_loss_seconds", "Time lost to drafts, less that saved.", ledger.loss)
        yield _gauge("spec_decode_ledger_room_seconds", "Time that drafts may still lose.", ledger.room)


def counts_of(engine: Engine) -> dict[str, float]:
    """Sums of an engine, by the names of their metrics."""
    return {name: read(engine) for name, (_, read) in COUNTERS.items()}


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", help, value=value)
