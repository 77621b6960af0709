"""The form that an output must have, with vLLM's names."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from outrider.core.reasoning import ReasoningMarkers
from outrider.core.structural_tag import tags_of
from outrider.core.validate import TEXT, Flag, Kind, kinds_of, list_of
from outrider.errors import RequestError, refuse_unknown, shortened

WHERE = "structured_outputs"
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ONE = "There is one grammar library: leave it out."
ELSEWHERE = {  # keys of vLLM or llama.cpp that are refused -> replacement
    "backend": _ONE,
    "_backend": _ONE,
    "disable_fallback": _ONE,
    "disable_additional_properties": 'Write "additionalProperties": false into the schema.',
    "schema": "Did you mean 'json'?",
    "json_schema": "Did you mean 'json'?",
    "lark": "Did you mean 'grammar'?",
    "gbnf": "Did you mean 'grammar'?",
    "ebnf": "Did you mean 'grammar'?",
}

SCHEMA = Kind("a JSON schema: a dict, or its text", lambda value: isinstance(value, Mapping))
CHOICE = list_of("texts that are not empty", TEXT)


def _texts(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) < 2 or not all(isinstance(v, str) for v in value):
        return False
    halves = any("\ud800" <= letter <= "\udfff" for letter in "".join(value))  # of surrogate pairs
    return all(value[1:]) and not halves


def _markers(value: Any) -> bool:
    return _texts(value) and len(value) == 2


MARKERS = Kind('two texts such as ("<think>", "</think>")', _markers)
ENDED_BY_CALLS = Kind(
    'texts such as ("<think>", "</think>") or ("<think>", "</think>", "<tool_call>")', _texts
)
TRUE = Kind("True or False", lambda value: value is None or value is True)
Filled = Annotated[str, Kind("a text that is not empty", TEXT.accepts)]


@dataclass(frozen=True)
class StructuredOutputs:
    """Constraint on the output of a request: exactly one of the first six fields.

    json                    a JSON schema, as a dict or as text
    regex                   a regular expression that matches the whole output (Rust's syntax)
    choice                  a list of texts, one of which is the output
    grammar                 a Lark grammar (rule `start`), or a GBNF one (rule `root`, `::=`)
    json_object             True: any JSON object
    structural_tag          free text with parts that follow JSON schemas, as a dict or as text
    reasoning               ("<think>", "</think>"): markers of what the model may think first, in any form.
                            Where the prompt ends with the first one, or it is empty, it does
    whitespace_pattern      regular expression of the whitespace between JSON tokens; None: at most a line
                            break and 24 spaces
    disable_any_whitespace  True: only ", " and ": ", as Python's json.dumps writes

    Raises RequestError naming the field and its value.
    """

    json: Annotated[Mapping[str, Any] | str, SCHEMA] | None = None
    regex: Filled | None = None
    choice: Annotated[Sequence[str], CHOICE] | None = None
    grammar: Filled | None = None
    json_object: Annotated[bool | None, TRUE] = None
    structural_tag: Mapping[str, Any] | str | None = None
    whitespace_pattern: Annotated[str, Kind("a regular expression", TEXT.accepts)] | None = None
    disable_any_whitespace: Flag = False
    reasoning: Annotated[Sequence[str], MARKERS] | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"{WHERE} needs exactly one of {', '.join(FORMS)}, got {found}.")
        object.__setattr__(self, "json", _schema(self.json))
        if self.structural_tag is not None:
            tags_of(self.structural_tag)  # raises RequestError
        for name, kind in kinds_of(StructuredOutputs).items():
            kind.check(getattr(self, name), f"{WHERE}.{name}", RequestError)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(f"{WHERE}: whitespace_pattern has no effect beside disable_any_whitespace.")

    def behind(self, prompt: str) -> StructuredOutputs:
        """The same for the output behind a prompt's last turn, which tells whether a reasoning can come."""
        if self.reasoning is None:
            return self
        markers = ReasoningMarkers.of(self.reasoning).continued(prompt)
        return replace(self, reasoning=markers and markers.texts)

    @staticmethod
    def of(given: Any) -> StructuredOutputs | None:
        """Parse the value of SamplingParams(structured_outputs=…)."""
        if given is None or isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(
                f'{WHERE} must be StructuredOutputs or a dict such as {{"json": schema}}, got '
                f"{shortened(given)}."
            )
        names = [field.name for field in fields(StructuredOutputs)]
        refuse_unknown(given, names, "key", WHERE, ELSEWHERE, RequestError)
        return StructuredOutputs(**given)


def _schema(given: Any) -> Any:
    """A JSON schema, from text if it is one."""
    try:
        if isinstance(given, str):
            if (schema := jsonlib.loads(given)) is None:
                raise ValueError("null is no schema")
            return schema
        jsonlib.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{WHERE}: json is no JSON: {error}.") from error
    return given
