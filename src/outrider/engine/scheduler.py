"""Scheduler: selects the rows of a step and their numbers of tokens.

- Rows are ordered by priority, then by arrival.
- One token budget is shared by decodes, then draft nodes, then prompt chunks, then admissions.
- Beside decoding rows, prefill pacing (control/prefill.py) limits the chunks further.
- Without a free page, the last row is preempted.  It keeps its tokens and recomputes their K/V.
- Waiting rows are admitted strictly in order, when all their tokens and their LoRA adapter fit.  So no row
  starves among those of its priority.
"""

from __future__ import annotations

import logging
import time
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.cache.pages import Cache
from outrider.control.prefill import PrefillBudget
from outrider.core.block_table import PAGE, BlockTable
from outrider.core.row import LoRARequest, Row
from outrider.core.step import Batch
from outrider.core.tree import Budget
from outrider.engine.adapters import Adapters
from outrider.engine.detokenizer import Detokenizer, find_stop
from outrider.errors import RequestError

log = logging.getLogger("outrider")
NO_PREFILL = PrefillBudget(0)
MOST_BEHIND = 4  # tokens behind a page for which it is asked whether a drafter has filled it


@dataclass(frozen=True)
class Limits:
    """Limits of a step.

    max_num_seqs: rows that run at once.  max_num_batched_tokens: token budget of a step.
    lookbehind: cached tokens that an admitted row recomputes for their hidden states (see Needs).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    lookbehind: int = 0


@dataclass
class Hooks:
    """Functions of controller, pacer and drafter that the scheduler calls.  Defaults: plain decoding.

    draft_nodes  (running rows) -> draft nodes that one of them is likely to get
    prefill      (decoding rows, tokens left of the step, rows whose prompts may be computed)
                 -> prompt tokens that the step may compute
    filled       see Drafter.filled
    forget       see Drafter.forget
    """

    draft_nodes: Callable[[int], int] = lambda rows: 0
    prefill: Callable[[int, int, int], PrefillBudget] = lambda _, tokens, __: PrefillBudget(tokens)
    filled: Callable[[Row], int] = lambda row: row.computed
    forget: Callable[[Row, str], None] = lambda row, reason: None


class Scheduler:
    """Queue of rows.  Owns the pages of every running row."""

    def __init__(self, cache: Cache, limits: Limits, hooks: Hooks, adapters: Adapters | None = None) -> None:
        self.cache, self.limits, self.hooks, self.adapters = cache, limits, hooks, adapters
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.in_flight: set[Row] = set()  # running rows whose step is in flight
        self.preemptions = self.prefix_queries = self.prefix_hits = 0  # the last two count prompt tokens

    def add(self, row: Row) -> None:
        """Queue a row behind those of its priority."""
        insort_right(self.waiting, row, key=_priority)

    def withdraw(self, rows: Sequence[Row]) -> None:
        """Take rows out of the queue, as if they had not been added."""
        self.waiting = deque(row for row in self.waiting if row not in rows)

    def abort(self, row: Row) -> None:
        """End a row.  One whose step is in flight leaves when that is completed."""
        if row in self.waiting:
            self.waiting.remove(row)
        row.finish_reason = row.finish_reason or "abort"
        if row not in self.in_flight:
            self.retire(row)

    def clear(self, rows: Iterable[Row]) -> None:
        """Empty the queues; `rows` and all queued rows lose their pages.  The caller clears the caches."""
        for row in {*rows, *self.running, *self.waiting}:
            if row.table is not None:
                self._forget(row, "preempted")
            row.table = row.adapter = None
            row.computed = 0
        self.running.clear()
        self.waiting.clear()
        self.in_flight.clear()

    def next(self, overlap: int = 1) -> Batch:
        """The rows of the next step, with slots for their known tokens.

        overlap: steps in flight at once, each of which gets its share of the rows.
        """
        batch, decodes, drafting, preemptions = Batch(), 0, 0, self.preemptions
        for row in list(self.running):
            if row.finish_reason is not None and row not in self.in_flight:
                self.retire(row)  # only after a step that was interrupted
            elif len(row.tokens) - row.computed == 1:
                decodes += 1
                drafting += row.params.speculate
        num_rows = len(self.running)
        prefilling = self.waiting or decodes < num_rows
        budget = self._prefill_budget(decodes, drafting) if prefilling else NO_PREFILL
        self._add_running(batch, budget, -(-num_rows // overlap))
        if not batch and self.preemptions > preemptions:
            return self.next(overlap)  # prompts got no tokens beside decoding rows, which are preempted now
        if self.waiting:
            num_rows = min(len(self.running) + len(self.waiting), self.limits.max_num_seqs)
            self._add_waiting(batch, budget, -(-num_rows // overlap))
            batch.waiting = max(0, num_rows - len(self.running)) // overlap
        return batch

    def _add_running(self, batch: Batch, budget: PrefillBudget, most: int) -> None:
        """Add running rows, at most so many: with the pending token, or with a chunk of the prompt."""
        for row in list(self.running):
            if row.table is None or row in self.in_flight or len(batch) == most:
                continue  # it has just been preempted, or is in flight, or for the next batch
            known = len(row.tokens) - row.computed
            if known > 1:
                known = budget.take(known, row.computed)
            end = row.computed + known
            if known and (end <= row.table.room or self._room(row, end)):
                batch.add(row, known)

    def _add_waiting(self, batch: Batch, budget: PrefillBudget, most: int) -> None:
        """Admit waiting rows in order, until the batch has so many rows or one does not fit."""
        while self.waiting and len(batch) < most and not budget.exhausted:
            if len(self.running) >= self.limits.max_num_seqs or not self._admit(self.waiting[0]):
                break
            row = self.waiting.popleft()
            if row.error is not None:
                batch.failed.append(row)
                continue
            insort_right(self.running, row, key=_priority)
            batch.add(row, budget.take(len(row.tokens) - row.computed, row.computed))

    def _prefill_budget(self, decodes: int, drafting: int) -> PrefillBudget:
        """Prompt tokens of a step with so many decoding rows, `drafting` of which get draft nodes."""
        left = self.limits.max_num_batched_tokens - decodes
        draft_nodes = drafting * self.hooks.draft_nodes(len(self.running))
        waiting = min(len(self.running) + len(self.waiting), self.limits.max_num_seqs) - decodes
        return self.hooks.prefill(decodes, left - min(draft_nodes, left // 2), waiting)  # prefill keeps half

    def reserve(self, batch: Batch, budgets: Sequence[Budget]) -> None:
        """Grant budgets, with slots for the draft nodes.

        Draft nodes take free pages and never preempt a row: the budget shrinks instead.
        """
        known = drafting = 0
        for step, budget in zip(batch, budgets):
            known += step.known
            drafting += budget.nodes > 0
        if not drafting:
            return
        fair = (self.limits.max_num_batched_tokens - known) // drafting
        for step, budget in zip(batch, budgets):
            if not budget.nodes:
                continue
            table, nodes, end = step.row.table, min(budget.nodes, fair), step.start + step.known
            assert table is not None
            if end + nodes > table.room and not self.cache.reserve(table, end + nodes):
                nodes = min(nodes, table.room - end)
            step.budget = budget if nodes == budget.nodes else budget.within(nodes=nodes)

    def clip(self, batch: Batch) -> None:
        """End rows at EOS, stop ids, stop strings, max_tokens and the context limit.

        Drop tokens past the end.
        """
        for step in batch:
            row = step.row
            if row.error is not None or row.finish_reason is not None:  # aborted while the step was in flight
                row.finish_reason = row.finish_reason or "error"
                step.emitted, step.accepted = [], []
            for count, token in enumerate(step.emitted, start=1):
                row.tokens.append(token)
                may_end = token in row.ending or row.text is not None or len(row.tokens) >= row.limit
                if may_end and self._ends(row, token):
                    step.shorten(count)
                    break

    def commit(self, batch: Batch) -> None:
        """Move accepted paths to consecutive slots, free the other draft pages, and index full pages."""
        self._move_accepted(batch)
        for step in batch:
            row, table = step.row, step.row.table
            assert table is not None
            # only now: a step that was interrupted before, even in the middle of `move`, is computed again
            row.computed = step.start + step.known + len(step.accepted)
            length = max(len(row.tokens), row.computed)
            if table.room - length >= PAGE:
                self.cache.shrink(table, length)
            # Drafters read a prompt after its step, and tokens some steps later.  Without drafts they fill no
            # page, so the step that completes it asks once.
            most = MOST_BEHIND if step.tree.tokens else 0
            behind = row.computed % PAGE - len(step.accepted)
            fills = behind <= most or step.known > 1 or step.start == row.prompt
            if fills and row.computed >= (len(table.nodes) + 1) * PAGE:
                self.share(row)
        if self.in_flight:
            self.in_flight.difference_update(batch.rows)

    def _move_accepted(self, batch: Batch) -> None:
        """Copy K/V of accepted nodes to the slots after the known tokens, in position order."""
        sources: list[int] = []  # `list[int]()` takes 10 µs right behind a forward
        targets: list[int] = []
        for step in batch:
            if not step.accepted:
                continue
            slots = step.row.slots
            for place, node in enumerate(step.accepted):
                if node != place:
                    sources.append(slots[step.end + node])
                    targets.append(slots[step.end + place])
        if sources:
            self.cache.pools[0].move(sources, targets)

    def share(self, row: Row) -> None:
        """Index the full pages of a row for reuse, as far as target and drafter have filled them."""
        assert row.table is not None
        self.cache.register(row.table, row.tokens, min(row.computed, self.hooks.filled(row)))

    def retire(self, row: Row) -> None:
        """Free everything that the row holds."""
        if row in self.running:
            self.running.remove(row)
        self._release(row, "finished")

    def _ends(self, row: Row, token: int) -> bool:
        if token in row.ending and len(row.tokens) - row.prompt >= row.params.min_tokens:
            row.finish_reason = "stop"
            row.stop_reason = token if token in (row.params.stop_token_ids or ()) else None
            if row.text is not None and row.params.include_stop_str_in_output:
                row.text.feed(token)
        elif row.text is not None:  # a token that ends the text is not part of it
            self._detokenize(row, row.text, token)
        if row.finish_reason is None and len(row.tokens) >= row.limit:
            row.finish_reason = "length"
        return row.finish_reason is not None

    def _detokenize(self, row: Row, text: Detokenizer, token: int) -> None:
        fresh = text.feed(token)
        if fresh and row.params.stop and len(row.tokens) - row.prompt >= row.params.min_tokens:
            found = find_stop(text.text, len(fresh), tuple(row.params.stop))
            if found:
                start, stop = found
                end = start + len(stop) if row.params.include_stop_str_in_output else start
                text.text = text.text[:end]
                row.finish_reason, row.stop_reason = "stop", stop

    def _room(self, row: Row, length: int) -> bool:
        """Reserve pages for a running row, preempting the last ones as needed.

        Returns False if the row itself was preempted, or has to wait for a step in flight.
        """
        while row.table is not None:
            if self.cache.reserve(row.table, length):
                return True
            if self.running[-1] in self.in_flight:
                return False
            self._preempt(self.running[-1])
        return False

    def _preempt(self, row: Row) -> None:
        self.running.remove(row)
        self._release(row, "preempted")
        row.computed = 0
        insort_left(self.waiting, row, key=_priority)
        self.preemptions += 1

    def _release(self, row: Row, reason: str) -> None:
        if row.table is not None:
            self._forget(row, reason)
            self.cache.close(row.table)
            row.table = row.adapter = None

    def _forget(self, row: Row, reason: str) -> None:
        """Let the drafter forget a row, which leaves even if that fails."""
        try:
            self.hooks.forget(row, reason)
        except Exception:
            log.exception("the drafter cannot forget a row of request %r", row.id)

    def _admit(self, row: Row) -> bool:
        """Open a block table for a waiting row, with reusable pages; False, without effect, if it is full."""
        source = row.source
        if source is not None and source.table is not None and source.computed < row.prompt:
            return False  # its prompt is being computed right now
        if row.lora is not None and not self._adapt(row, row.lora):
            return row.error is not None
        row.table = table = self.cache.open(row.cache_root)
        if not (self._reuse_pages(row, table) and self.cache.reserve(table, len(row.tokens))):
            self.cache.close(table)
            row.table, row.adapter, row.computed = None, None, 0
            return False
        self.cache.use_snapshot(table)
        if row.cached is None:
            row.cached, row.queued = row.computed, time.perf_counter() - row.entered
            self.prefix_queries += row.prompt
            self.prefix_hits += row.computed
        return True

    def _reuse_pages(self, row: Row, table: BlockTable) -> bool:
        """Share pages with the sample that has the same prompt, or with an indexed prefix; set `computed`.

        Returns False if there is no free page for a copy.
        """
        source, fits = row.source, True
        if source is not None and source.table is not None and self.cache.states:
            self.share(source)  # with a snapshot of its prompt
            source = None
        if source is not None and source.table is not None:
            row.computed = min(row.prompt - 1, self.hooks.filled(source))
            fits = self.cache.fork(source.table, table, row.computed)
        else:
            row.computed = self.cache.match(table, row.tokens, row.reusable)
        row.computed = max(0, row.computed - self.limits.lookbehind)
        return fits

    def _adapt(self, row: Row, lora: LoRARequest) -> bool:
        """Load the row's LoRA adapter.

        Returns False while too many others are in use, or if loading failed (see Row.error).
        """
        assert self.adapters is not None
        try:
            used = {other.lora.lora_int_id for other in self.running if other.lora}
            row.adapter = self.adapters.take(lora, used)
        except RequestError as error:
            row.error, row.finish_reason = error, "error"
        return row.adapter is not None


def _priority(row: Row) -> int:
    return row.priority
