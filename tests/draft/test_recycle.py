"""Token recycling: the published tree, a table that equals a dictionary, and what the engine hands over of
the logits.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, ConfigError, SamplingParams
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import ROOT, DraftTree
from outrider.draft.draft_model.staged import Staged
from outrider.draft.recycle import JUDGED, PATHS, RANKS, Recycle
from outrider.testing import FakeTarget, make_drafter, make_row, propose_tree, replay


def taught(drafter: Recycle, following: dict[int, list[int]]) -> Recycle:
    for token, ids in following.items():
        drafter.memory.put(token, ids)
    return drafter


def commit(
    drafter: Recycle, tree: DraftTree, tokens: list[int], accepted: list[int], topk: list[list[int]]
) -> None:
    """A step of one row that decodes: it held `tokens`, and emits what it accepted and 999."""
    step = RowStep(make_row(tokens), len(tokens) - 1, 1, tree=tree, accepted=accepted, topk=topk)
    step.emitted = [*(tree.tokens[i] for i in accepted), 999]
    drafter.observe(Commit(Batch([step])))


def test_the_tree_is_the_published_one() -> None:
    assert len(PATHS) == len(set(PATHS)) == 80
    assert Counter(map(len, PATHS)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    for path in PATHS:
        assert path[:-1] in PATHS or len(path) == 1
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in PATHS


def test_the_whole_tree_is_filled_from_the_table() -> None:
    """A table in which the child of rank j of token x is 8 x + j + 1, so that a token tells its path."""
    drafter = taught(
        make_drafter(Recycle, nodes=80, min_token_prob=0.0),
        {x: [8 * x + j + 1 for j in range(8)] for x in range(124)},
    )
    tree = propose_tree(drafter, make_row([5, 0]), 6)
    ranks: dict[int, tuple[int, ...]] = {ROOT: ()}
    tokens = {ROOT: 0}
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        ranks[i] = (*ranks[parent], token - 8 * tokens[parent] - 1)
        tokens[i] = token
        assert tree.confidence[i] == drafter.memory.acceptance[ranks[i][-1]]
    reachable = {path for path in PATHS if all(inner(path[:n]) < 124 for n in range(len(path)))}
    assert set(ranks.values()) - {()} == reachable
    assert len(reachable) > 60
    small = propose_tree(drafter, make_row([0]), 2, 9)
    assert len(small.tokens) == 9 and small.tokens[0] == 1


def inner(path: tuple[int, ...]) -> int:
    token = 0
    for rank in path:
        token = 8 * token + rank + 1
    return token


def test_unknown_tokens_and_unlikely_paths_are_not_drafted() -> None:
    drafter = make_drafter(Recycle)
    assert propose_tree(drafter, make_row([1]), 6).tokens == []
    taught(drafter, {1: [2, 3, 4, 5, 6, 7, 8, 9]})
    tree = propose_tree(drafter, make_row([1]), 6)
    assert tree.tokens == [2, 3, 4, 5] and set(tree.parents) == {ROOT}
    assert propose_tree(make_drafter(Recycle), make_row([1]), 0).tokens == []
    taught(strict := make_drafter(Recycle, min_token_prob=0.3), {1: [2, 3, 4, 5, 6, 7, 8, 9]})
    assert propose_tree(strict, make_row([1]), 6).tokens == [2]


def test_what_the_target_saw_replaces_what_was_known() -> None:
    """Candidates are stored at every node, accepted or not, and for prompt tokens."""
    drafter = make_drafter(Recycle)
    tree = DraftTree([7, 8], [-1, -1], [0.5, 0.5])
    commit(drafter, tree, [1, 2], [1], [list(range(10, 18)), list(range(20, 28)), list(range(30, 38))])
    assert [drafter.memory.after(token).tolist()[0] for token in (1, 2, 7, 8)] == [-1, 10, 20, 30]
    drafter.observe(Commit(Batch([RowStep(make_row([2, 12, 2, 99, 5]), 0, 4, emits=False)])))
    assert drafter.memory.after(2).tolist() == [99, 12, 10, 11, 13, 14, 15, 16]
    assert drafter.memory.after(12).tolist() == [2] + [-1] * 7
    assert drafter.memory.after(99).tolist() == [-1] * 8


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 12), st.permutations(range(8)))), max_size=40
    )
)
def test_the_table_equals_a_dictionary_of_lists(puts: list[tuple[int, Any]]) -> None:
    table = make_drafter(Recycle).memory
    naive: dict[int, list[int]] = {}
    for token, what in puts:
        if isinstance(what, int):
            table.put_first(token, what)
            naive[token] = [what, *(i for i in naive.get(token, []) if i != what)][:RANKS]
        else:
            table.put(token, what)
            naive[token] = list(what)
    for token in range(3):
        ids = naive.get(token, [])
        assert table.after(token).tolist() == ids + [-1] * (RANKS - len(ids))
    assert set(table.next[3 * RANKS :]) == {-1}


def test_ranks_are_judged_along_the_path_only() -> None:
    drafter = taught(
        make_drafter(Recycle, nodes=20, min_token_prob=0.0),
        {x: list(range(x + 10, x + 18)) for x in (1, 11, 12)},
    )
    before = list(drafter.memory.acceptance)
    tree = propose_tree(drafter, make_row([1]), 2)
    second = tree.tokens.index(12)
    commit(drafter, tree, [1], [second], [[0] * 8 for _ in range(len(tree.tokens) + 1)])
    after = drafter.memory.acceptance
    assert after[1] == pytest.approx((before[1] * 0.98 + 0.02) * 0.98), "right at the root, wrong below it"
    for rank in (0, *range(2, RANKS)):
        assert after[rank] == pytest.approx(before[rank] * 0.98**2), "wrong at the root and below it"


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_the_ranks_of_a_large_batch_are_judged_in_turns(batches: int) -> None:
    """Also of each of several batches that take turns themselves."""
    drafter, judged = make_drafter(Recycle), Counter[int]()
    rows = [[make_row([100 * b + i], id=f"{b} {i}") for i in range(64)] for b in range(batches)]
    judge = drafter._judge

    def counted(table: Any, last: int, emitted: Any) -> None:
        judged[last] += 1
        judge(table, last, emitted)

    drafter._judge = counted  # type: ignore[method-assign]
    for _ in range(27):
        for part in rows:
            before = judged.total()
            drafter.observe(Commit(Batch([RowStep(row, 0, 1, emitted=[7]) for row in part])))
            assert 0 < judged.total() - before <= JUDGED
    assert len(judged) == 64 * batches and max(judged.values()) - min(judged.values()) <= 1


def test_what_the_target_emits_does_not_judge_ranks_for_a_draft_model() -> None:
    """Its own picks do, of the same text: each was judged twice."""
    host: Any = SimpleNamespace(target=FakeTarget(), vocabulary=100)
    staged = Staged({"method": "recycle"}, host)
    drafter: Any = taught(staged.drafter, {1: list(range(10, 18))})  # type: ignore[arg-type]
    before = list(drafter.memory.acceptance)
    staged.observe(Commit(Batch([RowStep(make_row([3, 4, 1]), 0, 3, emitted=[10])])))
    assert drafter.memory.acceptance == before
    assert drafter.memory.after(3)[0] == 4, "the text is passed on"


def test_ranks_that_always_fail_are_dropped() -> None:
    drafter = taught(make_drafter(Recycle), {1: list(range(2, 10))})
    for _ in range(300):
        tree = propose_tree(drafter, make_row([1]), 6)
        if not tree.tokens:
            break
        commit(drafter, tree, [1], [], [list(range(2, 10))] * (len(tree.tokens) + 1))
    assert not tree.tokens


def test_ranks_that_failed_are_drafted_again_once_they_are_right() -> None:
    """Nothing is drafted after many failures; then the target emits what the table has, in plain steps."""
    drafter, row = taught(make_drafter(Recycle), {1: list(range(2, 10)), 2: list(range(1, 9))}), make_row([1])
    for _ in range(300):
        commit(drafter, propose_tree(drafter, row, 6), [1], [], [])
    assert not propose_tree(drafter, row, 6).tokens
    sizes = replay(drafter, row, [2, 1] * 100, 6)
    assert not sizes[0] and sizes[-1] > 0


def test_the_engine_hands_over_the_best_ids_of_every_node(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(
        str(tiny),
        speculative_config={"method": "recycle", "nodes": 30, "min_token_prob": 0.0},
        max_num_batched_tokens=40,
    )
    engine, seen = llm.engine, []
    read, observe = engine.decoder.forward_step, engine.drafter.observe

    def reading(*given: Any) -> Any:
        found = read(*given)
        seen.append(found.clone())
        return found

    checked = 0

    def checking(made: Commit) -> None:
        nonlocal checked
        rows = [ids for step in made.batch for ids in step.topk]
        assert rows == seen[-1].topk(RANKS).indices.tolist()
        for step in made.batch:
            assert len(step.topk) == (1 + len(step.tree.tokens) if step.emits else 0)
            path = [step.topk[1 + node] for node in (ROOT, *step.accepted)] if step.emits else []
            assert [ids[0] for ids in path] == [*step.emitted], "greedy: the best id is emitted"
        checked += len(rows)
        observe(made)

    monkeypatch.setattr(engine.decoder, "forward_step", reading)
    monkeypatch.setattr(engine.drafter, "observe", checking)
    prompts = [{"prompt_token_ids": [i + 3 * j for j in range(20 + 15 * i)]} for i in range(1, 4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert checked > 200
    assert sum(output.speculation.accepted for output in outputs) > 0


def test_topk_is_not_computed_without_a_drafter_that_needs_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny), speculative_config={"method": "ngram"})
    monkeypatch.setattr(type(llm.engine.sampler), "best", lambda *given: pytest.fail("nobody asked"))
    monkeypatch.setattr(
        llm.engine.drafter, "observe", lambda made: not any(step.topk for step in made.batch) or pytest.fail()
    )
    llm.generate({"prompt_token_ids": [1, 2, 3, 1, 2]}, SamplingParams(temperature=0, max_tokens=5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("nodes", 0), ("nodes", 81), ("nodes", True), ("min_token_prob", 2), ("min_token_prob", "a")],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got"):
        Recycle.Options(**{name: value})
