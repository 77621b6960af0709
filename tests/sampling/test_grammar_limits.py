"""Grammars that are too complex to follow: drafts are no reason for a row to fail, its output is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import RequestError, StructuredOutputs
from outrider.checkpoints.hub import Checkpoint
from outrider.core.processor import Ids
from outrider.core.step import Batch, RowStep
from outrider.core.tree import EMPTY_TREE, DraftTree
from outrider.sampling.grammar.compiler import GrammarCompiler
from outrider.sampling.grammar.state import GrammarMask, GrammarState
from outrider.testing.rows import make_row
from outrider.verify.match import Match

PROMPT = [40, 41, 42]
# The library follows some 200 tokens of the text and no more.
COMPLEX = {"regex": "[xy]+|b(.*c.{300}|.*d.{200}|.*e.{250})*"}
LOST = "b" + "cd" * 280


def made(compiler: GrammarCompiler, form: dict[str, Any]) -> GrammarState:
    return compiler.state(StructuredOutputs(**form), len(PROMPT))


def mask(state: GrammarState, output: Sequence[int]) -> Tensor:
    found = state.forbidden(Ids([*PROMPT, *output]))
    assert found is not None
    return found


def test_a_grammar_that_no_token_can_follow_is_refused_before_its_first_step(
    compiler: GrammarCompiler,
) -> None:
    """The library gave up in a step, which then compiled the grammar again: all rows waited for seconds."""
    with pytest.raises(RequestError, match="too complex to follow: lexer error"):
        made(compiler, {"regex": "a{1000000}"})
    assert not [key for key in compiler.compiled if "a{1000000}" in key], "64 of them took more than 10 GB"
    assert mask(made(compiler, {"regex": "a{1000}"}), []).any()


def test_a_row_whose_output_is_too_complex_fails(compiler: GrammarCompiler) -> None:
    """Its text went on without a mask."""
    state, lost = made(compiler, COMPLEX), encoded(compiler, LOST)
    assert mask(state, lost[:5]).any()
    with pytest.raises(RequestError, match="too complex to follow: lexer error"):
        mask(state, lost)
    assert not [key for key in compiler.compiled if "c.{300}" in key], "it is not kept"


def test_a_step_that_compiles_a_grammar_again_does_not_check_it_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mask takes most of the time: it is computed where the output is, not at the beginning too."""
    state = made(compiler, COMPLEX)
    monkeypatch.setattr(compiler, "_compile", pytest.fail)
    lose(state, encoded(compiler, LOST))
    assert mask(state, encoded(compiler, "x")).any() and not state.drafts


def test_thousands_of_choices_are_followed(compiler: GrammarCompiler) -> None:
    """As alternatives of a rule, 2,000 would be the most."""
    texts = [f"{i * 7919 % 70_001} [é]\n.*" for i in range(70_000)]
    state = made(compiler, {"choice": [*texts, texts[0]]})
    path = encoded(compiler, texts[6789])
    for i, token in enumerate(path):
        assert not mask(state, path[:i])[token]
    assert mask(state, path).nonzero().numel() == mask(state, []).numel() - 1, "the text may only end"
    assert mask(state, path[:-1]).nonzero().numel() < mask(state, []).numel()


