"""Translation of a body of Anthropic's Messages API into one of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from outrider.serve.errors import ApiError
from outrider.serve.messages.billing import unbilled
from outrider.serve.messages.protocol import ConversationBody, MessagesBody
from outrider.serve.protocol import ChatBody, JsonSchema, ResponseFormat, Sampling
from outrider.serve.wire import dumps

CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # type of a tool_choice -> that of a chat
THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
IMAGES = ("image", "document")


def chat_body(body: ConversationBody) -> ChatBody:
    """The same request for /v1/chat/completions.  Raises ApiError naming the place at fault."""
    messages = _system(body.system)
    for i, message in enumerate(body.messages):
        for made in _messages(message, i):
            _add(messages, made)
    choice = body.tool_choice or {}
    given: dict[str, Any] = {
        "messages": messages,
        "model": body.model,
        "tools": _tools(body.tools),
        "tool_choice": _choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        "chat_template_kwargs": {**_thinking(body.thinking), **(body.chat_template_kwargs or {})},
    }
    if (config := body.output_config) is not None:
        given["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = JsonSchema(schema=config.format.schema_)
            given["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:  # it is continued
        given |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesBody):
        given |= {name: getattr(body, name) for name in Sampling.model_fields}
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        given |= {"stream": body.stream, "seed": body.seed}
    try:
        return ChatBody(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise ApiError(400, f"{place}: {fault['msg']}", place) from error


def _system(given: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The system message, if there is one."""
    texts = [given] if isinstance(given, str) else _texts(given or [], "system")
    kept = [text for text in map(unbilled, texts) if text]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message.  Consecutive turns of the user, or of the assistant, are one, as in Anthropic's API."""
    last = messages[-1] if messages else {}
    if message["role"] != last.get("role") or message["role"] not in ("user", "assistant"):
        messages.append(message)
    elif message["role"] == "user":
        last["content"] = [*_parts(last["content"]), *_parts(message["content"])]
    else:
        texts = [text for text in (last["content"], message["content"]) if text]
        calls = last.get("tool_calls", []) + message.get("tool_calls", [])
        thoughts = [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]
        messages[-1] = _turn(texts, thoughts, calls)


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _messages(message: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
    """Chat messages of message i: several, if it has results of tools."""
    role, content, place = message.get("role"), message.get("content"), f"messages.{i}"
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f'{place}.role must be "user" or "assistant", got {role!r}.', f"{place}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    place = f"{place}.content"
    blocks = _blocks(content, place)
    if role == "assistant":
        return [_reply(blocks, place)]
    if not blocks:
        raise ApiError(400, f"{place} must not be empty.", place)
    made: list[dict[str, Any]] = []
    for k, block in enumerate(blocks):
        at = f"{place}.{k}"
        if block.get("type") == "tool_result" and role == "user":
            made.append(_result(block, at))
        elif made and made[-1]["role"] == role:
            made[-1]["content"].append({"type": "text", "text": _text(block, at)})
        else:
            made.append({"role": role, "content": [{"type": "text", "text": _text(block, at)}]})
    return made


def _reply(blocks: Iterable[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """A message of the assistant, with its calls and its thoughts."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for k, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, f"{place}.{k}"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{place}.{k}"))
    return _turn(texts, thoughts, calls)


def _turn(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A message of the assistant."""
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) or (None if calls else "")}
    if any(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise ApiError(400, f"{place} needs a name and an input, which is an object.", place)
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": dumps(given)}}


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(_texts(content, f"{place}.content"))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _texts(blocks: Any, place: str) -> list[str]:
    return [_text(block, f"{place}.{k}") for k, block in enumerate(_blocks(blocks, place))]


def _text(block: Mapping[str, Any], place: str) -> str:
    kind = block.get("type")
    if kind in IMAGES:
        raise ApiError(400, f"{place}: blocks of type {kind!r} are not supported: models take text.", place)
    if kind != "text":
        raise ApiError(400, f"{place}: blocks of type {kind!r} are not supported here.", place)
    if not isinstance(text := block.get("text"), str):
        raise ApiError(400, f"{place}.text must be a text.", f"{place}.text")
    return text


def _blocks(given: Any, place: str) -> list[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(block, Mapping) for block in given):
        raise ApiError(400, f"{place} must be a text or a list of blocks.", place)
    return given


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in the shape of chat completions.  Raises ApiError for those of Anthropic's service."""
    made = []
    for i, tool in enumerate(tools or ()):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise ApiError(
                400,
                f"tools.{i}: tools of type {kind!r} are not supported: give an input_schema.",
                f"tools.{i}",
            )
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
            raise ApiError(400, f"tools.{i} needs a name and an input_schema.", f"tools.{i}")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        made.append({"type": "function", "function": function})
    return made or None


def _choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice and (not isinstance(kind, str) or kind not in CHOICES):
        raise ApiError(
            400, 'tool_choice must have the type "auto", "any", "none", or "tool" with a name.', "tool_choice"
        )
    return CHOICES.get(str(kind))


def budget_of(body: MessagesBody) -> int | None:
    """The tokens that a reasoning may have; None: any number."""
    budget = (body.thinking or {}).get("budget_tokens")
    return budget if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0 else None


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in THINKS:
        raise ApiError(400, f"thinking.type must be one of {', '.join(THINKS)}, got {kind!r}.", "thinking")
    return {"enable_thinking": THINKS[kind]}
