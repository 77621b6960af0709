"""What the router logs of errors that no request has."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.serve.replicas.run import log_error


@pytest.mark.parametrize(("error", "logged"), [(asyncio.InvalidStateError(), False), (OSError("x"), True)])
def test_a_reader_that_was_cancelled_is_not_logged(
    error: Exception, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """anyio sets the result of a future whose task has been cancelled, in the step in which a byte comes."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_error)
        future = loop.create_future()
        future.cancel()
        loop.call_soon(future.set_result if not logged else _raise, error)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert bool(caplog.records) is logged


def _raise(error: Exception) -> None:
    raise error
