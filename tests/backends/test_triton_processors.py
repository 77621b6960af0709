"""Logits processors and log-probabilities of the Triton kernels, beside the sampler's, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from kernel_cases import sampled_row
from rule_cases import drafted, of_reference, random_logits
from torch import Tensor

from outrider import SamplingParams, verify
from outrider.backends.torch.backend import TorchBackend
from outrider.core.edits import ALWAYS, Edits, bits_of
from outrider.core.logprobs import MODES, Logprobs, top_values
from outrider.core.params import COLDEST, DistributionParams
from outrider.core.processor import Ids, edits_of
from outrider.core.reasoning import ReasoningMarkers
from outrider.core.row import Row
from outrider.core.tree import EMPTY_TREE, DraftTree
from outrider.sampling.grammar.state import GrammarMask
from outrider.sampling.processors import processors_of
from outrider.sampling.sampler import Sampler
from outrider.sampling.thinking import ThinkingBudget
from outrider.verify.base import RowPicker

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton.verifier import TreeQueries, TreeVerifier

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
quickly = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
SAMPLER = Sampler(TorchBackend(torch.device("cpu"), torch.float32))
FIRST, AFTER = 3, 2  # rows of logits before and behind those of a tree
IDS = st.integers(0, 59)
PATHS = st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 11)), max_size=7)  # parent and token of a node
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-0.3, 0.1, 1.1]),
        "presence_penalty": st.sampled_from([-0.7, 0.3]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, -0.1, 0.0, 0.3, 5.0]), min_size=1),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=20),
        "min_tokens": st.integers(1, 9),
    },
)
WORDS = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), max_size=6)


class States:
    """A grammar that allows tokens by the path alone, and knows `known` ids."""

    drafts = True

    def __init__(self, known: int) -> None:
        self.known = known

    def forbidden(self, ids: Ids) -> Tensor | None:
        if 7 in ids.path:  # a forbidden path
            return None
        return (torch.arange(self.known) + sum(ids.path)) % 3 == 0


def row_of(
    params: dict[str, Any], words: Sequence[Sequence[int]] = (), known: int | None = None, **more: Any
) -> Row:
    """A row of 6 prompt and 5 output tokens with the processors of these parameters."""
    tokens, distribution = [1, 2, 3, 1, 5, 59, 2, 2, 11, 4, 3], more.pop("distribution", DistributionParams())
    made = processors_of(SamplingParams(**params), 6, 100, [0, 9, 99], words)
    if known is not None:
        made.append(GrammarMask(States(known)))  # type: ignore[arg-type]
    row = sampled_row(tokens, distribution, 9, processors=made)
    row.prompt = 6
    return row


def tree_of(nodes: list[tuple[int, int]]) -> DraftTree:
    parents = [min(parent, node - 1) for node, (parent, _) in enumerate(nodes)]
    return DraftTree([token for _, token in nodes], parents, [0.5] * len(nodes))


def edited(logits: Tensor, queries: TreeQueries) -> Tensor:
    """The logits after the processors of the rows of `queries`."""
    besides = queries.besides(len(logits), DEVICE)
    assert besides is not None
    return besides.edited(logits.to(DEVICE)).cpu()


EVERY = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.7,
    "logit_bias": {2: 5.0, 4: -0.1, 30: 0.3},
    "allowed_token_ids": [*range(0, 60, 2), 1, 3, 5, 9],
    "min_tokens": 7,
}
BRANCHES = [(-1, 2), (0, 2), (1, 4), (0, 9), (-1, 50), (4, 2)]


@quickly
@example(EVERY, [[2, 2, 4], [4], [3, 2], [50, 2], [9]], BRANCHES, 40, 1)
@example({"repetition_penalty": 0.7}, [], BRANCHES, None, 2)
@given(params=PARAMS, words=WORDS, nodes=PATHS, known=st.sampled_from([None, 40, 60, 70]), seed=IDS)
def test_logits_have_the_bits_of_the_processors_one_after_another(
    params: dict[str, Any], words: list[list[int]], nodes: list[tuple[int, int]], known: int | None, seed: int
) -> None:
    """After every node of two trees, beside rows of others; -inf and NaN of the model, too."""
    logits = torch.randn(24, 60, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, seed], logits[FIRST, 5] = float("-inf"), float("nan")
    tree, other = tree_of(nodes), tree_of([(-1, 4), (0, 2)])
    row, second, plain = row_of(params, words, known), row_of({"presence_penalty": 0.4}), row_of({})
    rows = [(row, FIRST, tree), (second, FIRST + 1 + tree.size, other), (plain, 23, EMPTY_TREE)]
    expected, queries = logits.clone(), TreeQueries()
    for key, (each, root, own) in enumerate(rows):
        queries.add(key, each, own, root)
        described = Edits(each.tokens, own)
        for node, path in enumerate(described.paths, -1):
            at = root + 1 + node
            expected[at] = SAMPLER._edited(each, path, logits, at)
    assert [*queries.sizes] == [0, 1, 2]
    owned = torch.tensor([owner < 3 for owner in queries.owners])  # by one of the rows
    found = edited(logits, queries)[owned]
    assert torch.equal(found.nan_to_num(7e9), expected[owned].nan_to_num(7e9))


@quickly
@example(EVERY, DistributionParams(0.8, 0.01, 20, 0.95), [True, False, True], "processed_logprobs")
@given(
    params=PARAMS,
    distribution=st.builds(
        DistributionParams,
        temperature=st.sampled_from([0.0, COLDEST, 0.8, 1.7]),
        min_p=st.sampled_from([0.0, 0.05]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
    ),
    wrong=st.lists(st.booleans(), max_size=3),
    mode=st.sampled_from(MODES),
)
def test_match_and_log_probabilities_are_those_of_the_reference(
    params: dict[str, Any], distribution: DistributionParams, wrong: list[bool], mode: str
) -> None:
    """The target's own path beside wrong siblings, and a row that asks for nothing."""
    logits = (torch.randn(14, 60, generator=torch.Generator().manual_seed(1)) * 3).round(decimals=1)
    if "allowed_token_ids" in params:  # some are left by all the masks
        params = {**params, "allowed_token_ids": [*params["allowed_token_ids"], *range(40, 60)]}
    row, plain = (
        row_of(params, [[2, 4]], 60, distribution=distribution),
        row_of({}, distribution=distribution),
    )
    row.logprobs = Logprobs(mode, 3, None)
    path, tokens, parents, parent = list[int](), list[int](), list[int](), -1
    for beside in wrong:
        token = SAMPLER.pick(row, path, logits, FIRST + 1 + parent)
        if beside:
            tokens.append((token + 1) % 60)
            parents.append(parent)
        tokens.append(token)
        parents.append(parent)
        parent = len(tokens) - 1
        path.append(token)
    tree, verifier = DraftTree(tokens, parents, [0.5] * len(tokens)), TreeVerifier(DEVICE)
    queries = verifier.queries("match")
    queries.add(5, row, tree, FIRST)
    queries.add(6, plain, EMPTY_TREE, 13)
    verifier.verify(logits.to(DEVICE), queries)
    answers = dict(queries.read())
    expected = match(row, logits, FIRST, tree)
    assert answers == {5: expected, 6: match(plain, logits, 13, EMPTY_TREE)}
    accepted, emitted = expected
    assert len(accepted) == len(wrong) and queries.values(6, [-1]) is None
    found = queries.values(5, [-1, *accepted])
    assert found is not None
    for i, (node, token) in enumerate(zip([-1, *accepted], emitted)):
        values = SAMPLER.values(row, emitted[:i], logits[FIRST + 1 + node], mode)
        assert found[i] == top_values(token, values, 3)


