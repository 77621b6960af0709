"""Drafters that learn across requests: what they learn of a cache_salt is drafted for that salt alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import Budget
from outrider.draft.lookahead import Lookahead
from outrider.draft.recycle import RANKS, Recycle
from outrider.draft.suffix import Suffix
from outrider.drafting.salts import MOST_SALTS
from outrider.testing import drafted_batch, make_drafter, make_row, proposed_tree

PROMPT, ANSWER = [*range(30)], [*range(100, 112)]


def teach_suffix(drafter: Suffix, salt: str | None) -> None:
    drafter.forget(make_row([*PROMPT, *ANSWER], prompt=len(PROMPT), cache_salt=salt), "finished")


def teach_recycle(drafter: Recycle, salt: str | None) -> None:
    row = make_row([*PROMPT, *ANSWER], cache_salt=salt)
    step = RowStep(row, 0, len(row.tokens), topk=[[7] * RANKS])
    step.emitted = [999]
    drafter.observe(Commit(Batch([step])))
    drafter.forget(row, "finished")


def teach_lookahead(drafter: Lookahead, salt: str | None) -> None:
    row = make_row([*PROMPT, *ANSWER], cache_salt=salt)
    batch = drafted_batch(drafter, row, Budget(4, drafter.size(4)))
    batch[0].emitted = [999]
    drafter.observe(Commit(batch))
    drafter.forget(row, "finished")


CASES: list[tuple[Any, Callable[[Any, str | None], None]]] = [
    (Suffix, teach_suffix), (Recycle, teach_recycle), (Lookahead, teach_lookahead)
]  # fmt: skip


def drafted(drafter: Any, row: Row) -> list[int]:
    tree = proposed_tree(drafter, row, Budget(2, drafter.size(2)))
    drafter.forget(row, "preempted")
    return list(tree.tokens[: tree.size])


@pytest.mark.parametrize(("method", "teach"), CASES)
@pytest.mark.parametrize("taught", ["mine", None])
def test_what_is_learned_of_a_salt_is_drafted_for_it_alone(method: Any, teach: Any, taught: Any) -> None:
    drafter = make_drafter(method)
    teach(drafter, taught)
    for salt in ("theirs", None, "mine"):
        found = drafted(drafter, make_row([*PROMPT, 100], prompt=30, cache_salt=salt))
        assert (found[:1] == [101]) == (salt == taught), salt
        assert drafter.grade(make_row(PROMPT, cache_salt=salt)) == 0 or salt == taught


@pytest.mark.parametrize(("method", "teach"), CASES)
def test_the_last_salts_are_kept(method: Any, teach: Any) -> None:
    drafter = make_drafter(method)
    for number in range(MOST_SALTS + 2):
        teach(drafter, str(number))
    known = [
        bool(drafted(drafter, make_row([*PROMPT, 100], prompt=30, cache_salt=str(number)))[:1] == [101])
        for number in range(MOST_SALTS + 1, -1, -1)
    ]
    assert known[:3] == [True] * 3 and known[-2:] == [False] * 2
    assert len(drafter.salted.kept) == MOST_SALTS and not drafter.salted.rows


def test_running_rows_of_more_salts_keep_what_they_learned() -> None:
    drafter = make_drafter(Recycle)
    rows = [make_row([1, 2, 3], cache_salt=str(number)) for number in range(2 * MOST_SALTS)]
    for round in (1, 2):
        for row in rows:
            step = RowStep(row, 0, 3, topk=[[7] * RANKS])
            step.emitted = [9]
            drafter.observe(Commit(Batch([step])))
        if round == 1:
            tables = [drafter.salted.of(row) for row in rows]
    assert all(drafter.salted.of(row) is table for row, table in zip(rows, tables))


METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle"},
    "lookahead": {"method": "lookahead"},
    "mixed": {"method": "union", "drafters": [{"method": "suffix"}, {"method": "recycle"}]},
    "staged": {"model": "builtin-draft", "drafter": {"method": "recycle"}},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_new_salt_is_drafted_for_as_by_a_new_engine(name: str) -> None:
    """Draft tokens and accepted ones, which a client sees, tell nothing of requests of other salts."""

    def counts(llm: LLM, prompt: list[int], salt: str | None) -> tuple[int, int, int]:
        given: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=1)
        (output,) = llm.generate([given], params)
        stats = output.speculation
        return stats.steps, stats.drafted, stats.accepted

    rng = random.Random(5)
    prompt = [rng.randrange(300, 900) for _ in range(40)]
    used, new = (LLM("builtin", speculative_config=METHODS[name], max_model_len=256) for _ in range(2))
    first = counts(used, prompt, "mine")
    assert counts(used, prompt, "theirs") == first
    assert counts(used, prompt, None) == first == counts(new, prompt, None)
    assert not name.startswith("suffix") or counts(used, prompt, "mine") != first, "learned for itself"
