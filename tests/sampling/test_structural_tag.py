"""Structural tags: a free text, in which every trigger begins a part that follows its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider import RequestError, SamplingParams, StructuredOutputs
from outrider.core.processor import Ids
from outrider.sampling.grammar.compiler import GrammarCompiler
from outrider.sampling.grammar.state import GrammarState

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
END = "</function>"
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": END},
        {"begin": "<function=add>", "schema": {"type": "integer"}, "end": END},
        {"begin": 'é😀 "\n', "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<function=", "é😀"],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": TAGS["triggers"],
        "tags": [
            {
                "begin": tag["begin"],
                "content": {"type": "json_schema", "json_schema": tag["schema"]},
                "end": tag["end"],
            }
            for tag in TAGS["structures"]
        ],
    },
}


def made(compiler: GrammarCompiler, form: Any, **more: Any) -> GrammarState:
    return compiler.state(StructuredOutputs(structural_tag=form, **more), 0)


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    ids: list[int] = compiler.tokenizer.encode(text, add_special_tokens=False)
    return ids


TEXTS = [  # text, whether it may stand there, whether it may end there
    ("", True, True),
    ("Free text,\r\n\tand <functions> { of any kind }", True, True),
    ("Here: <function=", True, False),
    ("Here: <function=other", False, False),
    ('Here: <function=weather>{"city": "Ro', True, False),
    ('Here: <function=weather>{"city": "Paris', False, False),
    (f'Here: <function=weather>{{"city": "Rome"}}{END}', True, True),
    (f'<function=weather>{{"city": "Rome"}}{END}<function=add>12{END} and <func', True, True),
    (f"<function=add>12 {END[0]}x", False, False),
    ('é😀 "\ntrue', True, True),
    ('é😀 "\ntrue, and é😀 "\nfalse.', True, True),
    ("é😀!", False, False),
]


@pytest.mark.parametrize(("text", "stands", "ends"), TEXTS)
@pytest.mark.parametrize("form", [TAGS, json.dumps(TAGS), FORMAT], ids=["dict", "text", "format"])
def test_a_trigger_begins_a_part_with_its_schema(
    form: Any, text: str, stands: bool, ends: bool, compiler: GrammarCompiler
) -> None:
    state, ids = made(compiler, form), encoded(compiler, text)
    assert state.move(Ids((), ids)) is stands
    if stands:
        forbidden = state.forbidden(Ids((), ids))
        assert forbidden is not None and bool(forbidden[min(compiler.ending)]) is not ends


def test_the_beginning_and_the_end_of_a_part_are_forced(compiler: GrammarCompiler) -> None:
    state = made(compiler, TAGS, disable_any_whitespace=True)

    def forced(text: str) -> str:
        found: str = compiler.tokenizer.decode(state.forced(Ids((), encoded(compiler, text))))
        return found

    assert forced("é😀").startswith(' "') and forced("Free text") == ""
    assert forced("<function=w").startswith("eather") and forced('<function=weather>{"city": "R') != ""
    assert not state.move(Ids((), encoded(compiler, '<function=weather>{"city":"Rome')))


def test_the_shortest_trigger_of_a_beginning_counts(compiler: GrammarCompiler) -> None:
    """It comes first, so that the rest of both has to be possible behind it."""
    parts = [
        {"begin": f"<f{name}>", "schema": {"type": kind}, "end": ";"}
        for name, kind in (("", "integer"), ("un", "boolean"))
    ]
    state = made(compiler, {"triggers": ["<fun", "<f"], "structures": parts})
    for text, good in (("<f>1;", True), ("<fun>true;", True), ("<fun>1", False), ("<fx", False)):
        assert state.move(Ids((), encoded(compiler, text))) is good


def test_a_marker_may_be_a_special_token_or_its_text(compiler: GrammarCompiler) -> None:
    part = {"begin": "<|user|>add", "schema": {"type": "integer"}, "end": "<|system|>"}
    user, assistant, system = (
        compiler.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("user", "assistant", "system")
    )
    state = made(compiler, {"triggers": ["<|user|>"], "structures": [part]})
    one, add, free = (encoded(compiler, text) for text in ("1", "add", "Free "))
    written = [token for text in ("<", "|user|", ">") for token in encoded(compiler, text)]
    for begin in ([user], written):
        assert state.move(Ids((), [*free, *begin, *add, *one, system, *free]))
        assert not state.move(Ids((), [*free, *begin, *free]))
        assert not state.move(Ids((), [*free, *begin, *add, *one, assistant]))
    assert state.move(Ids((), [*free, assistant, *free])), "other special tokens are free text"


def part(**given: Any) -> dict[str, Any]:
    whole = {"begin": "<f>", "schema": {"type": "integer"}, "end": ";", **given}
    return {"triggers": ["<f"], "structures": [whole]}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("{", "structural_tag is no JSON"),
        ("[1]", "structural_tag must be {"),
        (5, "structural_tag must be {"),
        ({}, "structural_tag must be {"),
        ({"structures": [], "triggers": ["<f"]}, "structural_tag must be {"),
        ({**part(), "triggers": [""]}, "triggers must be texts"),
        ({**part(), "triggers": "<f"}, "structural_tag must be {"),
        ({**part(), "triggers": ["<g"]}, "'<f>' of structure 0 starts with none of the triggers"),
        ({"structures": ["<f>"], "triggers": ["<f"]}, "got {} as structure 0"),
        (part(schema=None), "as structure 0"),
        (part(end=None), "as structure 0"),
        (part(schema={"enum": {1}}), "is no JSON"),
        ({"triggers": ["<"], "structures": part()["structures"] * 1001}, "1000 structures at most"),
        ({"format": {"type": "tag"}}, "triggered_tags"),
        ({"format": {"type": "triggered_tags", "tags": [{"content": {"type": "regex"}}]}}, "JSON schemas"),
        ({"format": {"type": "triggered_tags", "at_least_one": True}}, "at_least_one is not supported"),
    ],
)
def test_a_wrong_structural_tag_is_refused_by_name(form: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(structured_outputs={"structural_tag": form})
    assert message in str(error.value)


def test_the_fault_of_a_schema_has_its_place(compiler: GrammarCompiler) -> None:
    form = part(schema={"properties": {"x": {"not": {}}}})
    with pytest.raises(RequestError, match=r"structure 0, at #/properties/x: not is not supported"):
        made(compiler, form)
    many = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(10_001)}
    with pytest.raises(RequestError, match="10000 references at most"):
        made(compiler, part(schema={"$ref": "#/$defs/d0", "$defs": many}))
