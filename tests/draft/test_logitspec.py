"""LogitSpec: what follows the last match and the runners-up of the pending token, most probable first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, DraftTree
from outrider.draft.logitspec import LONGEST, RANKS, LastEnds, Logitspec
from outrider.testing import make_drafter, make_row, propose_tree

LOGITS = [2, 31, 32, 33, 34, 35, 36, 37]  # ids of the largest, best first


def emit(drafter: Logitspec, row: Row, token: int, topk: list[int], tree: DraftTree = EMPTY_TREE) -> None:
    """A step of a row that accepted nothing."""
    step = RowStep(row, len(row.tokens) - 1, 1, tree=tree, topk=[topk] * (1 + len(tree.tokens)))
    step.emitted = [token]
    drafter.observe(Commit(Batch([step])))
    row.tokens.append(token)


def sign(number: float) -> int:
    return (number > 0) - (number < 0)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens from the root to every node."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        found[node] = (*found[parent], token)
    return {*found.values()} - {()}


def test_runners_up_are_drafted_with_what_followed_the_pair() -> None:
    drafter, row = make_drafter(Logitspec, nodes=64, min_token_prob=0.0), make_row([1, 2, 31, 5, 32, 6, 7, 1])
    emit(drafter, row, 2, LOGITS)  # the text ends with 1 2
    found = paths(propose_tree(drafter, row, 3))
    assert (31, 5, 32) in found  # after 1 2, and the runner-up 31 once, with what follows 2 31
    assert (32, 6, 7) in found  # the runner-up 32, which followed no 2: what followed it alone
    assert {(token,) for token in LOGITS[1:]} <= found and (2,) not in found


def test_runners_up_are_those_of_the_pending_token() -> None:
    drafter, row = make_drafter(Logitspec, nodes=64, min_token_prob=0.0), make_row([9, 8])
    assert propose_tree(drafter, row, 3) == EMPTY_TREE  # nothing is known of a prompt's last token
    emit(drafter, row, 2, LOGITS)
    assert paths(propose_tree(drafter, row, 1)) == {(token,) for token in LOGITS[1:]}
    assert drafter.after(row, (50,), propose_budget := RowStep(row, 2, 1).budget) == EMPTY_TREE
    assert propose_budget.nodes == 0
    row.tokens.append(77)  # emitted in a step that this drafter did not see
    assert propose_tree(drafter, row, 1) == EMPTY_TREE


def test_trees_keep_to_nodes_depth_and_probability() -> None:
    row = make_row([1, 2, 31, 5, 32, 6, 7, 1])
    for limits in ({"nodes": 3}, {"nodes": 64, "min_token_prob": 0.15}):
        drafter = make_drafter(Logitspec, **limits)
        emit(drafter, again := make_row(row.tokens), 2, LOGITS)
        tree = propose_tree(drafter, again, 2)
        assert 0 < len(tree.tokens) <= limits["nodes"] and max(map(len, paths(tree))) <= 2
    assert (37,) not in paths(tree)  # the last runner-up is less probable than that


def test_what_was_right_is_drafted_earlier() -> None:
    """Always the fifth runner-up follows: it becomes the first node of a small tree."""
    drafter, row = make_drafter(Logitspec, nodes=20, min_token_prob=0.0), make_row([1])
    for count in range(200):
        emit(drafter, row, 100 + count, [100 + count, *range(1000, 1000 + RANKS - 1)])
        tree = propose_tree(drafter, row, 1)
        accepted = [tree.tokens.index(1004)]
        step = RowStep(row, len(row.tokens) - 1, 1, tree=tree, accepted=accepted, topk=[LOGITS] * 21)
        step.emitted = [1004, 9]
        drafter.observe(Commit(Batch([step])))
    assert drafter.memory.index(max(drafter.memory[:RANKS])) == 4
    assert tree.tokens[0] == 1004


def test_a_rank_that_failed_is_tried_again() -> None:
    """All ranks fail for a while, until nothing is drafted; then the first one is right again."""
    drafter, row = make_drafter(Logitspec, min_token_prob=0.1), make_row([1])
    for count in range(600):
        follower = 2000 + count if count < 300 else 1000
        emit(drafter, row, 500 + count, [500 + count, *range(1000, 1000 + RANKS - 1)])
        tree = propose_tree(drafter, row, 1)
        assert bool(tree.tokens) or count > 20
        if count == 299:
            assert not tree.tokens
        emit(drafter, row, follower, [], tree)
    assert tree.tokens == [1000]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 30))
def test_the_index_equals_a_search(tokens: list[int], first: int) -> None:
    ends = LastEnds()
    ends.extend(tokens, min(first, len(tokens)))
    ends.extend(tokens, len(tokens))
    earlier = tokens[:-1]
    for token in range(4):
        for before in range(4):
            pairs = [i for i in range(1, len(earlier)) if earlier[i - 1 : i + 1] == [before, token]]
            singles = [i for i, other in enumerate(earlier) if other == token]
            expected = (2, pairs[-1] + 1) if pairs else (1, singles[-1] + 1) if singles else (0, 0)
            assert ends.after(before, token) == expected


def test_nothing_is_kept_of_a_row_that_ended() -> None:
    llm = LLM("builtin", speculative_config={"method": "logitspec"})
    output = llm.generate("Count: one, two, three, one, two,", SamplingParams(max_tokens=24))[0]
    drafter = llm.engine.drafter
    assert isinstance(drafter, Logitspec) and not drafter.rows
    assert output.speculation.drafted and len(drafter.memory) == RANKS + LONGEST


def test_a_text_that_repeats_itself_is_drafted_on() -> None:
    drafter, row = make_drafter(Logitspec, nodes=9, min_token_prob=0.0), make_row([5, 1, 2, 1, 2])
    assert propose_tree(drafter, row, 6).tokens == [1, 2, 1, 2, 1, 2]


def test_a_match_is_judged_as_far_as_it_goes() -> None:
    """What a draft was does not matter: the token that ended a text is judged, too."""
    drafter, row = make_drafter(Logitspec), make_row([1, 2, 3, 4, 5, 1, 2])
    before = list(drafter.memory)
    step = RowStep(row, 6, 1)
    step.emitted = [3, 4, 9]
    drafter.observe(Commit(Batch([step])))
    changed = [sign(new - old) for new, old in zip(drafter.memory, before)]
    assert changed == [0] * RANKS + [0, 1, 1, -1, 0, 0]


def test_beside_a_grammar_it_drafts_behind_the_certain_text() -> None:
    llm = LLM("builtin", max_model_len=512, speculative_config={"method": "logitspec"})
    shape = r"(the name of the thing is [a-z]{3,20}, and the name is [a-z]{1,20}\. ){3}"
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs={"regex": shape})
    prompt = "the name of the thing is a name, and the name is a name, and the name is: "
    plain = LLM("builtin", max_model_len=512, speculative_config="off").generate(prompt, params)[0]
    output = llm.generate(prompt, params)[0]
    assert output.outputs[0].text == plain.outputs[0].text
    assert {"grammar", "logitspec"} <= {*output.outputs[0].drafted_by}
