"""Traces of requests for OpenTelemetry, with the extra `otel`: one span each, made when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from outrider.errors import ConfigError
from outrider.outputs import RequestOutput

# headers of the request that is being answered: `traceparent` names the span of its client
HEADERS: ContextVar[Mapping[str, str]] = ContextVar("HEADERS")


class Traces:
    """Exporter of spans to an OTLP endpoint over HTTP.  Attributes have vLLM's names.

    Raises ConfigError if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "otlp_traces_endpoint needs more packages: pip install 'outrider[otel]'."
            ) from error
        self.model = model
        self.provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def finished(self, output: RequestOutput) -> None:
        """Record a finished request, below the span that its headers name."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract(HEADERS.get({}))
        lasted = max((sample.token_times[-1] for sample in output.outputs if sample.token_times), default=0.0)
        ended = time.time_ns()
        span = self.provider.get_tracer("outrider").start_span(
            "llm_request",
            above,
            SpanKind.SERVER,
            self._attributes(output, lasted),
            start_time=ended - int(1e9 * lasted),
        )
        span.end(ended)

    def _attributes(self, output: RequestOutput, lasted: float) -> dict[str, Any]:
        firsts = [sample.token_times[0] for sample in output.outputs if sample.token_times]
        return {
            "gen_ai.request.id": output.request_id,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(sample.token_ids) for sample in output.outputs),
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.latency.time_in_queue": output.queued_seconds or 0.0,
            "gen_ai.latency.time_to_first_token": min(firsts, default=0.0),
            "gen_ai.latency.e2e": lasted,
            "outrider.steps": output.speculation.steps,
            "outrider.tokens_per_step": output.speculation.tokens_per_step,
        }

    def shutdown(self) -> None:
        """Send what has not been sent."""
        self.provider.shutdown()