def lose(state: GrammarState, path: list[int]) -> None:
    """Have the library give up on a draft."""
    assert 0 < len(state.allowed(Ids(PROMPT), DraftTree.chain(path, [0.5] * len(path)))) < len(path)


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    return list(compiler.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_a_draft_that_the_library_gives_up_on_is_no_error_of_any_row(
    compiler: GrammarCompiler, seconds: float
) -> None:
    """A row failed for draft tokens that its target would have rejected."""
    compiler.compiled.clear()
    state, other = made(compiler, COMPLEX), made(compiler, COMPLEX)
    for each in (state, other):
        each.source = replace(each.source, seconds=seconds)
    x, lost = encoded(compiler, "x"), encoded(compiler, LOST)
    expected = mask(made(GrammarCompiler(compiler.tokenizer, 8192, compiler.ending), COMPLEX), x)
    lose(state, lost)
    for each in (state, other, made(compiler, COMPLEX)):
        assert torch.equal(mask(each, x), expected), "rows with the same grammar do not share its limits"
    assert not state.drafts and not state.allowed(Ids(PROMPT), DraftTree.chain(x, [0.5]))
    assert state.forced(Ids(PROMPT)) == []
    assert state.source.seconds < 10, "of the last compilation"
    with pytest.raises(RequestError, match="too complex to follow: lexer error"):
        mask(made(compiler, COMPLEX), lost)


def test_sampled_drafts_stay_where_drafts_are_not_followed(compiler: GrammarCompiler) -> None:
    """Their value must not decide whether the rule sees them."""
    state, x = made(compiler, COMPLEX), encoded(compiler, "x")
    lose(state, encoded(compiler, LOST))
    sampled = DraftTree.chain(x, [0.5])._replace(distributions=[torch.ones(1)], probs_of=[0])
    assert list(state.allowed(Ids(PROMPT), sampled)) == [0]


def test_a_row_alone_whose_output_is_too_complex_compiles_within_a_limit(compiler: GrammarCompiler) -> None:
    compiler.compiled.clear()
    state = made(compiler, COMPLEX)
    state.source = replace(state.source, seconds=1.0, compile=pytest.fail)
    for _ in range(2):
        with pytest.raises(RequestError, match="too complex to follow: lexer error"):
            mask(state, encoded(compiler, LOST))
    assert state.matcher is None, "up to 200 MB, for as long as something has the row"
    assert not state.allowed(Ids(PROMPT), DraftTree.chain([5], [0.5])) and not state.forced(Ids(PROMPT))
    assert mask(made(compiler, COMPLEX), []).any(), "a later request compiles it"


class Follow:
    """Picks of a target that wants these tokens, and ends the text where nothing forbids it to."""

    def __init__(self, state: GrammarState, tokens: list[int], wanted: list[int], end: int) -> None:
        self.processor, self.tokens = GrammarMask(state), tokens
        self.wanted, self.end = [*tokens, *wanted], end
        self.unmasked = 0

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        logits = torch.zeros(8192)
        logits[self.end] = 1.0
        place = len(self.tokens) + len(path)
        if place < len(self.wanted):
            logits[self.wanted[place]] = 2.0
        masked = self.processor(Ids(self.tokens, list(path)), logits)
        self.unmasked += masked is logits
        return int(masked.argmax())


def test_a_step_ends_where_a_draft_is_not_followed(compiler: GrammarCompiler, builtin: Checkpoint) -> None:
    """The target's own token behind it had no mask, or one of the end: it may have ended an invalid text."""
    state, lost = made(compiler, COMPLEX), encoded(compiler, LOST)
    row = make_row([*PROMPT], prompt=len(PROMPT), grammar=state, processors=[GrammarMask(state)])
    step = RowStep(row, 0, len(PROMPT), tree=DraftTree.chain(lost, [0.5] * len(lost)))
    picker: Any = Follow(state, row.tokens, lost, min(builtin.ending))
    Match()(Batch([step]), picker)
    assert picker.unmasked and row.error is None and row.draft_depth == 0
    count = len(step.emitted)
    assert 0 < count < len(lost) and step.emitted == lost[:count]
    assert (step.accepted, step.closing) == ([*range(count - 1)], [count - 1])
    assert state.forbidden(Ids(PROMPT, lost[: count - 1])) is not None, "log-probabilities ask a second time"
    with pytest.raises(RequestError, match="too complex"):
        mask(state, lost)


def test_the_step_after_one_that_ended_early_goes_on(compiler: GrammarCompiler, builtin: Checkpoint) -> None:
    state, wanted = made(compiler, COMPLEX), encoded(compiler, "xyxxyy")
    lose(state, encoded(compiler, LOST))
    row = make_row([*PROMPT], prompt=len(PROMPT), grammar=state, processors=[GrammarMask(state)])
    picker: Any = Follow(state, row.tokens, wanted, min(builtin.ending))
    for tree in (DraftTree.chain(wanted, [0.5] * len(wanted)), EMPTY_TREE, EMPTY_TREE):
        step = RowStep(row, len(row.tokens) - 1, 1, tree=tree)
        Match()(Batch([step]), picker)
        assert row.error is None and len(step.emitted) == 1
        row.tokens += step.emitted
    assert row.tokens[len(PROMPT) :] == wanted[:3]


def test_the_seconds_of_the_first_grammar_are_its_own(
    builtin: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had those of reading the tokenizer, about one for 100,000 tokens."""
    compiler = GrammarCompiler(builtin.tokenizer, builtin.spec.vocabulary, builtin.ending)
    made_in = list[bool]()

    def compiled(run: Callable[[], Any]) -> Any:
        made_in.append("library" in vars(compiler))
        return run()

    monkeypatch.setattr("outrider.sampling.grammar.compiler.on_large_stack", compiled)
    made(compiler, {"regex": "a"})
    assert made_in == [True]


def test_a_grammar_may_be_forgotten_while_another_is_evicted(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.sampling.grammar.compiler.CACHED", 1)
    forgetting = list[threading.Thread]()

    class Racing(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            first = list(super().__iter__())[:1]
            forgetting.append(threading.Thread(target=state.source.forget))
            forgetting[0].start()
            forgetting[0].join(0.2)
            return iter(first)

    monkeypatch.setattr(compiler, "compiled", Racing())
    state = made(compiler, {"regex": "a"})
    made(compiler, {"regex": "b"})
    forgetting[0].join()
    assert len(compiler.compiled) == 1


def test_kept_grammars_are_bounded_by_the_size_of_their_sources(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 schemas of 10 MB would take tens of gigabytes."""
    monkeypatch.setattr("outrider.sampling.grammar.compiler.CACHED_SOURCES", 3000)
    compiler.compiled.clear()

    def kept() -> list[str]:
        return [letter for letter in "abcd" if any(letter * 500 in key for key in compiler.compiled)]

    for letter in "abc":
        made(compiler, {"choice": [letter * 1000]})
    assert kept() == ["b", "c"]
    made(compiler, {"choice": ["b" * 1000]})
    made(compiler, {"choice": ["d" * 1000]})
    assert kept() == ["b", "d"], "the least recently used one leaves"
    state = made(compiler, {"choice": ["a" * 4000]})
    assert kept() == [] and mask(state, []).any(), "larger than all that is kept: used, and not kept"
