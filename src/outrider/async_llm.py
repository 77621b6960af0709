"""Asynchronous API with vLLM's names: `async for output in AsyncLLM(model).generate(prompt, params)`."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from importlib import import_module
from typing import Any
from uuid import uuid4

from outrider.core.params import SamplingParams
from outrider.core.row import LoRARequest
from outrider.engine import turn
from outrider.errors import EngineError, RankError, RequestError
from outrider.llm import LLM
from outrider.news import Inbox, NewsReader, OnEnd, wake
from outrider.outputs import RequestOutput
from outrider.progress import Request
from outrider.requests import Prompt

# Longest time in seconds that another thread keeps the interpreter while the engine's thread wants it.
# Python's default of 5 ms is longer than a step of a small model.
SWITCH_INTERVAL = 0.0005
QUICK = 1024  # characters, or tokens, that are read in less than a millisecond
FEW = 64  # stop tokens and other entries of a list that are checked in no time
CROWD = 8  # running samples: with more, outputs come less often, as each takes time from the engine
log = logging.getLogger("outrider")


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
        self._news = deque[NewsReader]()  # readers with news, since the last step
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
        """Tokenize a prompt and check its parameters.  Raises RequestError.

        In another thread, unless that would take longer than the reading.
        """
        params = self.llm.get_default_sampling_params() if params is None else params
        reader, given = self.llm.reader, (id or uuid4().hex, prompt, params, lora, priority)
        if lora is None and _is_quick(prompt, params) and not reader.lock.locked():
            request = reader.request(*given)
        else:
            request = await asyncio.to_thread(reader.request, *given)
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
        while more than CROWD samples run, and so on.  With one, outputs have statistics at the end only.
        Raises EngineError, TimeoutError after `timeout` seconds, and RequestError if a logits processor may
        wait for this call.  Closing it ends the requests.
        """
        await self.check_health()
        inbox = Inbox()
        timers = [inbox.loop.call_later(turn.STALL, self._refuse_to_wait, inbox, time.monotonic())]
        if timeout is not None:
            timers.append(inbox.loop.call_later(timeout, inbox.fail, TimeoutError()))
        readers: list[NewsReader] = []
        left = len(requests)
        try:
            for i, request in enumerate(requests):
                reader = NewsReader(inbox, i, request, final, on_end, interval, self._crowd)
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

    def _abort(self, reader: NewsReader) -> None:
        if reader.ticket is not None:
            self.llm.loop.abort(reader.ticket)

    def _refuse_to_wait(self, inbox: Inbox, came: float) -> None:
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

    def _note(self, reader: NewsReader) -> None:
        if reader.note():
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
        if self._news:
            news = [self._news.popleft() for _ in range(len(self._news))]  # others may append
            for loop in {reader.inbox.loop for reader in news}:
                readers = [reader for reader in news if reader.inbox.loop is loop]
                try:
                    loop.call_soon_threadsafe(wake, readers)
                except RuntimeError:  # the event loop is closed: no task reads
                    for reader in readers:
                        self._abort(reader)
        return self._closed

    def _crowd(self) -> int:
        """Factor of the intervals between outputs."""
        return math.ceil(len(self.llm.engine.scheduler.running) / CROWD) or 1


def _is_quick(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request is read in less time than another thread would take to begin."""
    given: Any = prompt
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        given = None if "messages" in prompt else text if ids is None else ids
    if not (isinstance(given, (str, list, tuple)) and len(given) <= QUICK):
        return False
    if not isinstance(params, SamplingParams) or params.n > 1:
        return False
    if params.structured_outputs or params.bad_words or params.prediction:
        return False
    lists = params.stop, params.stop_token_ids, params.allowed_token_ids, params.logit_bias
    return all(len(each or ()) <= FEW for each in lists)
