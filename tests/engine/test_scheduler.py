"""The scheduler, driven by an engine that computes nothing but keeps account of what every slot must hold.

A computed position needs the K/V of all positions before it.  The fake forward looks it up in the slots that
the row's table names and demands the row's own tokens there; so preemption, prefix reuse, forks and moved
tree paths are all checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import FakePool, make_row

from outrider.cache.pages import Cache
from outrider.control.prefill import PrefillBudget, PrefillPacer
from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import Budget
from outrider.engine.scheduler import Hooks, Limits, Scheduler


def unpaced(decoding: int, tokens: int, waiting: int) -> PrefillBudget:
    return PrefillBudget(tokens)


def paced(chunk: int) -> Callable[[int, int, int], PrefillBudget]:
    """Chunks of so many tokens beside decoding rows."""
    return lambda decoding, tokens, waiting: PrefillBudget(
        tokens, (lambda context, wanted: chunk) if decoding else None
    )


class Engine:
    """Steps of made-up tokens; asserts what must hold in every one."""

    def __init__(
        self,
        rng: random.Random,
        pages: int,
        seats: int,
        tokens: int,
        draft_tree: int,
        pacer: PrefillPacer | None = None,
    ) -> None:
        self.rng, self.tokens, self.draft_tree, self.pacer = rng, tokens, draft_tree, pacer
        self.pool, self.cache = FakePool(), Cache(pages, pages * PAGE + draft_tree + PAGE)
        self.cache.pools = [self.pool]  # type: ignore[list-item]
        self.forgotten: list[Row] = []
        hooks = Hooks(lambda rows: draft_tree, forget=lambda row, _: self.forgotten.append(row))
        if pacer is not None:
            hooks.prefill = pacer.budget
        self.scheduler = Scheduler(self.cache, Limits(seats, tokens), hooks)
        self.admitted: list[Row] = []
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Batch:
        scheduler, self.steps = self.scheduler, self.steps + 1
        decoding = [row for row in scheduler.running if len(row.tokens) - row.computed == 1]
        batch = scheduler.next()
        self.admitted.extend(row for row in batch.rows if row not in self.admitted)
        self.check_batch(batch, decoding)
        self.reserve(batch)
        self.check_budgets(batch)
        self.forward(batch)
        scheduler.clip(batch)
        scheduler.commit(batch)
        self.cache.check()
        for row in batch.rows:
            assert row.finish_reason is not None or len(row.tokens) - row.computed >= 1, (
                "a row has nothing left to compute"
            )
            if row.finish_reason is not None:
                scheduler.retire(row)
        if self.pacer is not None:
            self.pacer.learn(batch, self.rng.expovariate(1.0) * sum(step.known for step in batch))
        return batch

    def check_batch(self, batch: Batch, decoding: list[Row]) -> None:
        assert len(set(map(id, batch.rows))) == len(batch) <= self.scheduler.limits.max_num_seqs
        assert all(step.known >= 1 for step in batch), "a row computes at least one token"
        assert sum(step.known for step in batch) <= self.tokens, "the budget of a step is exceeded"
        for step in batch:
            row = step.row
            assert row in self.scheduler.running
            assert step.start == row.computed
            assert step.end <= len(row.tokens)
            assert row.table is not None and row.table.room >= step.end
        for row in decoding:
            assert row in batch.rows or row not in self.scheduler.running, "a decode had to wait"

    def reserve(self, batch: Batch) -> None:
        before = self.scheduler.preemptions, list(self.scheduler.running)
        wanted = [
            min(self.rng.randint(0, self.draft_tree), step.row.remaining - 1) if step.emits else 0
            for step in batch
        ]
        self.scheduler.reserve(batch, [Budget(n, n) for n in wanted])
        assert (self.scheduler.preemptions, self.scheduler.running) == before, "draft nodes preempted a row"
        assert all(step.budget.nodes <= n for step, n in zip(batch, wanted))

    def check_budgets(self, batch: Batch) -> None:
        assert all(step.budget.nodes >= 0 for step in batch)
        total = sum(step.known + step.budget.nodes for step in batch)
        assert total <= self.tokens, "draft nodes exceed the budget of a step"
        for step in batch:
            assert step.row.table is not None and step.row.table.room >= step.end + step.budget.nodes

    def forward(self, batch: Batch) -> None:
        """Writes every slot of the step first, as a real forward does, then looks at what each row sees."""
        for step in batch:
            row, nodes = step.row, step.budget.nodes
            assert row.table is not None
            slots = row.table.slots
            for p in range(step.start, step.end):
                self.pool.content[int(slots[p])] = tuple(row.tokens[: p + 1])
            if step.emits:
                step.accepted = sorted(self.rng.sample(range(nodes), self.rng.randint(0, nodes)))
                step.emitted = [self.rng.randint(1, 2) for _ in range(len(step.accepted) + 1)]
            for node in range(nodes):
                self.pool.content[int(slots[step.end + node])] = "rejected draft token"
            for d, node in enumerate(step.accepted):
                self.pool.content[int(slots[step.end + node])] = tuple(row.tokens + step.emitted[: d + 1])
        for step in batch:
            row = step.row
            for p in range(step.end):
                assert row.table is not None
                found = self.pool.content[int(row.table.slots[p])]
                assert found == tuple(row.tokens[: p + 1]), "a row sees foreign K/V"


def arrivals(rng: random.Random, count: int, longest: int) -> list[Row]:
    """Requests of one to three samples; prompts of few different pages, so that many share prefixes."""
    rows: list[Row] = []
    for i in range(count):
        pages = [rng.choice(([1] * PAGE, [2] * PAGE)) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        tokens = [t for page in pages for t in page] + [
            rng.randint(1, 2) for _ in range(rng.choice((1, 2, rng.randint(1, PAGE))))
        ]
        tokens = tokens[: longest - 1]
        new = rng.randint(1, longest - len(tokens))
        first = make_row(str(i), tokens, new)
        rows.append(first)
        rows.extend(make_row(str(i), tokens, new, n, first) for n in range(1, rng.choice((1, 1, 1, 2, 3))))
    return rows


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    spare=st.integers(0, 12),
    seats=st.integers(1, 8),
    tokens=st.integers(1, 40),
    draft_tree=st.integers(0, 10),
    aborts=st.booleans(),
    slowdown=st.sampled_from([0, None, 1.01, 2, 1000]),
)
def test_every_request_finishes_and_no_rule_is_broken(
    seed: int, spare: int, seats: int, tokens: int, draft_tree: int, aborts: bool, slowdown: float | None
) -> None:
    """slowdown: what the pacer is given (0: no pacing)."""
    rng = random.Random(seed)
    longest = 6 * PAGE
    tokens = max(tokens, seats)
    pacer = None if slowdown == 0 else PrefillPacer(tokens, slowdown)
    engine = Engine(rng, -(-(longest + draft_tree) // PAGE) + spare, seats, tokens, draft_tree, pacer)
    rows = arrivals(rng, rng.randint(1, 8), longest)
    coming = list(rows)
    while coming or engine.busy:
        for _ in range(rng.choice((0, 1, 2, 8))):
            if coming:
                engine.scheduler.add(coming.pop(0))
        if aborts and rng.random() < 0.05:
            victim = rng.choice(rows)
            if victim.finish_reason is None and victim not in coming:
                engine.scheduler.abort(victim)
                engine.cache.check()
        busy = engine.busy
        batch = engine.step()
        order = [rows.index(row) for row in [*engine.scheduler.running, *engine.scheduler.waiting]]
        assert order == sorted(order), "who came first goes first, the preempted included"
        assert batch.rows or not busy or coming, "nobody runs although somebody waits"
        assert engine.steps < 20_000, "starved"
    for row in rows:
        assert row.finish_reason in (("length", "abort") if aborts else ("length",))
        assert row.finish_reason == "abort" or len(row.tokens) == row.limit
        assert row.table is None
    assert not engine.cache.tables and engine.cache.available == engine.cache.pages
    for row in engine.admitted:
        assert row in engine.forgotten, "the drafter did not forget a row that is gone"
    if not aborts:
        assert engine.admitted == rows, "somebody overtook"


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        assert engine.steps < 2000


def test_a_prompt_is_computed_in_chunks_within_the_budget() -> None:
    engine = Engine(random.Random(0), 20, 2, 7, 0)
    engine.scheduler.add(make_row("a", [1] * 30, 1))
    chunks = [[step.known for step in engine.step()] for _ in range(5)]
    assert chunks == [[7], [7], [7], [7], [2]]
    assert not engine.busy


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    engine = Engine(random.Random(0), 30, 4, 8, 0)
    short, long = make_row("short", [1], 20), make_row("long", [2] * 60, 1)
    engine.scheduler.add(short)
    engine.scheduler.add(long)
    for _ in range(5):
        before = len(short.tokens)
        engine.step()
        assert len(short.tokens) == before + 1
    assert 0 < long.computed < 60


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    engine = Engine(random.Random(0), 4, 4, 64, 0)
    old, young = make_row("old", [1] * PAGE, 2 * PAGE), make_row("young", [2] * PAGE, 2 * PAGE)
    engine.scheduler.add(old)
    engine.scheduler.add(young)
    while not engine.scheduler.preemptions:
        engine.step()
    assert engine.scheduler.running == [old] and list(engine.scheduler.waiting) == [young]
    assert len(young.tokens) > young.prompt and young.computed == 0 and young.table is None
    run(engine)
    assert len(old.tokens) == len(young.tokens) == 3 * PAGE


def test_a_prompt_goes_on_once_the_last_decoding_row_is_preempted() -> None:
    """The step had no tokens for prompts beside that row, and without it must not be empty."""
    beside = [8, 0]  # prompt tokens of two steps beside a decoding row
    hooks = Hooks(prefill=lambda decoding, tokens, _: PrefillBudget(beside.pop(0) if decoding else tokens))
    scheduler = Scheduler(Cache(4, 4 * PAGE), Limits(4, 64), hooks)
    young, prompt = make_row("young", [1] * PAGE, 5), make_row("prompt", [2] * 3 * PAGE, 1)
    young.priority = 1
    scheduler.add(young)
    scheduler.next()
    young.computed = PAGE - 1
    scheduler.add(prompt)
    assert [step.known for step in scheduler.next()] == [1, 8]
    young.tokens.append(3)  # which needs a page more
    young.computed, prompt.computed = PAGE, 8
    batch = scheduler.next()
    assert scheduler.preemptions == 1 and list(scheduler.waiting) == [young]
    assert [(step.row, step.known) for step in batch] == [(prompt, 3 * PAGE - 8)]


def test_drafts_take_free_pages_only() -> None:
    """Two rows and five pages: draft budgets shrink, and no row is preempted for them."""
    engine = Engine(random.Random(0), 3, 2, 64, 40)
    rows = [make_row(str(i), [i + 1] * (PAGE - 1), 9) for i in range(2)]
    for row in rows:
        engine.scheduler.add(row)
    batch = engine.scheduler.next()
    engine.scheduler.reserve(batch, [Budget(20, 20), Budget(20, 20)])
    # the last page goes to the first row; the second keeps its own rest
    assert [step.budget for step in batch] == [Budget(17, 17), Budget(1, 1)]
    assert engine.scheduler.preemptions == 0


def test_step_budget_is_shared_equally_among_drafts() -> None:
    engine = Engine(random.Random(0), 40, 4, 20, 10)
    for i in range(4):
        engine.scheduler.add(make_row(str(i), [i + 1], 30))
    batch = engine.scheduler.next()
    engine.scheduler.reserve(batch, [Budget(10, 10)] * 4)
    assert [step.budget.nodes for step in batch] == [4, 4, 4, 4]


def test_chunk_is_never_negative_when_drafts_take_the_whole_budget() -> None:
    """Three decodes and their draft nodes leave none of four tokens: the prompt gets 0 or 1, never -1."""
    engine = Engine(random.Random(0), 40, 4, 4, 4)
    for i in range(3):
        engine.scheduler.add(make_row(str(i), [i + 1], 50))
    long = make_row("long", [5] * 20, 1)
    engine.scheduler.add(long)  # takes the fourth token of the first step
    seen = 0
    while long.finish_reason is None:
        engine.step()  # asserts that every chunk is positive
        assert long.computed >= seen, "a prompt went backwards"
        seen = long.computed
        assert engine.steps < 300


def test_forked_samples_wait_for_the_prompt_and_share_its_pages() -> None:
    engine = Engine(random.Random(0), 40, 4, 16, 0)
    first = make_row("a", [1] * (2 * PAGE + 3), 5)
    second = make_row("a", first.tokens, 5, 1, first)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    batches = [engine.step() for _ in range(4)]
    assert [len(batch) for batch in batches] == [1, 1, 1, 2]
    assert [step.known for step in batches[3]] == [1, 1], (
        "the second sample computes only the last token of the prompt"
    )
    assert first.table is not None and second.table is not None
    assert first.table.pages[:2] == second.table.pages[:2] and first.table.pages[2] != second.table.pages[2]
    run(engine)


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
def test_aborted_rows_leave_and_free_their_pages(state: str) -> None:
    engine = Engine(random.Random(0), 20, 1, 16, 0)
    first, second = make_row("a", [1] * 5, 3), make_row("b", [2] * 5, 3)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    victim = {"waiting": second, "running": first, "finished": first}[state]
    if state == "finished":
        while first.finish_reason is None:
            engine.step()
    engine.scheduler.abort(victim)
    assert victim.finish_reason == ("length" if state == "finished" else "abort")
    run(engine)
    assert not engine.cache.tables


def test_prompts_beside_decoding_rows_take_no_more_than_their_chunk() -> None:
    cache = Cache(64, 600, False)
    scheduler = Scheduler(cache, Limits(4, 256), Hooks(prefill=paced(20)))
    for length in (300, 5, 300):
        scheduler.add(make_row("a", list(range(length)), 5))
    assert [step.known for step in scheduler.next()] == [256], "nobody is decoding: the whole budget"
    scheduler.running[0].computed = 299
    assert [step.known for step in scheduler.next()] == [1, 5, 15]