def match(row: Row, logits: Tensor, root: int, tree: DraftTree) -> Any:
    """The path that the rule takes on the host."""

    class Asked:
        def pick(self, _: int, node: int, path: Sequence[int]) -> int:
            return SAMPLER.pick(row, path, logits, root + 1 + node)

    asked: Any = Asked()
    return verify.rule("match")().walk(tree, RowPicker(asked, 0))


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_rules_that_compare_p_with_q_have_the_edited_p(name: str) -> None:
    """Their answers are those of the reference, and other ones than without processors."""
    changed = 0
    params = {"repetition_penalty": 1.3, "presence_penalty": 1.5, "logit_bias": {3: 2.0}, "min_tokens": 7}
    for seed in range(3):
        logits = random_logits(torch.Generator().manual_seed(seed), 12, 60)
        row, plain = (
            row_of(own, words, distribution=DistributionParams(0.9))
            for own, words in ((params, [[2, 4], [8]]), ({}, []))
        )
        row.stream = plain.stream = seed
        tree, verifier = (
            drafted(row, logits[FIRST:], [0, 1, 2, 3, 1], [1] * 5, False, True),
            TreeVerifier(DEVICE),
        )
        queries = verifier.queries(name)
        queries.add(0, row, tree, FIRST)
        verifier.verify(logits.to(DEVICE), queries)
        expected = of_reference(name, row, logits, FIRST, tree)
        assert dict(queries.read()) == {0: expected} and queries.values(0, [-1]) is None
        changed += expected != of_reference(name, plain, logits, FIRST, tree)
    assert changed


