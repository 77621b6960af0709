"""The tools of a request and its tool_choice: which functions may be called, and which output is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.serve.errors import ApiError

CHOICES = '"auto", "none" or "required", or name a function or allowed_tools'


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model is given, in the shape of chat completions, and how it may call them.

    required: the output is a list of calls.  name: of the only function that is called; its arguments are the
    output.  limited: calls of other functions are left out, as allowed_tools demands.
    single: the list has one call.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    required: bool = False
    name: str | None = None
    limited: bool = False
    single: bool = False

    @staticmethod
    def of(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None = True) -> ToolUse:
        """Check the fields `tools` and `tool_choice`; without tools for tool_choice "none".

        parallel: False: one call at most.
        Raises ApiError for tools that are no functions, for an unknown tool_choice, and for one that names a
        function that is none of the tools.
        """
        known = [_checked(tool, i) for i, tool in enumerate(tools or ())]
        if choice == "none":
            return ToolUse()
        allowed = _allowed(choice)
        name = named_tool(choice) if allowed is None else None
        if choice not in (None, "auto", "required") and name is None and allowed is None:
            raise ApiError(400, f"tool_choice must be {CHOICES}.", "tool_choice")
        if not known and choice not in (None, "auto"):
            raise ApiError(400, "tool_choice needs tools.", "tool_choice")
        required = choice == "required"
        if allowed is not None:
            required, names = allowed
            known = [tool for other in names for tool in _named(known, other)]
        elif name is not None:
            _named(known, name)
        return ToolUse(known, required, name, allowed is not None, parallel is False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Their JSON schemas, by the name of the function."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def form(self) -> dict[str, Any] | None:
        """Constraint on the output (structured_outputs): None if the model may answer with a text.

        A named function constrains the output to its arguments, `required` to a list of calls (as in vLLM).
        The JSON has no whitespace: small models otherwise emit line breaks without end.
        """
        functions = [
            (tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"})
            for tool in self.tools
        ]
        if self.name is not None:
            schemas = [schema for name, schema in functions if name == self.name]
            return {"json": _any_of(schemas), "disable_any_whitespace": True}
        if not self.required:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{i}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for i, (name, _) in enumerate(functions)
        ]
        parts = {str(i): moved(schema, f"#/$defs/{i}") for i, (_, schema) in enumerate(functions)}
        schema = {"$defs": parts, "type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if self.single:
            schema["maxItems"] = 1
        return {"json": schema, "disable_any_whitespace": True}


def _any_of(schemas: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schema of what one of these allows: several tools may have one name."""
    if len(schemas) == 1:
        return schemas[0]
    parts = {str(i): moved(schema, f"#/$defs/{i}") for i, schema in enumerate(schemas)}
    return {"$defs": parts, "anyOf": [{"$ref": f"#/$defs/{i}"} for i in parts]}


def _checked(tool: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    function = tool.get("function")
    good = tool.get("type") == "function" and isinstance(function, Mapping)
    if not (good and isinstance(function.get("name"), str)):  # type: ignore[union-attr]
        raise ApiError(
            400, f'tool {i} must be {{"type": "function", "function": {{"name": …}}}}.', f"tools.{i}"
        )
    if not isinstance(function.get("parameters") or {}, Mapping):  # type: ignore[union-attr]
        raise ApiError(400, f"the parameters of tool {i} must be a JSON schema.", f"tools.{i}")
    return tool


def _named(tools: Sequence[Mapping[str, Any]], name: str) -> Sequence[Mapping[str, Any]]:
    """The tools of this name.  Raises ApiError if there is none."""
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools.", "tool_choice")
    return found


def named_tool(choice: Any) -> str | None:
    """The function that a tool_choice names, in chat's or in the responses' shape."""
    if not isinstance(choice, Mapping):
        return None
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _allowed(choice: Any) -> tuple[bool, list[str]] | None:
    """(whether a call is required, names) of a tool_choice of type allowed_tools, in either shape.

    None for another tool_choice.  Raises ApiError.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    names = [named_tool(tool) for tool in tools] if isinstance(tools, list) else []
    found = list(dict.fromkeys(name for name in names if name is not None))
    if mode not in ("auto", "required") or not names or None in names:
        raise ApiError(
            400,
            'allowed_tools needs a mode, "auto" or "required", and a list of tools such as '
            '{"type": "function", "function": {"name": …}}.',
            "tool_choice",
        )
    return mode == "required", found


def moved(schema: Any, place: str) -> Any:
    """A schema whose references stay valid as part of another one, at this place."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        own = {"$ref": place + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else {}
        return {key: moved(value, place) for key, value in schema.items()} | own
    return [moved(value, place) for value in schema] if isinstance(schema, list) else schema
