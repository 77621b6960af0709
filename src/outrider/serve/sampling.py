"""Conversion of the body of a request into SamplingParams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from outrider.core.params import SamplingParams
from outrider.core.reasoning import ReasoningMarkers
from outrider.errors import RequestError
from outrider.serve.errors import ApiError, api_error
from outrider.serve.harmony import HarmonyMarkers
from outrider.serve.messages.protocol import MessagesBody
from outrider.serve.protocol import Classic, ResponseFormat, ResponsesBody, Sampling

# parameters that a body has under the same name, but not with the same meaning
OTHERS = {"logprobs", "max_tokens", "prediction", "structured_outputs"}
SHARED = {field.name for field in fields(SamplingParams)} - OTHERS
WHITESPACE = "guided_whitespace_pattern"
JSON_FORMS = {"json", "json_object", "structural_tag"}
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
# parameters of the engine that bodies have under other names
FIELDS = {"draft_method": "speculation.method", "lora_request": "model"}
# fields of chats that /v1/messages has under other names
MESSAGE_FIELDS = {"response_format": "output_config.format", "reasoning_effort": "output_config.effort"}
PROMPTS = ("prompt", "messages", "input")


def params_of(
    body: Sampling,
    defaults: Mapping[str, Any],
    form: Mapping[str, Any] | None = None,
    markers: ReasoningMarkers | None = None,
    bounded: ReasoningMarkers | None = None,
    calls: bool = False,
    **more: Any,
) -> SamplingParams:
    """SamplingParams of a body.

    defaults: of what the body does not give.
    form: structured_outputs of another field.  markers: of a reasoning that may come before any form.
    bounded: of one that thinking_token_budget bounds; None if the reply has none.
    calls: whether the reply may have tool calls, whose markers end a reasoning.
    more: fields of other names; None is left out.
    Raises RequestError or ApiError naming the field.
    """
    given = {name: getattr(body, name) for name in SHARED & type(body).model_fields.keys()}
    if isinstance(body, Classic):
        if body.stream and body.prompt_logprobs:
            instead = "leave stream out, or ask /v1/completions for echo with logprobs"
            raise ApiError(400, f"a stream has no prompt_logprobs: {instead}.", "prompt_logprobs")
        given["prediction"] = body.prediction.text if body.prediction is not None else None
    forms = _forms(body)
    if form:
        forms[_format_field(body) or "tool_choice"] = dict(form)
    if len(forms) > 1:
        names = " and ".join(forms)
        raise ApiError(
            400, f"only one constraint on the output can be given, got {names}.", next(iter(forms))
        )
    field, form = next(iter(forms.items()), ("", None))
    if form and isinstance(markers, HarmonyMarkers) and "reasoning" not in form:
        raise ApiError(400, f"{field} is not supported for messages of gpt-oss: leave it out.", field)
    if form and markers:
        form = {"reasoning": (markers.begin, markers.end), **form}
    given["structured_outputs"] = form
    if bounded is None:
        given["thinking_token_budget"] = None
    elif body.thinking_token_budget not in (None, -1):
        given["reasoning_markers"] = bounded.texts if calls and not form else (bounded.begin, bounded.end)
    if body.speculation is not None:
        given["speculate"] = body.speculation.enabled and body.speculation.max_tokens != 0
        given["max_draft_tokens"] = body.speculation.max_tokens or None
        given["draft_method"] = body.speculation.method
    known = {key: value for key, value in {**given, **more}.items() if value is not None}
    return SamplingParams(**{"max_tokens": None, **defaults, **known})


def check_budget(body: Sampling, markers: ReasoningMarkers | None) -> None:
    """Raise ApiError if a body bounds a reasoning that is not known.  markers: of the server."""
    if body.thinking_token_budget in (None, -1) or can_bound(markers):
        return
    cure = "use reasoning_effort" if markers else "start the server with --reasoning-parser"
    raise ApiError(400, f"thinking_token_budget is not supported here: {cure}.", "thinking_token_budget")


def can_bound(markers: ReasoningMarkers | None) -> bool:
    """Whether a reasoning can be ended by its end marker: not one in messages of gpt-oss."""
    return markers is not None and not isinstance(markers, HarmonyMarkers)


def check_logprobs(body: Sampling, most: int) -> None:
    """Raise ApiError if a body asks for more log-probabilities of a token than the server's max_logprobs."""
    for name in ("prompt_logprobs", "logprobs", "top_logprobs"):
        count = getattr(body, name, None)
        if isinstance(count, bool) or count is None or most == -1 or 0 <= count <= most:
            continue
        asked = "all" if count == -1 else count
        raise ApiError(
            400,
            f"{name} must be at most {most}, got {count}: a server with --max-logprobs -1 returns {asked}.",
            name,
        )


