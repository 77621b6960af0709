"""Suffix decoding: its trees equal counting, and drafts shrink where they fail."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import ConfigError
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.draft import suffix
from outrider.draft.suffix import MATCHED, Suffix
from outrider.drafting.matches import MatchAcceptance, TreeLimits, continuation_tree
from outrider.testing import check_tree, make_drafter, make_row, propose_tree, replay

# ---- the tree


@given(
    texts=st.lists(st.lists(st.integers(-1, 2), max_size=5), max_size=12),
    nodes=st.integers(1, 12),
    depth=st.integers(1, 5),
    length=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.1, 0.3]),
    siblings=st.sampled_from([1, 64]),
)
def test_the_tree_equals_counting(
    texts: list[list[int]], nodes: int, depth: int, length: int, least: float, siblings: int
) -> None:
    acceptance = MatchAcceptance(6)
    tree, score = continuation_tree(texts, acceptance, length, TreeLimits(depth, nodes, siblings, least))
    check_tree(tree, Budget(depth, nodes))
    texts = [text[: text.index(-1)] if -1 in text else text for text in texts]
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    joint = {ROOT: 1.0}
    for i, (token, parent, confidence) in enumerate(zip(tree.tokens, tree.parents, tree.confidence)):
        paths[i] = (*paths[parent], token)
        level = len(paths[parent])
        agree = [text for text in texts if tuple(text[:level]) == paths[parent] and len(text) > level]
        output = Counter(text[level] for text in agree)
        assert confidence == pytest.approx(output[token] / len(agree) * acceptance(length + level))
        joint[i] = joint[parent] * confidence
        assert joint[i] >= least * (1 - 1e-9)
        if siblings == 1:
            assert output[token] == max(output.values())
    assert score == pytest.approx(sum(joint.values()) - 1)
    best = all_joints(texts, depth, acceptance, length, least, siblings)
    assert sorted(list(joint.values())[1:], reverse=True) == pytest.approx(best[:nodes])


def all_joints(
    texts: list[list[int]], depth: int, acceptance: MatchAcceptance, length: int, least: float, siblings: int
) -> list[float]:
    """Of every path that is likely enough (with one sibling: of the chain), best first."""
    found, open_paths = [], [((), 1.0)]
    while open_paths:
        path, joint = open_paths.pop()
        agree = [text for text in texts if tuple(text[: len(path)]) == path and len(text) > len(path)]
        if len(path) == depth or not agree:
            continue
        output = Counter(text[len(path)] for text in agree)
        for token, count in output.most_common(siblings):
            share = joint * count / len(agree) * acceptance(length + len(path))
            if share >= least:
                found.append(share)
                open_paths.append(((*path, token), share))
    return sorted(found, reverse=True)


# ---- the method


def test_longer_match_drafts_more_tokens() -> None:
    new = iter(range(1000, 2000))
    for length in (1, 2, 3, 5, 9):
        common = list(range(length))
        row = make_row([next(new), *common, *range(100, 130), next(new), *common])
        assert propose_tree(make_drafter(Suffix), row, 12).tokens == list(range(100, 100 + length))
        assert propose_tree(make_drafter(Suffix, suffix_decoding_max_spec_factor=2), row, 16).tokens == list(
            range(100, 100 + min(16, 2 * length))
        )


def test_match_and_draft_fit_the_tree_depth() -> None:
    text = list(range(100))
    assert make_drafter(Suffix).depth == 12
    assert len(propose_tree(make_drafter(Suffix), make_row(text + text[:60]), 24).tokens) == 12
    assert (
        len(
            propose_tree(
                make_drafter(Suffix, suffix_decoding_max_tree_depth=64), make_row(text + text[:60]), 64
            ).tokens
        )
        == 32
    )


def test_no_match_or_no_budget_gives_no_draft() -> None:
    assert propose_tree(make_drafter(Suffix), make_row([1, 2, 3, 4, 5]), 12).tokens == []
    assert propose_tree(make_drafter(Suffix), make_row([1]), 12).tokens == []
    assert propose_tree(make_drafter(Suffix), make_row([1, 2, 1, 2]), 0).tokens == []


def test_a_loop_goes_on() -> None:
    assert propose_tree(make_drafter(Suffix), make_row([5, 6, 7] * 3 + [5]), 12).tokens == [
        6,
        7,
        5,
        6,
        7,
        5,
        6,
    ]


def test_most_frequent_continuation_is_drafted() -> None:
    """3 came after 1 2 twice, and 4 once and last; a tree holds both."""
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert propose_tree(make_drafter(Suffix), make_row(tokens), 12).tokens[0] == 3
    tree = propose_tree(make_drafter(Suffix, suffix_decoding_use_tree_spec=True), make_row(tokens), 12)
    assert tree.tokens == [3, 4] and tree.parents == [-1, -1]
    assert tree.confidence == pytest.approx([0.5, 0.25]), (
        "two thirds and one third, of the three quarters that two tokens are worth"
    )


def test_unlikely_paths_are_not_drafted() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert (
        propose_tree(make_drafter(Suffix, suffix_decoding_min_token_prob=0.6), make_row(tokens), 12).tokens
        == []
    )


def test_finished_requests_are_remembered_and_the_oldest_forgotten() -> None:
    drafter = make_drafter(Suffix, suffix_decoding_max_cached_requests=2)
    for base in (100, 200, 300):
        row = make_row([50, 51, *range(base, base + 40)], prompt=2)
        drafter.forget(row, "finished")
    assert propose_tree(drafter, make_row([1, *range(100, 108)]), 12).tokens == []
    assert propose_tree(drafter, make_row([1, *range(200, 208)]), 12).tokens == list(range(208, 216))
    assert propose_tree(drafter, make_row([1, *range(334, 339)]), 12).tokens == [339], (
        "a text ends where it ended"
    )
    assert propose_tree(drafter, make_row([50, 51]), 12).tokens == [300, 301], (
        "the end of the prompt belongs to it"
    )


def test_only_finished_requests_enter_the_shared_index() -> None:
    drafter = make_drafter(Suffix)
    drafter.forget(make_row(list(range(40)), prompt=0), "preempted")
    assert propose_tree(drafter, make_row(list(range(10))), 12).tokens == []
    nothing = make_drafter(Suffix, suffix_decoding_max_cached_requests=0)
    nothing.forget(make_row(list(range(40)), prompt=0), "finished")
    assert propose_tree(nothing, make_row(list(range(10))), 12).tokens == []


def test_whole_segments_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "SEGMENT", 1000)
    drafter = make_drafter(Suffix, suffix_decoding_max_cached_requests=3)
    for i in range(6):
        drafter.forget(make_row([i] * (499), prompt=0), "finished")
    assert len(drafter.memory.segments) == 2
    drafter.forget(make_row([9] * 3000, prompt=0), "finished")
    assert drafter.memory.segments[-1].length == 3001


def test_finished_texts_are_indexed_together_and_none_is_missed() -> None:
    memory = suffix.FinishedTexts(100)
    for i in range(suffix.TOGETHER + 2):
        memory.add([i] * 20, 4)
    assert len(memory.unindexed) == 2 and memory.indexed[0].length == suffix.TOGETHER * 21
    assert sum(segment.length for segment in memory.segments) == (suffix.TOGETHER + 2) * 21
    assert not memory.unindexed and memory.indexed[0].capacity == suffix.FIRST_SEGMENT


def test_no_more_texts_are_kept_than_asked_for() -> None:
    memory = suffix.FinishedTexts(2)
    for i in range(5):
        memory.add([i] * 20, 4)
    assert len(memory.unindexed) < 2 and len(memory.ends) == 2


def test_the_text_grows_with_the_row() -> None:
    """Drafts equal those of a fresh drafter that sees the whole row."""
    rng = random.Random(3)
    drafter, row = make_drafter(Suffix), make_row([1])
    for _ in range(60):
        row.tokens.extend(rng.randrange(4) for _ in range(rng.randint(1, 5)))
        assert propose_tree(drafter, row, 12) == propose_tree(make_drafter(Suffix), row, 12)


def test_failing_drafts_shorten_the_rows_drafts() -> None:
    """Random text of few tokens: there is always a match, and it is nearly never right."""
    rng = random.Random(0)
    text = [rng.randrange(25) for _ in range(1500)]
    drafter = make_drafter(Suffix)
    sizes = replay(drafter, make_row(text[:300]), text[300:], 12)
    assert sum(sizes[:20]) > 10
    assert sum(sizes[200:]) < 0.4 * len(sizes[200:])


def test_a_length_that_failed_is_tried_again_some_time_later() -> None:
    acceptance = MatchAcceptance(4)
    for _ in range(20):
        acceptance.observe(1, DraftTree([7], [-1], [0.5]), [])
    assert acceptance(1) < 0.01 and acceptance(2) == 0.75
    for _ in range(20):
        acceptance.skip(1, 1)
    assert 0.1 < acceptance(1) < 0.5


def test_each_level_of_a_tree_is_learned_from() -> None:
    acceptance = MatchAcceptance(4)
    acceptance.observe(2, DraftTree.chain([5, 6, 7], [0.5] * 3), [0])
    assert acceptance(2) > 0.75 and acceptance(3) < 0.875 and acceptance(4) == 0.9375, (
        "right, wrong, and not known"
    )


def test_row_that_repeats_itself_is_drafted_again() -> None:
    rng = random.Random(0)
    text = [rng.randrange(25) for _ in range(1000)]
    loop = [rng.randrange(25) for _ in range(20)] * 20
    sizes = replay(make_drafter(Suffix), make_row(text[:300]), text[300:] + loop, 12)
    assert sizes[-5] == 12


def test_rows_are_forgotten() -> None:
    drafter, row = make_drafter(Suffix), make_row([1, 2, 1, 2])
    propose_tree(drafter, row, 4)
    drafter.forget(row, "preempted")
    assert not drafter.rows
    assert propose_tree(drafter, row, 4).tokens == [1, 2]
    drafter.forget(row, "finished")
    drafter.forget(row, "finished")
    assert not drafter.rows


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tree_depth", 1),
        ("max_tree_depth", 2.5),
        ("max_tree_depth", True),
        ("max_cached_requests", -1),
        ("max_spec_factor", 0),
        ("max_spec_factor", "1"),
        ("min_token_prob", 1.5),
        ("min_token_prob", float("nan")),
        ("use_tree_spec", 1),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"suffix_decoding_{name} must be .*, got"):
        Suffix.Options(**{f"suffix_decoding_{name}": value})


@pytest.mark.parametrize("deep", [2, 3, 4, 8, 9])
def test_shallow_trees_are_drafted(deep: int) -> None:
    """Runs that are longer than a match may be are never looked up."""
    drafter = make_drafter(Suffix, suffix_decoding_max_tree_depth=deep)
    row = make_row([1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)
    tree = propose_tree(drafter, row, 6)
    assert tree.tokens and tree.tokens == [1, 2, 3, 4, 5, 6][: len(tree.tokens)]
    assert len(tree.tokens) <= deep - 1


def test_an_answer_is_drafted_from_the_last_one_to_the_same_prompt_while_it_repeats_it() -> None:
    """Other matches do not matter.  The draft is graded before it is asked for, by what is repeated."""
    drafter, prompt = make_drafter(Suffix), [*range(30)]
    answer = [5, 6, 5, 6, *range(100, 150)]
    for ending in ([9] * 20, answer):
        drafter.forget(make_row([*prompt, *ending], prompt=30), "finished")
    row = make_row(prompt)
    assert drafter.grade(make_row([3, *prompt[1:]])) == 1 and drafter.grade(make_row(prompt[:-1])) == 0
    assert drafter.grade(row) == 1, "23 tokens of the prompt"
    tree = propose_tree(drafter, row, 12)
    assert tree.tokens == answer[:12] and tree.confidence == [1.0] * 12
    row.tokens += answer[:2]
    assert drafter.grade(row) == 2 and propose_tree(drafter, row, 4).tokens == answer[2:6]
    assert drafter.after(row, answer[2:5], Budget(3, 3)).tokens == answer[5:8]
    row.tokens += answer[2:30]
    assert drafter.grade(row) == 3
    row.tokens += [7]
    assert drafter.grade(row) == 0 and propose_tree(drafter, row, 4).tokens != answer[31:35]
    row.tokens += answer[31:40]
    assert drafter.grade(row) == 0


def test_a_draft_has_a_grade_where_the_end_of_the_text_came_before() -> None:
    """Anywhere but in the prompt alone, whose end tells nothing of the request."""
    drafter, text = make_drafter(Suffix), [*range(100, 120)]
    drafter.forget(make_row([1, 2, *text, 50, 60], prompt=2), "finished")
    assert drafter.grade(make_row([3, *text, 4, *text])) == 0
    for tokens in ([5, 6, *text], [5, 6, *text[:9], *text[:16], 7, *text[:16]]):
        row = make_row(tokens, prompt=6)
        assert drafter.grade(row) == MATCHED
        row.tokens += [8] * 7
        assert drafter.grade(row) == MATCHED, "it is looked up every eighth token"
        row.tokens += [9]
        assert drafter.grade(row) == 0


def test_a_repeated_answer_teaches_nothing_of_matches() -> None:
    drafter, prompt, answer = make_drafter(Suffix), [*range(30)], [*range(100, 110), 300, 301, 302]
    drafter.forget(make_row([*prompt, *answer], prompt=30), "finished")
    row = make_row(prompt)
    assert replay(drafter, row, [*answer[:10], 1, 1, 1, 1], 4)[:3] == [4, 4, 3]
    assert drafter.rows[row].acceptance.values[-1] >= drafter.rows[row].acceptance.start[-1]
    drafter.forget(row, "preempted")
    assert not drafter.repeats


def test_as_many_answers_as_requests_are_kept() -> None:
    drafter = make_drafter(Suffix, suffix_decoding_max_cached_requests=2)
    for i in (1, 2, 1, 3):
        drafter.forget(make_row([i] * 30 + [50, 51], prompt=30), "finished")
    assert [drafter.grade(make_row([i] * 30)) for i in (1, 2, 3)] == [1, 0, 1]


def test_a_part_of_an_answer_does_not_replace_it() -> None:
    """An aborted request, or one of fewer tokens, says the same: the next one is drafted for in full."""
    drafter, prompt, answer = make_drafter(Suffix), [*range(30)], [*range(100, 120)]
    for count in (20, 0, 2):
        drafter.forget(make_row([*prompt, *answer[:count]], prompt=30), "finished")
    assert propose_tree(drafter, make_row(prompt), 8).tokens == answer[:8]
    drafter.forget(make_row([*prompt, 100, 7], prompt=30), "finished")
    assert propose_tree(drafter, make_row(prompt), 8).tokens == [100, 7]
