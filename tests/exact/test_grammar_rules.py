"""With a grammar every rule emits what plain masked sampling does, by exact enumeration of all choices.

The grammar is a small automaton behind the interface of llguidance's matcher.  The state of the row, its mask
and the code that drops draft tokens are the engine's own.  Texts over 0, 1, 2 and the ending 3:

    start ─ 0 or 1      after 0: 1 or 2      after 1: 0, 1 or the end      after 2: 1 or 2
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from outrider import verify
from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.core.tree import Budget, DraftTree
from outrider.draft.union.joined import AutomaticChain, proposal_behind
from outrider.drafting.trees.sampled import Tree
from outrider.drafting.view import View
from outrider.sampling.grammar.state import GrammarMask, GrammarState, Source
from outrider.sampling.random_streams import normal
from outrider.testing import Emissions, RandomModels, enumerate_rule, make_row

VOCABULARY, END = 4, 3
PROMPT = [1, 2]
FOLLOWING: dict[int | None, set[int]] = {None: {0, 1}, 0: {1, 2}, 1: {0, 1}, 2: {1, 2}}
SEEDS = range(3)
NEVER = 1000  # masks
FORBIDDEN_SAMPLE = DraftTree([2], [-1], [0.5], [torch.full((4,), 0.25)], [0])  # 2 is forbidden there
Drafting = Callable[[RandomModels], DraftTree]


class Automaton:
    """The grammar as an LLMatcher.  most: masks that it computes before it gives up."""

    def __init__(self, most: int) -> None:
        self.text, self.most = list[int](), most

    @property
    def following(self) -> set[int]:
        return FOLLOWING[self.text[-1] if self.text else None]

    def try_consume_tokens(self, tokens: Iterable[int]) -> int:
        (token,) = tokens
        if self.is_error() or token not in self.following:
            return 0
        self.text.append(token)
        return 1

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]

    def is_accepting(self) -> bool:
        return self.text[-1:] == [1]

    def is_error(self) -> bool:
        return self.most < 0

    def get_error(self) -> str:
        return "too many states"

    def compute_bitmask(self) -> bytes:
        self.most -= 1
        return bytes([sum(1 << token for token in self.following)])


def allowed_after(path: Sequence[int]) -> set[int]:
    """By definition: the tokens that may follow a text of the grammar."""
    if END in path:
        return {END}
    last = path[-1] if path else None
    return FOLLOWING[last] | ({END} if last == 1 else set())


class Masked(RandomModels):
    """Random models, whose target is masked by the state of the row; "p" is masked by definition."""

    def __init__(self, seed: int, most: int = NEVER) -> None:
        super().__init__(VOCABULARY, seed)
        self.most = most

    def row(self) -> Row:
        again = Source(lambda: Automaton(NEVER), lambda: None, lambda: True, 0.0)
        state = GrammarState(Automaton(self.most), len(PROMPT), [END], VOCABULARY, again)
        self.state, self.mask = state, GrammarMask(state)
        return make_row(PROMPT, grammar=state)

    def distribution(self, model: str, path: Sequence[int]) -> Tensor:
        if model != "p":
            return super().distribution(model, path)
        probs = super().distribution("unmasked", path).clone()
        probs[[token for token in range(VOCABULARY) if token not in allowed_after(path)]] = 0.0
        return normal(probs)

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        logits = super().distribution("unmasked", path).log()
        return normal(self.mask(Ids(PROMPT, list(path)), logits).exp())

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        return self.choices.choose(self.p(row, node, path).tolist())


def sampled(depth: int, siblings: int) -> Drafting:
    """The tree of a draft model that samples from q, which knows nothing of the grammar."""

    def draft(models: RandomModels) -> DraftTree:
        tree = Tree(make_row(PROMPT), 2, Budget(depth, 99), siblings, view=View(array("i")))
        while tree.growing:
            tree.draw({node: models.distribution("q", tree.path_tokens(node)) for node in tree.frontier})
        return tree.draft_tree

    return draft


def chosen(tokens: list[int], parents: list[int]) -> Drafting:
    return lambda models: DraftTree(tokens, parents, [0.5] * len(tokens))


def joined(models: Masked, drafting: Drafting, certain: Sequence[int] = ()) -> DraftTree:
    """What the engine verifies: text that an automatic drafter holds for certain, and a draft behind it."""
    chain = AutomaticChain(DraftTree.chain(list(certain), [0.5] * len(certain)))
    return proposal_behind(chain, drafting(models), models.state, PROMPT).tree


DRAFTS: dict[str, tuple[Drafting, Sequence[int]]] = {
    "chain": (sampled(3, 1), ()),
    "chain behind certain text": (sampled(2, 1), [0]),
    "chosen chain": (chosen([1, 0, 0], [-1, 0, 1]), ()),  # the last one is cut
    "chosen chain that ends": (chosen([1, 3, 3], [-1, 0, 1]), ()),
}
TREES: dict[str, tuple[Drafting, Sequence[int]]] = {
    "tree": (sampled(2, 2), ()),
    "tree behind certain text": (sampled(1, 2), [0]),
    "chosen tree": (chosen([2, 1, 0, 3, 2, 1, 2], [-1, -1, -1, 1, 1, 2, 5]), ()),  # 2, 1 2 and 0 1 2 are cut
}
CASES = [(name, case) for name in ("match", "rejection", "traversal") for case in (*DRAFTS, *TREES)]
CASES += [("block", case) for case in DRAFTS]


def emissions(name: str, case: str, seed: int = 0, most: int = NEVER) -> Emissions:
    models, (drafting, certain) = Masked(seed, most), (DRAFTS | TREES)[case]
    return enumerate_rule(verify.rule(name)(), lambda _: joined(models, drafting, certain), models=models)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_emitted_tokens_are_those_of_masked_sampling(name: str, case: str) -> None:
    found = [emissions(name, case, seed) for seed in SEEDS]
    assert max(one.error() for one in found) <= 1e-12
    assert max(one.mean_tokens for one in found) > 1.05, "nothing is ever accepted"


@pytest.mark.parametrize("most", range(4))
@pytest.mark.parametrize(("name", "case"), CASES)
def test_so_they_are_if_the_grammar_becomes_too_complex_within_the_step(
    name: str, case: str, most: int
) -> None:
    """Masks of later nodes are not known: the step ends before a token that was chosen without one."""
    assert max(emissions(name, case, seed, most).error() for seed in SEEDS) <= 1e-12


def test_forbidden_nodes_are_cut_from_chosen_drafts_only() -> None:
    models = Masked(0)
    models.row()
    assert joined(models, TREES["chosen tree"][0]).tokens == [1, 0, 3, 1]
    tree = joined(models, lambda _: FORBIDDEN_SAMPLE)
    assert tree.tokens == [2]


# ---- what must be detected


RULES = ("rejection", "traversal", "block")


@pytest.mark.parametrize("name", RULES)
def test_cutting_samples_that_the_grammar_forbids_is_detected(name: str) -> None:
    """The rule must see them: the distribution after their rejection is another one."""

    def cut(models: Masked) -> DraftTree:
        tree = sampled(2, 1)(models)
        return tree.only(models.state.allowed(Ids(PROMPT), tree._replace(distributions=[], probs_of=())))

    def error(models: Masked) -> float:
        return enumerate_rule(verify.rule(name)(), lambda _: cut(models), models=models).error()

    assert max(error(Masked(seed)) for seed in SEEDS) > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_a_mask_of_another_node_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes have the mask of the root."""
    forbidden = GrammarState.forbidden
    monkeypatch.setattr(GrammarState, "forbidden", lambda state, ids: forbidden(state, Ids(ids.tokens)))
    assert max(emissions(name, "chain", seed).error() for seed in SEEDS) > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_tokens_that_were_chosen_without_a_mask_are_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarState, "checked", lambda state, ids: len(ids.path))
    assert max(emissions(name, "chain", seed, most=1).error() for seed in SEEDS) > 1e-3
