"""Constrained output: errors name their place, and one matcher masks any node in any order."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import RequestError, SamplingParams, StructuredOutputs
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.plain_tokenizer import PlainTokenizer
from outrider.core.processor import Ids
from outrider.core.tree import DraftTree
from outrider.sampling.grammar.compiler import GrammarCompiler
from outrider.sampling.grammar.faults import place_of
from outrider.sampling.grammar.state import GrammarMask, GrammarState, depth_first

PROMPT = [40, 41, 42]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
RECURSIVE = {"grammar": 'root ::= "(" root? ")" | [a-c]+'}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON},
    RECURSIVE,
    {"regex": "(ab|cd){1,3}x?"},
    {"choice": ["yes", "yes!", "no"]},
]


def made(compiler: GrammarCompiler, form: dict[str, Any]) -> GrammarState:
    return compiler.state(StructuredOutputs(**form), len(PROMPT))


def mask(state: GrammarState, *parts: Sequence[int]) -> Tensor:
    output, path = parts
    found = state.forbidden(Ids([*PROMPT, *output], path))
    assert found is not None
    return found


def test_transformers_is_not_needed(builtin: Checkpoint) -> None:
    """Its import takes seconds, which the first constrained request of a server would wait for."""

    def load() -> Any:
        raise AssertionError("transformers' tokenizer was asked for")

    own = builtin.tokenizer
    tokenizer = PlainTokenizer(own.backend_tokenizer, own.special, None, load)
    compiler = GrammarCompiler(tokenizer, builtin.spec.vocabulary, builtin.ending)
    yes = [own.encode(text)[0] for text in ("yes", "maybe")]
    assert mask(made(compiler, {"choice": ["yes", "no"]}), [], [])[yes].tolist() == [False, True]


# ---- faults

SCHEMA_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a/b": {"items": {"not": {}}}}}, "at #/properties/a~1b/items: not is not supported"),
    (
        {"anyOf": [{"type": "integer"}, {"uniqueItems": True, "contains": {}}]},
        "at #/anyOf/1: .* are not supported",
    ),
    ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "strin"}}}, "at #/\\$defs/p: Invalid type: strin"),
    (
        {"properties": {"x": {"$ref": "#/$defs/q"}}, "$defs": {}},
        "at #/properties/x: Pointer '/\\$defs/q' does not exist",
    ),
    ({"items": {"pattern": "a(b"}, "type": "array"}, "at #/items: unclosed group, at character 2"),
    ({"items": {"additionalProperties": False, "not": {}}}, "at #/items: not is not supported"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "at #: Unsatisfiable schema: minimum"),
    ({"properties": {"x": {"format": "colour"}}}, "at #/properties/x: Unknown format: colour"),
]


@pytest.mark.parametrize(("schema", "message"), SCHEMA_FAULTS)
def test_a_schema_that_is_not_supported_is_refused_with_the_place(
    compiler: GrammarCompiler, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs: json, {message}"):
        made(compiler, {"json": schema})


def test_the_search_for_the_place_of_a_fault_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Any]()

    def fault_of(part: Any) -> None:
        tried.append(part)
        time.sleep(0.01)

    monkeypatch.setattr("outrider.sampling.grammar.faults.SEARCH_SECONDS", 0.1)
    assert place_of({"anyOf": [{}] * 1000}, "a fault", fault_of) == "#"
    assert len(tried) < 20


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "ab["}, "regex: unclosed character class, at character 3"),
        ({"regex": "a(?=b)"}, "regex: look-around.* is not supported"),
        ({"grammar": 'start: "a" foo'}, 'grammar: unknown name: "foo" at line 1, column 8'),
        ({"grammar": "root ::= foo"}, "grammar: Rule 'foo' not found"),
        (
            {"grammar": "root ::= " + '"a" ' * 6000},
            "grammar: a GBNF grammar may have 20000 characters at most",
        ),
        ({"grammar": 'root ::= "a'}, "grammar: Unexpected end of input at line 1"),
        ({"json": {"const": "\ud800"}}, "json: Value is not JSON"),
        ({"regex": "\ud800"}, "regex: .*surrogates not allowed"),
        ({"json": {}, "whitespace_pattern": "a("}, "whitespace_pattern: unclosed group, at character 2"),
        ({"json_object": True, "whitespace_pattern": "a("}, "whitespace_pattern: unclosed group"),
        ({"grammar": "start: " + '"a" | ' * 70_000 + '"b"'}, "grammar: it is too large, with the error: "),
        ({"json": {"$ref": "#"}}, r"no text has the form of json \{'\$ref': '#'\}"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(
    compiler: GrammarCompiler, form: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: {message}"):
        made(compiler, form)


def chained(count: int) -> list[dict[str, Any]]:
    """A grammar, a schema of objects and one of references, each of so many rules in a chain."""
    last = {f"d{count}": {"type": "string"}}
    links = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(count)]
    objects = [{"type": "object", "properties": {"a": link}} for link in links]
    rules = [f"r{i}: r{i + 1}" for i in range(count)]
    return [
        {"grammar": "\n".join(["start: r0", *rules, f'r{count}: "x"'])},
        *[
            {"json": {"$ref": "#/$defs/d0", "$defs": {f"d{i}": part for i, part in enumerate(parts)} | last}}
            for parts in (objects, links)
        ],
    ]


@pytest.mark.parametrize(
    ("form", "first"),
    [(chained(4000)[0], "x"), (chained(1200)[1], "{"), (chained(4000)[2], '"')],
    ids=["rules", "objects", "references"],
)
def test_rules_may_lie_deeper_than_the_stack_of_a_thread(
    compiler: GrammarCompiler, form: Any, first: str
) -> None:
    """The library recurses along them: the process ended with a segmentation fault."""
    state = made(compiler, form)
    assert mask(state, [], []).isfinite().any()
    assert state.move(Ids(PROMPT, compiler.tokenizer.encode(first)))


@pytest.mark.parametrize("form", chained(11_000), ids=["rules", "objects", "references"])
def test_more_rules_than_the_stack_has_room_for_are_refused(compiler: GrammarCompiler, form: Any) -> None:
    with pytest.raises(RequestError, match="a grammar may have 10000"):
        made(compiler, form)


def test_a_choice_may_have_more_colons_than_a_grammar_lines(compiler: GrammarCompiler) -> None:
    assert made(compiler, {"choice": [f"{i}:{i}:{i}:{i}" for i in range(3_500)]})


def test_a_lark_grammar_may_have_the_sign_of_gbnf_in_a_text(compiler: GrammarCompiler) -> None:
    state = made(compiler, {"grammar": 'start: "a ::= b"'})
    assert compiler.tokenizer.decode(state.forced(Ids([1, 2, 3]))) == "a ::= b"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": "{"}, "json is no JSON: .* line 1 column 2"),
        ({"json": {"enum": {1, 2}}}, "json is no JSON: .*set"),
        ({"json": "[1]"}, "json must be a JSON schema"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"regex": ""}, "regex must be a text"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "no effect"),
        ({"jsn": {}}, "unknown key 'jsn'.*Did you mean 'json'"),
        (5, "must be StructuredOutputs or a dict"),
    ],
)
def test_a_wrong_form_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=value)


def test_a_dict_a_text_and_the_class_mean_the_same() -> None:
    schema = '{"type": "integer"}'
    forms = [
        SamplingParams(structured_outputs=form).structured_outputs
        for form in ({"json": schema}, {"json": {"type": "integer"}}, StructuredOutputs(json=schema))
    ]
    assert forms[0] == forms[1] == forms[2]


def test_models_without_an_end_token_or_a_tokenizer_are_refused(builtin: Checkpoint) -> None:
    for tokenizer, ending, message in (
        (None, [1], "tokenizer.json"),
        (builtin.tokenizer, [], "end-of-sequence"),
    ):
        with pytest.raises(RequestError, match=message):
            GrammarCompiler(tokenizer, 8192, ending).state(StructuredOutputs(regex="a"), 3)


def test_a_missing_library_is_named_with_the_cure(
    builtin: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(builtin.tokenizer, builtin.spec.vocabulary, builtin.ending)
    for stops in ((), (1,)):
        with pytest.raises(RequestError, match=r"pip install 'outrider\[grammar\]'"):
            compiler.state(StructuredOutputs(regex="a"), 3, stops)


# ---- masks


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_a_tree_in_any_order_are_those_of_a_fresh_matcher(
    compiler: GrammarCompiler, form: dict[str, Any]
) -> None:
    rng, state = random.Random(1), made(compiler, form)
    output: list[int] = []
    for _ in range(6):
        paths: list[list[int]] = [[]]
        for _ in range(12):
            above = rng.choice(paths)
            allowed = (~mask(state, output, above)).nonzero().flatten().tolist()
            paths.append([*above, rng.choice(allowed)])
        for path in rng.sample(paths, len(paths)):
            fresh = made(compiler, form)
            assert torch.equal(mask(state, output, path), mask(fresh, [*output, *path], []))
        output += max(paths, key=len)


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(
    compiler: GrammarCompiler, builtin: Checkpoint
) -> None:
    form, (end,) = {"choice": ["yes", "yes!"]}, sorted(builtin.ending)
    encode = builtin.tokenizer.encode
    for text, may_end, may_go_on in (
        ("", False, True),
        ("ye", False, True),
        ("yes", True, True),
        ("yes!", True, False),
    ):
        found = mask(made(compiler, form), encode(text, add_special_tokens=False), [])
        assert bool(found[end]) is not may_end
        found[end] = True
        assert bool((~found).any()) is may_go_on
    after = mask(made(compiler, form), encode("yes", add_special_tokens=False), [end])
    assert (~after).nonzero().flatten().tolist() == [end], "nothing but the end follows the end"


def test_special_stop_tokens_are_allowed_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    state = compiler.state(StructuredOutputs(choice=["yes"]), len(PROMPT), stops=[3, 500])
    yes = compiler.tokenizer.encode("yes", add_special_tokens=False)
    assert mask(state, [], [])[3] and not mask(state, yes, [])[3]
    assert mask(state, yes, [])[500], "a stop token with a text is no end of the grammar"


def test_tokens_of_a_step_that_was_taken_back_are_forgotten(compiler: GrammarCompiler) -> None:
    state, fresh = made(compiler, RECURSIVE), made(compiler, RECURSIVE)
    open_, a, close = (
        compiler.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("(", "a", ")")
    )
    mask(state, [open_, a, close], [])
    assert torch.equal(mask(state, [open_], []), mask(fresh, [open_], []))
    assert torch.equal(mask(state, [open_, open_], [a]), mask(fresh, [open_, open_, a], []))


def test_forbidden_draft_tokens_are_found_by_one_walk(compiler: GrammarCompiler) -> None:
    state = made(compiler, RECURSIVE)
    open_, a, close = (
        compiler.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("(", "a", ")")
    )
    #                   0      1  2      3      4      5 below 4
    tokens, parents = [open_, a, close, close, open_, a], [-1, 0, 1, -1, 2, 4]
    tree = DraftTree(tokens, parents, [0.5] * 6)
    assert list(state.allowed(Ids(PROMPT), tree)) == [0, 1, 2]
    sampled = tree._replace(distributions=[torch.ones(1)], probs_of=[0, 0, 0, 0, -1, -1])
    assert list(state.allowed(Ids(PROMPT), sampled)) == [0, 1, 2, 3], "a rule judges the sample, not the walk"
    assert depth_first(parents) == [0, 1, 2, 4, 5, 3]


def test_a_mask_fits_logits_of_any_width(compiler: GrammarCompiler) -> None:
    processor, ids = GrammarMask(made(compiler, {"regex": "[0-9]"})), Ids(PROMPT)
    full = processor(ids, torch.zeros(8192))
    assert full.isfinite().sum() == 10
    assert torch.equal(processor(ids, torch.zeros(100)), full[:100])
    wide = processor(ids, torch.zeros(9000))
    assert torch.equal(wide[:8192], full) and not wide[8192:].isfinite().any()


# ---- forced text


def test_forced_tokens_are_those_of_the_tokenizer(compiler: GrammarCompiler) -> None:
    state = made(compiler, {"json": PERSON, "disable_any_whitespace": True})
    whole = compiler.tokenizer.encode('{"name": "', add_special_tokens=False)
    forced = state.forced(Ids(PROMPT))
    assert len(forced) >= 3 and whole[: len(forced)] == forced
    assert state.forced(Ids([*PROMPT, *whole])) == []
    assert made(compiler, {"json": PERSON}).forced(Ids([*PROMPT, 5])) == [], (
        "nothing is forced after forbidden tokens"
    )


def test_ids_beyond_the_vocabulary_are_forbidden_and_leave_the_grammar_intact(
    compiler: GrammarCompiler,
) -> None:
    state = made(compiler, {"choice": ["yes", "no"]})
    before = mask(state, [], [])
    for token in (-1, state.vocabulary, 2**31, 2**33):
        assert not state.move(Ids(PROMPT, [token]))
    assert list(state.allowed(Ids(PROMPT, []), DraftTree.chain([2**33], [0.5]))) == []
    assert torch.equal(mask(state, [], []), before)
