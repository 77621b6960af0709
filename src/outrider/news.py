"""News of requests for the tasks of an event loop, from the thread that steps the engine.

    engine's thread        note   note   note   note    note      what is new is kept, between two steps
    event loop       wake <-'                |            |       the first news come at once,
                      '--- interval --- wake '- interval wake     the others as a timer ends,
                                                                  and the last at once

So with an interval the engine's thread wakes the event loop for the first and the last output of a request
alone, and one timer serves all requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context

from outrider.engine.loop import Ticket
from outrider.outputs import RequestOutput
from outrider.progress import Request, RowState

OnEnd = Callable[[int, RequestOutput], None]  # (index of the request, its last output)
Crowd = Callable[[], int]  # factor of the interval


class Inbox:
    """News of the requests of one task, in its event loop."""

    def __init__(self) -> None:
        self.loop, self.context = asyncio.get_running_loop(), copy_context()
        self.news: dict[int, NewsReader] = {}  # by index, what the task has not read
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None  # of the task, while it waits

    def fail(self, error: Exception) -> None:
        self.error = error
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def add(self, reader: NewsReader) -> None:
        self.news[reader.index] = reader
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> list[NewsReader]:
        """The readers with news, at least one.  Raises the error of `fail`."""
        if not self.news and self.error is None:
            self.waiter = self.loop.create_future()
            await self.waiter
        if self.error is not None:
            raise self.error
        news, self.news = self.news, {}
        return list(news.values())


class NewsReader:
    """Receiver of one request's news.  Keeps the newest states only.

    index: of the request among those of its task.  final: receives the end only.
    interval: seconds between two wakings of the task, the first and the last one aside, times `crowd()`.  A
    timer ends it, whether or not a step adds to what is there, at a multiple of the interval: at once for all
    tasks.

    states: set by the thread that steps.  shown: those of the last waking, of which the task gets the output:
    a later end is news of its own.
    fresh: `states` are news for the task.  called: a call of `wake` will look at them.
    The thread that steps sets `fresh` before it reads `called`.  The event loop clears `called` before it
    reads `fresh`.  So one of them sees the other, and no news are left.
    """

    def __init__(
        self,
        inbox: Inbox,
        index: int,
        request: Request,
        final: bool = False,
        on_end: OnEnd | None = None,
        interval: float = 0.0,
        crowd: Crowd = lambda: 1,
    ) -> None:
        self.inbox, self.index, self.request, self.final, self.on_end = inbox, index, request, final, on_end
        self.interval, self.crowd = interval, crowd
        self.due: float | None = None  # end of the interval, by a timer; None: the next news are told at once
        self.ticket: Ticket | None = None  # once the request is queued
        self.states: Sequence[RowState] = ()
        self.shown: Sequence[RowState] = ()
        self.last: RequestOutput | None = None
        self.fresh = self.called = False
        self.told = False  # the task has been woken for the end, or shall be no more

    def note(self) -> bool:
        """Take the states of the request's rows.  Returns whether the event loop has to call `wake`.

        Called by the thread that steps, between steps.  With an interval, most states are replaced before the
        task reads them, and only those of ended rows have statistics.
        """
        finished = self.request.finished
        if self.final and not finished:
            return False
        self.states = self.request.states(brief=self.interval > 0)
        self.fresh = True
        if self.called and not finished:
            return False
        self.called = True
        return True

    def wake(self, now: float, crowd: int) -> float | None:
        """Wake the task if there are news.  Returns the end of the interval that begins, if one does."""
        if not self.fresh and self.due is None:
            self.called = False
        if not self.fresh or self.told:
            return None
        self.fresh = False  # before `states` is read
        states = self.states
        ended = None not in [state.finish_reason for state in states]
        if self.due is not None and not ended:
            self.fresh = True  # until the timer
            return None
        self.called, self.told, self.shown = True, ended, states
        self._tell(ended)
        if ended:
            return None
        if not self.interval:
            self.called = False
            if self.fresh:  # noted since, and by no other call
                self.inbox.loop.call_soon(wake, [self])
            return None
        interval = crowd * self.interval
        self.due = (now // interval + 1) * interval
        return self.due

    def _tell(self, ended: bool) -> None:
        """Wake the task; with an error if the last output cannot be made."""
        try:
            if self.on_end is not None and ended:
                # before the task reads it
                self.inbox.loop.call_soon(self.on_end, self.index, self.output(), context=self.inbox.context)
            self.inbox.add(self)
        except Exception as error:
            self.inbox.fail(error)

    def close(self) -> None:
        """Wake the task no more."""
        self.on_end, self.told = None, True

    def output(self) -> RequestOutput:
        """The output so far: always the same object."""
        if not self.final:
            made = self.request.extended(self.shown)
            if self.due is not None and self.request.detokenizes and not made.outputs[0].text:
                self.due = None  # the interval begins with the first text
                self.inbox.loop.call_soon(wake, [self])
            return made
        self.last = self.last or self.request.output(self.shown)
        return self.last


def wake(readers: Sequence[NewsReader]) -> None:
    """Wake the tasks of one engine's readers in one event loop, and again when their interval is over."""
    loop, crowd = readers[0].inbox.loop, readers[0].crowd()
    now, timers = loop.time(), dict[float, list[NewsReader]]()
    for reader in readers:
        if (due := reader.wake(now, crowd)) is not None:
            timers.setdefault(due, []).append(reader)
    for due, group in timers.items():
        loop.call_at(due, _over, group, due)


def _over(readers: Sequence[NewsReader], due: float) -> None:
    """End an interval."""
    if ending := [reader for reader in readers if reader.due == due]:
        for reader in ending:
            reader.due = None
        wake(ending)
