"""Several drafters as one: the merged tree holds the likeliest nodes of all, and each drafter learns as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import AnyTarget, guess, make, make_row, proper, walked

from outrider import LLM, ConfigError, SamplingParams
from outrider.draft.base import Drafter
from outrider.draft.first import First
from outrider.draft.ngram import Ngram
from outrider.draft.suffix import Suffix
from outrider.draft.union import Union, merged, part
from outrider.types import NOTHING, ROOT, Batch, Budget, Commit, Draft, Guesses, Needs, Row, Verdict

Paths = dict[tuple[int, ...], float]


class Fixed(Drafter):
    """Says what it is told, and keeps what it sees."""

    def __init__(self, tree: Guesses, topk: int = 0, depth: int = 3) -> None:
        self.tree, self.needs, self.depth = tree, Needs(topk), depth
        self.budgets: list[Budget] = []
        self.seen: list[Commit] = []
        self.gone: list[tuple[Row, str]] = []
        self.slot_bytes, self.memory = 10 * topk, topk

    def size(self, depth: int) -> int:
        return 2 * depth

    def allocate(self, slots: int) -> list[Any]:
        return [slots] * (self.slot_bytes > 0)

    def propose(self, batch: Batch, budgets: list[Budget]) -> Draft:
        self.budgets = budgets
        return Draft([self.tree if budget.nodes else NOTHING for budget in budgets])

    def observe(self, commit: Commit) -> None:
        self.seen.append(commit)

    def forget(self, row: Row, reason: str) -> None:
        self.gone.append((row, reason))

    def filled(self, row: Row) -> int:
        return self.slot_bytes


def together(method: type[Union], *drafters: Drafter) -> Union:
    return method(method.Options(), AnyTarget(), drafters)  # type: ignore[arg-type]


def paths_of(tree: Guesses) -> Paths:
    """Path of tokens -> confidence of its last."""
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        paths[i] = (*paths[parent], token)
    return {paths[i]: tree.confidence[i] for i in range(len(tree.tokens))}


def tree_of(paths: Paths) -> Guesses:
    tree, place = Guesses([], [], []), {(): ROOT}
    for path in sorted(paths, key=len):
        place[path] = len(tree.tokens)
        tree.tokens.append(path[-1])
        tree.parents.append(place[path[:-1]])
        tree.confidence.append(paths[path])
    return tree


@st.composite
def trees(draw: st.DrawFn) -> Guesses:
    words = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5))
    chance = st.sampled_from([0.1, 0.2, 0.4, 0.7, 0.9])
    return tree_of({tuple(word[:n]): draw(chance) for word in words for n in range(1, len(word) + 1)})


# ---- merging


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12))
def test_the_merged_tree_holds_the_likeliest_nodes_of_all(several: list[Guesses], nodes: int) -> None:
    tree = merged(several, Budget(4, nodes))
    proper(tree, Budget(4, nodes))
    every: Paths = {}
    for one in several:
        for path, confidence in paths_of(one).items():
            every[path] = max(confidence, every.get(path, 0))
    found = paths_of(tree)
    assert all(every[path] == confidence for path, confidence in found.items())
    joint: Paths = {(): 1.0}
    for path in sorted(every, key=len):
        joint[path] = joint[path[:-1]] * every[path]
    best = sorted(list(joint.values())[1:], reverse=True)[:nodes]
    assert [joint[path] for path in found] == pytest.approx(best), "best first"


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12), st.lists(st.integers(0, 2), min_size=1, max_size=5), trees())
def test_each_drafter_sees_its_own_part(several: list[Guesses], nodes: int, text: list[int], other: Guesses) -> None:
    """What was verified of its nodes, its part of the path, and the best ids at its nodes."""
    whole = merged([*several, other], Budget(4, nodes))
    path = walked(whole, text)
    names = [(), *paths_of(whole)]
    best = [[hash(name) % 97, 1, 2, 3] for name in names]
    batch = Batch([make_row([5])], [0], [1], [True])
    commit = Commit(batch, [1], [text], Draft([whole]), Verdict([path], [text[: len(path) + 1]]), [best])
    for tree in several:
        mine = part(commit, Draft([tree]), 3)
        kept = mine.draft.trees[0]
        assert paths_of(kept) == {name: c for name, c in paths_of(tree).items() if name in names}
        assert mine.verdict.nodes[0] == walked(kept, text)
        assert mine.topk[0] == [best[names.index(name)][:3] for name in [(), *paths_of(kept)]]
        assert part(commit, Draft([tree]), 0).topk == []
        assert (mine.tokens, mine.verdict.tokens) == (commit.tokens, commit.verdict.tokens)


# ---- as a drafter


def test_all_are_asked_within_their_own_levels() -> None:
    chain, wide = Guesses.chain([1, 2, 3], [0.9, 0.8, 0.7]), Guesses([1, 4], [-1, -1], [0.5, 0.6])
    one, two = Fixed(chain), Fixed(wide, topk=4, depth=1)
    union = together(Union, one, two)
    assert (union.depth, union.size(3), union.size(1), union.needs.topk, union.slot_bytes) == (3, 8, 4, 4, 40)
    assert union.allocate(7) == [7]
    tree = guess(union, make_row([9]), 3)
    assert (tree.tokens, tree.parents) == ([1, 2, 4, 3], [-1, 0, -1, 1])
    assert (one.budgets, two.budgets) == ([Budget(3, 6)], [Budget(1, 2)])
    row = make_row([9])
    union.forget(row, "finished")
    assert one.gone == two.gone == [(row, "finished")]
    assert union.filled(row) == 0
    assert union.memory == [0, 4]
    union.memory = [5, 6]
    assert (one.memory, two.memory) == (5, 6)


def test_the_first_that_knows_something_is_heard() -> None:
    silent, sure, spare = Fixed(NOTHING), Fixed(Guesses.chain([1, 2], [0.5, 0.5])), Fixed(Guesses.chain([3], [0.9]))
    first = together(First, silent, sure, spare)
    assert first.size(3) == 6
    assert guess(first, make_row([9]), 3).tokens == [1, 2]
    assert spare.budgets == [Budget()], "asked all the same: it may have to keep up"
    batch = Batch([make_row([9])], [0], [1], [True])
    first.observe(Commit(batch, [1], [[1, 5]], Draft([Guesses.chain([1, 2], [0.5, 0.5])]), Verdict([[0]], [[1, 5]])))
    assert [drafter.seen[-1].verdict.nodes[0] for drafter in (silent, sure, spare)] == [[], [0], []]
    assert [len(drafter.seen[-1].draft.trees[0].tokens) for drafter in (silent, sure, spare)] == [0, 2, 0]
    assert guess(first, make_row([9]), 0).tokens == []


LOOK_UPS: list[dict[str, Any]] = [{"method": "ngram", "prompt_lookup_min": 3}, {"method": "suffix", "num_speculative_tokens": 2}]


def test_drafters_are_described_as_alone() -> None:
    union = make(Union, drafters=LOOK_UPS)
    assert [type(drafter) for drafter in union.drafters] == [Ngram, Suffix]
    assert union.drafters[0].options.prompt_lookup_min == 3
    assert union.levels == [5, 2] and union.depth == 5
    nested = make(First, drafters=[{"method": "union", "drafters": LOOK_UPS}, {"method": "recycle"}])
    assert nested.needs.topk == 8 and nested.depth == 6


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ("ngram", "drafters must be a list"),
        ({"method": "ngram"}, "drafters must be a list"),
        (["ngram"], "must be a dict with a 'method', got 'ngram'"),
        ([{"model": "x"}], "must be a dict with a 'method'"),
        ([{"method": "ngrams"}], "Did you mean 'ngram'"),
        ([{"method": "ngram", "prompt_lookup_mx": 3}], "Did you mean 'prompt_lookup_max'"),
        ([{"method": "ngram", "verification": "match"}], "unknown key of speculative_config for method 'ngram' 'verification'"),
        ([{"method": "ngram", "num_speculative_tokens": 0}], "num_speculative_tokens must be a whole number of at least 1, got 0"),
        ([{"method": "ngram", "prompt_lookup_min": 0}], "prompt_lookup_min"),
        ([{"method": "union", "drafters": [{"method": "no"}]}], "unknown speculative method 'no'"),
    ],
)
@pytest.mark.parametrize("method", [Union, First])
def test_bad_drafters_are_named(method: type[Union], drafters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method.Options(drafters=drafters)


def test_there_must_be_drafters() -> None:
    with pytest.raises(ConfigError, match="needs 'drafters'"):
        make(Union)


@pytest.mark.parametrize("method", ["union", "first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(method: str, temperature: float, tiny: Path) -> None:
    """With a model, a table that wants logits and a look-up; some of it is accepted."""
    members: Sequence[dict[str, Any]] = [
        {"method": "ngram"},
        {"method": "recycle", "nodes": 20, "min_token_prob": 0.0},
        {"method": "draft_model", "model": str(tiny), "siblings": 2, "num_speculative_tokens": 2},
    ]
    prompts: Any = [{"prompt_token_ids": [i, 1, 2, 3, 1, 2]} for i in range(5)]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    plain = LLM(str(tiny)).generate(prompts, params)
    llm = LLM(str(tiny), speculative_config={"method": method, "drafters": members})
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
        assert all(output.speculation.accepted > 5 for output in outputs)
    llm.engine.check()
    drafter: Any = llm.engine.drafter
    assert not drafter.drafters[0].seen and not drafter.drafters[2].synced