def _forms(body: Sampling) -> dict[str, dict[str, Any]]:
    """structured_outputs of a body, by the field that they come from."""
    forms = {name: {key: value} for name, key in GUIDED.items() if (value := getattr(body, name)) is not None}
    if body.structured_outputs is not None:
        forms["structured_outputs"] = body.structured_outputs
    format = body.response_format if isinstance(body, Classic) else None
    if format is not None and (form := of_format(format)) is not None:
        forms["response_format"] = form
    if (pattern := body.guided_whitespace_pattern) is not None:
        if not any(JSON_FORMS & form.keys() for form in forms.values()):
            raise ApiError(400, f"{WHITESPACE} needs a constraint to JSON.", WHITESPACE)
        forms = {name: {**form, "whitespace_pattern": pattern} for name, form in forms.items()}
    return forms


@contextmanager
def naming(body: Sampling) -> Iterator[None]:
    """Raise a RequestError as an ApiError that names the field of the body at fault."""
    try:
        yield
    except RequestError as error:
        refusal, field = api_error(error), field_of(body, error.param)
        other = "" if field in (None, error.param) else f"{field}: "
        raise ApiError(400, f"{other}{error}", field, refusal.code) from error


def field_of(body: Sampling, param: str | None) -> str | None:
    """The field of a body that a parameter of the engine or the prompt comes from; None if it is none.

    param: a place within the value may follow its name; it is kept if the field has the same name.
    """
    name, known = (param or "").partition(".")[0], type(body).model_fields
    found = FIELDS.get(name, name)
    if name in PROMPTS:
        found = next(field for field in PROMPTS if field in known)
    elif name == "structured_outputs":
        found = next(iter(_forms(body)), _format_field(body) or "tools")
    if found.partition(".")[0] not in known:
        return None
    return param if found == name else found


def _format_field(body: Sampling) -> str | None:
    """The field that constrains the output of a response or a message; None if a tool_choice may do so."""
    if isinstance(body, MessagesBody):
        config = body.output_config
        return MESSAGE_FIELDS["response_format"] if config is not None and config.format is not None else None
    format = body.text.format if isinstance(body, ResponsesBody) and body.text is not None else None
    return "text.format" if format is not None and format.get("type") != "text" else None


def rename_fields(error: ApiError) -> None:
    """Give the fields in a refusal of a chat the names that they have in a body of /v1/messages."""
    for name, own in MESSAGE_FIELDS.items():
        error.message = error.message.replace(name, own)
        if error.param == name:
            error.param = own


def of_format(format: ResponseFormat) -> dict[str, Any] | None:
    """structured_outputs of OpenAI's response_format; None for text."""
    if format.type == "text":
        return None
    if format.type == "json_object":
        return {"json_object": True}
    if format.type == "structural_tag":
        given = {name: getattr(format, name) for name in ("structures", "triggers", "format")}
        return {"structural_tag": {name: value for name, value in given.items() if value is not None}}
    if format.json_schema is None:
        raise ApiError(400, "response_format json_schema needs 'json_schema'.", "response_format.json_schema")
    return {"json": format.json_schema.schema_}
