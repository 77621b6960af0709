"""HTTP connections with limits on the head of a request, and with errors in OpenAI's shape."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outrider.serve.errors import ApiError

MOST_HEAD = 64 << 10  # bytes of a request line and headers


class Connection(HttpToolsProtocol):
    """Connection that is closed if the head of a request is too long or too slow.

    The application has limits for bodies.  It does not read that of a request that it refuses, so the time
    limit is also one for the rest of such a body.
    seconds: time limit.
    """

    seconds = 30.0
    _timer: asyncio.TimerHandle | None = None  # None while a request is answered
    _head_size: int | None = None  # bytes behind the part in which the head began; None outside a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._head_size is not None:
            self._head_size += len(data)
        super().data_received(data)
        if (self._head_size or 0) > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
        is_answered = self.cycle is not None and not self.cycle.response_complete
        if is_answered and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_answered and self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed, and close the connection."""
        response = ApiError(400, msg).response()
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[400] + head + b"\r\n" + response.body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._head_size = None
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()


def connection_within(seconds: float) -> type[Connection]:
    """Class of connections with a time limit."""
    return type("Connection", (Connection,), {"seconds": seconds})