def test_rows_that_the_device_cannot_verify_are_left_to_the_rule() -> None:
    """Those with a function of the user, and those whose grammar is not followed any more."""

    class Lost(States):
        drafts = False

    queries, tree = TreeQueries(), tree_of([(-1, 7), (0, 4)])
    own = row_of({"logits_processors": [lambda ids, logits: logits]})
    lost = row_of({})
    lost.processors = [GrammarMask(Lost(60))]  # type: ignore[arg-type]
    for key, row in enumerate((own, lost)):
        queries.add(key, row, tree, 3 * key)
    assert not queries.sizes and not queries.more.edits
    budget = ThinkingBudget(6, ReasoningMarkers("", "</a>"), [4], 6, lambda token: "x")
    forced = row_of({"presence_penalty": 1.0})  # the 6th token of the output is reached at the first node
    forced.processors = [*forced.processors, budget]
    queries.add(3, forced, tree, 6)
    assert not queries.sizes
    queries.add(4, forced, EMPTY_TREE, 6)
    assert [*queries.sizes] == [4]
    queries = TreeQueries()
    queries.add(2, row_of({}, known=60), tree, 6)
    assert [*queries.sizes] == [2] and queries.more.edits


def test_no_token_is_left_where_all_are_masked() -> None:
    logits, row = torch.randn(2, 60), row_of({"allowed_token_ids": [4]}, [[4]])
    queries = TreeVerifier(DEVICE).queries("match")
    queries.add(0, row, EMPTY_TREE, 1)
    TreeVerifier(DEVICE).verify(logits.to(DEVICE), queries)
    assert dict(queries.read()) == {0: None}


def test_edits_of_rows_that_ask_for_none_take_no_room() -> None:
    queries = TreeQueries()
    queries.add(0, row_of({}), tree_of([(-1, 3)]), 0)
    assert queries.more == (0, 0, 0)


def test_entries_name_each_token_once() -> None:
    row = row_of(EVERY, [[2], [31]])
    edits = edits_of(row.processors, row.tokens, tree_of([(-1, 2), (0, 33)]))
    assert edits is not None
    table = edits.entries()
    tokens = table[:, 0].tolist()
    assert sorted(tokens) == sorted({1, 2, 3, 4, 5, 11, 59, 30, 0, 9, 99, 31, 33})
    assert table[tokens.index(2), 1] == 2 and table[tokens.index(2), 3] == ALWAYS
    assert table[tokens.index(1), 1] == 0 and table[tokens.index(33), 1] == -1
    assert table[tokens.index(9), 3] == 2 and bits_of([True, False, True]).tolist() == [5]
