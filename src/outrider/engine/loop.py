"""Engine loop shared by several threads, whose requests form one continuous batch.

The loop has no background thread.  One of the waiting threads, the driver, runs the steps for all of them
until its own condition holds.  Then the next thread becomes the driver.

    thread A   submit  run_until [step step step] -> returns
    thread B     submit  run_until (waits ........ [step step] -> returns
    thread C                 abort: takes effect before the next step

A server drives from one thread with `run_until(closed)`, which sleeps while no request is open.  Progress
arrives through the `on_news` callback of `submit`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from outrider.core.row import Row
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, EngineError, RankError, RequestError

MAX_WAIT = 1.0  # timeout of a waiting thread, in seconds: an interrupt in another thread can lose its wake-up
log = logging.getLogger("outrider")


class Ticket:
    """One request in the loop.  `finished` is set between steps, once all its rows have ended."""

    def __init__(self, rows: Sequence[Row], on_news: Callable[[], None] | None) -> None:
        self.id, self.rows, self.on_news = rows[0].id, rows, on_news
        self.finished = False

    def fail(self, error: Exception) -> None:
        """End the unfinished rows with this error."""
        for row in self.rows:
            if row.finish_reason is None:
                row.error, row.finish_reason = error, "error"


class EngineLoop:
    """Owner of an engine.  Every method may be called from any thread.

    Invariant: only the driver accesses the engine and the rows of open tickets.  Without a driver, the holder
    of the lock may.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tickets: dict[str, Ticket] = {}  # open requests, by id
        self._lock = threading.RLock()  # guards all that follows
        self._waiters: list[threading.Lock] = []
        self._driver: int | None = None
        self._arriving: list[Ticket] = []  # not in the engine yet
        self._aborted: list[Ticket] = []
        self._stopped: Exception | None = None
        self._process = os.getpid()

    def submit(self, rows: Sequence[Row], on_news: Callable[[], None] | None = None) -> Ticket:
        """Queue the rows of a request, which carry its id.

        on_news: called by the driver, between steps, after the rows grew or ended.  It must be quick.
        `abort` is the only method that it may call.
        Raises RequestError if the id belongs to an open request or the caller is inside a step, and the error
        of `stop` after it.
        """
        self.engine.turn.refuse_reentry()
        self._refuse_fork()
        ticket = Ticket(rows, on_news)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if ticket.id in self.tickets:
                text = f"request id {ticket.id!r} belongs to a request that still runs: give each its own."
                raise RequestError(text, "request_id")
            self.tickets[ticket.id] = ticket
            self._arriving.append(ticket)
            self._between_steps()
        return ticket

    def _refuse_fork(self) -> None:
        """Raise EngineError in a process that was forked while requests were open: it lacks their driver."""
        if self._process != os.getpid():
            if self.tickets:
                raise EngineError(
                    "this process was forked while requests were running: load the model in it."
                )
            self._process = os.getpid()

    def abort(self, request: str | Ticket) -> None:
        """End a request before the next step, with finish_reason "abort".

        request: its id, or its ticket.  A later request of the same id has another ticket.
        Requests that are not open are ignored.
        """
        with self._lock:
            ticket = self.tickets.get(request if isinstance(request, str) else request.id)
            if ticket is not None and (ticket is request or isinstance(request, str)):
                self._aborted.append(ticket)
                self._between_steps()

    def stop(self, error: Exception) -> None:
        """End every open request with this error before the next step, and refuse those that follow."""
        with self._lock:
            self._stopped = error
            for ticket in self.tickets.values():
                ticket.fail(error)
            self._aborted += self.tickets.values()
            self._between_steps()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Return once `done()` is true.

        It is evaluated under the lock, at first and after each step with news.

        Errors of a step are raised in the thread that drove it.  An Exception also ends every request in the
        engine with an EngineError.  A KeyboardInterrupt undoes the step, and the other threads continue.
        Raises RequestError in a thread that waits for a logits processor which may wait for that thread.
        """
        me = threading.get_ident()
        self.engine.turn.refuse_reentry()
        if self._driver == me:
            raise RequestError("the engine cannot be called from on_news: only abort can.")
        try:
            try:
                self._run(done, me)
            finally:
                self._leave(me)
        finally:
            self._leave(me)  # again: an interrupt may have come in the first call

    def wake(self) -> None:
        """Evaluate every `done()` again."""
        with self._lock:
            self._notify()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Exclude all requests while the engine is changed.  Raises ConfigError while requests are open."""
        if self.tickets or self.engine.busy:
            raise ConfigError("the drafter cannot be changed while requests are running.")
        with self.engine.turn.taken(), self._lock:
            if self.tickets or self.engine.busy:
                raise ConfigError("the drafter cannot be changed while requests are running.")
            yield

    def _run(self, done: Callable[[], bool], me: int) -> None:
        arrival = time.monotonic()
        while True:
            with self._lock:
                if done():
                    return
                waiter = self._drive_or_wait(me)
            if waiter is None:
                self.engine.turn.wait_for_processor(arrival)  # of another engine on the same weights
                self._step()
            elif not waiter.acquire(timeout=MAX_WAIT):
                self.engine.turn.check_processor(arrival)

    def _leave(self, me: int) -> None:
        """Release the role of driver."""
        with self._lock:
            if self._driver == me:
                self._report(list(self.tickets.values()))  # notifications that an interrupt prevented
                self._settle()
                self._driver = None
            self._notify()

    def _drive_or_wait(self, me: int) -> threading.Lock | None:
        """Become the driver and return None, or return a lock that is released at the next news."""
        if self._driver in (None, me) and (self._arriving or self._aborted or self.engine.busy):
            self._driver = me
            self._settle()
            return None
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        return waiter

    def _notify(self) -> None:
        """Wake every waiting thread."""
        while self._waiters:
            self._waiters.pop().release()

    def _step(self) -> None:
        """Run one step of the engine and notify its listeners.  Called by the driver."""
        if not self.engine.busy:
            return
        try:
            rows = self.engine.step()
        except BaseException as error:
            with self._lock:
                self._recover(error)
            raise
        with self._lock:
            tickets = self.tickets
            grown = {row.id: tickets[row.id] for row in rows if row.id in tickets}
            self._report(grown.values(), grown=True)

    def _between_steps(self) -> None:
        """Settle now if no thread drives; otherwise leave it to the driver."""
        if self._driver is None:
            self._settle()
        self._notify()

    def _settle(self) -> None:
        """Bring arrivals into the engine and take aborted requests out."""
        while self._arriving:
            rows = self._arriving[0].rows
            try:
                for row in rows:
                    self.engine.add(row)
            except BaseException:  # an interrupt: the next call adds them all
                self.engine.scheduler.withdraw(rows)
                raise
            self._arriving.pop(0)
        while self._aborted:
            ticket = self._aborted.pop()
            for row in ticket.rows:
                self.engine.abort(row)
            self._report([ticket])

    def _report(self, tickets: Iterable[Ticket], grown: bool = False) -> None:
        """Close the tickets that ended, and call on_news of these and of those that grew."""
        for ticket in tickets:
            ended = None not in [row.finish_reason for row in ticket.rows]
            if ended:
                ticket.finished = True
            if ticket.on_news is not None and (grown or ended):
                try:
                    ticket.on_news()
                except Exception:  # a failed listener must not stop the other requests
                    log.exception("on_news of request %r failed", ticket.id)
                    ticket.on_news = None
                    self._aborted.append(ticket)
                self._notify()
            if ended:
                self._notify()
                # Last statement: if an interrupt comes earlier, `_leave` repeats the notification.
                self.tickets.pop(ticket.id, None)

    def _recover(self, error: BaseException) -> None:
        """Undo a step that raised.

        An Exception ends all requests in the engine; an interrupt requeues them.
        """
        tickets = [ticket for ticket in self.tickets.values() if ticket not in self._arriving]
        rows = [row for ticket in tickets for row in ticket.rows]
        self.engine.restart(rows)
        if isinstance(error, Exception):
            failure: Exception = error
            if not isinstance(error, RankError):
                failure = EngineError(f"a step of the engine failed with {type(error).__name__}: {error}")
                failure.__cause__ = error
            for ticket in tickets:
                ticket.fail(failure)
        for row in rows:
            if row.finish_reason is None:
                self.engine.add(row)
        self._report(tickets)
