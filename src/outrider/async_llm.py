"""Asynchronous API with vLLM's names: `async for output in AsyncLLM(model).generate(prompt, params)`."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from importlib import import_module
from typing import Any
from uuid import uuid4

from outrider.core.params import SamplingParams
from outrider.core.row import LoRARequest
from outrider.engine import turn
from outrider.engine.loop import Ticket
from outrider.errors import EngineError, RankError, RequestError
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from outrider.progress import Request, RowState
from outrider.requests import Prompt

# Longest time in seconds that another thread keeps the interpreter while the engine's thread wants it.
# Python's default of 5 ms is longer than a step of a small model.
SWITCH_INTERVAL = 0.0005
CROWD = 8  # running samples: with more, outputs come less often, as each takes time from the engine
OnEnd = Callable[[int, RequestOutput], None]  # (index of the request, its last output)
log = logging.getLogger("outrider")


class _Inbox:
    """News of the requests of one task, in its event loop."""

    def __init__(self) -> None:
        self.loop, self.event = asyncio.get_running_loop(), asyncio.Event()
        self.context = copy_context()
        self.news: dict[int, _Reader] = {}  # by index, what the task has not read
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.event.set()

    async def wait(self) -> list[_Reader]:
        """The readers with news, at least one.  Raises the error of `fail`."""
        await self.event.wait()
        self.event.clear()
        if self.error is not None:
            raise self.error
        news, self.news = self.news, {}
        return list(news.values())


class _Reader:
    """Receiver of one request's news.  Keeps the newest states only.

    index: of the request among those of its task.  final: receives the end only.
    states: set by the engine's thread.  shown: those of the last waking, of which the task gets the output:
    a later end is news of its own.
    interval: seconds between two wakings of the task, the first and the last one aside.  A timer ends the
    wait, whether or not a step adds to what is there, at a multiple of the interval: at once for all tasks.
    """

    def __init__(
        self, inbox: _Inbox, index: int, request: Request, final: bool, interval: float, on_end: OnEnd | None
    ) -> None:
        self.inbox, self.index, self.request, self.final, self.on_end = inbox, index, request, final, on_end
        self.interval, self.due = interval, 0.0
        self.ticket: Ticket | None = None  # once the request is queued
        self.states: Sequence[RowState] = ()
        self.shown: Sequence[RowState] = ()
        self.last: RequestOutput | None = None
        self.waking = self.ended = False  # a call of `wake` is scheduled; there was one for the end

    def wake(self, now: float, crowd: int) -> bool:
        """Wake the task, unless it is not due yet: then False is returned.  crowd: factor of the interval."""
        if self.ended:
            return True
        if now < self.due and not _ended(self.states):
            return False
        self.waking = False  # from here on, later states wake the task again
        self.shown = self.states
        self.ended = _ended(self.shown)
        interval = crowd * self.interval
        self.due = (now // interval + 1) * interval if interval else 0.0
        if self.on_end is not None and self.ended:
            # before the task reads it
            self.inbox.loop.call_soon(self.on_end, self.index, self.output(), context=self.inbox.context)
        self.inbox.news[self.index] = self
        self.inbox.event.set()
        return True

    def close(self) -> None:
        """Wake the task no more."""
        self.on_end, self.ended = None, True

    def output(self) -> RequestOutput:
        """The output so far: always the same object."""
        if not self.final:
            made = self.request.extended(self.shown)
            if made.outputs[0].token_ends[-1:] == [0]:
                self.due = 0.0  # the interval begins with the first text
            return made
        self.last = self.last or self.request.output(self.shown)
        return self.last


def _ended(states: Sequence[RowState]) -> bool:
    """Whether all samples of a request have ended."""
    return None not in [state.finish_reason for state in states]


class AsyncLLM:
    """Loaded model whose engine runs in a thread of its own, for callers in asyncio.

    model, speculative_config, engine: as for `LLM`.
    restart_on_error: go on after a step that failed.  Its requests end with an EngineError in any case.
    Without, every later request does, too.
    warm_up: on a GPU, call `LLM.warm_up` first.

    All requests form one continuous batch.  Between two steps, the engine's thread leaves the newest state
    of each request; a reader that is slower than the engine misses states and holds no memory for them.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: Mapping[str, Any] | str | None = "auto",
        restart_on_error: bool = False,
        warm_up: bool = False,
        **engine: Any,
    ) -> None:
        self.llm = LLM(model, speculative_config=speculative_config, **engine)
        if warm_up and self.llm.engine.ahead:
            self.llm.warm_up()
        import_module("transformers.utils.chat_template_utils")  # now, not for the first conversation
        self.restart_on_error, self.restarts = restart_on_error, 0
        self._error: Exception | None = None
        self._news: list[_Reader] = []  # readers with news, since the last step
        self._closed = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        self._thread = threading.Thread(target=self._drive, name="outrider-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the output so far, each time that steps have extended it.  The last one has `finished` set.

        prompt, sampling_params, lora_request: as in `LLM.generate`, for one prompt.
        request_id: unique among open requests; None: a random one.
        priority: requests with a smaller number are admitted first, and preempted last.

        Raises RequestError for invalid input, and EngineError if a step failed.  Closing the generator, or
        cancelling the task that reads it, ends the request before the next step.
        """
        request = await self.read(prompt, sampling_params, request_id, lora_request, priority)
        async with aclosing(self.follow([request])) as outputs:
            async for _, output in outputs:
                yield output.copy()

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Return the finished output of a prompt.  Arguments and errors are those of `generate`."""
        request = await self.read(prompt, sampling_params, request_id, lora_request, priority)
        async with aclosing(self.follow([request], final=True)) as outputs:
            _, output = await anext(outputs)
        return output

    async def read(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        id: str | None = None,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> Request:
        """Tokenize a prompt and check its parameters, in another thread.  Raises RequestError."""
        params = self.llm.get_default_sampling_params() if params is None else params
        read = self.llm.reader.request
        request = await asyncio.to_thread(read, id or uuid4().hex, prompt, params, lora, priority)
        if isinstance(request, RequestOutput):
            assert request.error is not None
            raise request.error
        return request

    async def follow(
        self,
        requests: Sequence[Request],
        final: bool = False,
        on_end: OnEnd | None = None,
        timeout: float | None = None,
        interval: float = 0.0,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Queue requests and yield (index of the request, its output so far) as they come.

        final: yield only the last output of each.  Otherwise all outputs of a request are one object, whose
        lists grow.  on_end: called in the event loop when a request has ended, also while nothing is read.
        interval: seconds between two outputs of a request, the first and the last one aside; twice as many
        while more than CROWD samples run, and so on.
        Raises EngineError, TimeoutError after `timeout` seconds, and RequestError if a logits processor may
        wait for this call.  Closing it ends the requests.
        """
        await self.check_health()
        inbox = _Inbox()
        timers = [inbox.loop.call_later(turn.STALL, self._refuse_to_wait, inbox, time.monotonic())]
        if timeout is not None:
            timers.append(inbox.loop.call_later(timeout, inbox.fail, TimeoutError()))
        readers: list[_Reader] = []
        left = len(requests)
        try:
            for i, request in enumerate(requests):
                reader = _Reader(inbox, i, request, final, interval, on_end)
                reader.ticket = self.llm.loop.submit(request.rows, partial(self._note, reader))
                readers.append(reader)
            while left:
                for reader in await inbox.wait():
                    output = reader.output()
                    if output.error is not None:
                        raise output.error
                    left -= output.finished
                    yield reader.index, output
        finally:
            for timer in timers:
                timer.cancel()
            for reader in readers:
                reader.close()
                self._abort(reader)

    def _abort(self, reader: _Reader) -> None:
        if reader.ticket is not None:
            self.llm.loop.abort(reader.ticket)

    def _refuse_to_wait(self, inbox: _Inbox, came: float) -> None:
        try:
            self.llm.engine.turn.check_processor(came)
        except RequestError as error:
            inbox.fail(error)

    async def abort(self, request_id: str) -> None:
        """End a request before the next step.  Its last output has finish_reason "abort"."""
        self.llm.abort(request_id)

    @property
    def error(self) -> Exception | None:
        """What stopped the engine: a step that failed, or a lost rank, also while no request is open."""
        return self._error or self.llm.engine.decoder.failure

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self._closed and self.error is None and self._thread.is_alive()

    async def check_health(self) -> None:
        """Raise EngineError unless requests are accepted."""
        if not self.is_running:
            error = self.error or EngineError("the engine has been shut down, or its process was forked.")
            raise error.with_traceback(None)  # a traceback that each call extended would hold all callers

    def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests with an EngineError, and the engine's thread within `timeout` seconds."""
        self._closed = True
        self.llm.loop.stop(EngineError("the engine has been shut down."))
        self._thread.join(timeout)
        self._between_steps()  # for requests that ended after the thread

    def _note(self, reader: _Reader) -> None:
        """Take the states of a request's rows.  Called by the thread that steps, between steps."""
        finished = reader.request.finished
        if reader.final and not finished:
            return
        reader.states = reader.request.states()
        if finished or not reader.waking:
            reader.waking = True
            self._news.append(reader)

    def _drive(self) -> None:
        while not self._closed:
            try:
                self.llm.loop.run_until(self._between_steps)
            except BaseException as error:  # the loop has ended the requests of the step, or will
                log.exception("a step of the engine failed")
                fatal = isinstance(error, RankError) or not isinstance(error, Exception)
                if self.restart_on_error and not fatal:
                    self.restarts += 1
                else:
                    self._error = EngineError(f"the engine has stopped: {type(error).__name__}: {error}")
                    self.llm.loop.stop(self._error)
                    self._closed = True
            self._between_steps()

    def _between_steps(self) -> bool:
        """Wake the readers of requests with news, once per event loop.  Returns whether to stop."""
        news, self._news = self._news, []
        crowd = math.ceil(len(self.llm.engine.scheduler.running) / CROWD) or 1
        for loop in {reader.inbox.loop for reader in news}:
            readers = [reader for reader in news if reader.inbox.loop is loop]
            try:
                loop.call_soon_threadsafe(_wake, readers, crowd)
            except RuntimeError:  # the event loop is closed: no task reads
                for reader in readers:
                    self._abort(reader)
        return self._closed


def _wake(readers: Sequence[_Reader], crowd: int) -> None:
    """Wake the tasks of readers in one event loop now, or together when they are due."""
    loop = readers[0].inbox.loop
    now, early = loop.time(), dict[float, list[_Reader]]()
    for reader in readers:
        if not reader.wake(now, crowd):
            early.setdefault(reader.due, []).append(reader)
    for due, group in early.items():
        loop.call_at(due, _wake, group, crowd)
