"""A collector gets a span of every request, below that of its client."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from served import served

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP endpoint, and the bodies that it has got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()


def test_a_request_becomes_a_span_below_that_of_its_client(collector: tuple[str, list[bytes]]) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, bodies = collector
    with served("builtin", "--otlp-traces-endpoint", endpoint, "--max-model-len", "256") as server:
        body = {"prompt": "One", "max_tokens": 7, "ignore_eos": True, "request_id": "mine"}
        assert server.post("/v1/completions", body, headers={"traceparent": PARENT}).status_code == 200
        assert server.stop() == 0
    (resource,) = ExportTraceServiceRequest.FromString(bodies[0]).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert span.trace_id.hex() == PARENT.split("-")[1] and span.parent_span_id.hex() == PARENT.split("-")[2]
    found = {attribute.key: attribute.value for attribute in span.attributes}
    assert found["gen_ai.request.id"].string_value == "cmpl-mine"
    assert found["gen_ai.usage.completion_tokens"].int_value == 7
    assert found["outrider.tokens_per_step"].double_value == 1.0
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9


def test_without_the_packages_the_option_is_refused() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from outrider.serve.traces import Traces; Traces('http://127.0.0.1:1', 'model')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr and "outrider[otel]" in done.stderr
