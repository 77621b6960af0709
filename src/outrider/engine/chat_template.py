"""Rendering of chat messages to token ids through a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

from outrider.errors import RequestError, refuse_unknown, shortened

TEXTS = ("text", "refusal")  # types of parts, and their keys
SET = ("self", "conversation", "conversations", "tokenize", "return_assistant_tokens_mask")  # by the renderer
# Digits that no template writes by itself, and that no change of case alters.
PROBE, OTHER_PROBE = "81407235961", "50271963842"
DECIDED: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()  # tokenizer -> template -> reads parts
MOST_DECIDED = 64  # templates of requests may be many
Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "…"}, …]


@dataclass(frozen=True)
class Conversation:
    """Keys of a prompt of messages, with vLLM's names."""

    messages: Messages
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None  # not of the template


def conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Wrap a single conversation in a list.  Returns a list of conversations unchanged."""
    several = (
        isinstance(messages, Sequence)
        and messages
        and all(isinstance(inner, (list, tuple)) for inner in messages)
    )
    return messages if several else [messages]  # type: ignore[return-value, list-item]


def render(
    tokenizer: Any, prompt: Mapping[str, Any], check: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Render {"messages": […], …} to {"prompt": text, "prompt_token_ids": ids}.

    The template writes all special tokens, so the tokenizer adds none.
    check: called with the text before it is tokenized.
    Raises RequestError if the tokenizer has no template, or the template rejects the messages.
    """
    names = [f.name for f in fields(Conversation)]
    refuse_unknown(prompt, names, "key of a conversation", error=RequestError)
    given = Conversation(**prompt)
    _check(tokenizer, given)
    variables = _variables(given, [*names, *SET])
    conversation = [_message(given.messages, i) for i in range(_count(given.messages))]

    def apply(messages: Messages) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=given.tools,
                documents=given.documents,
                chat_template=given.chat_template,
                add_generation_prompt=given.add_generation_prompt,
                continue_final_message=given.continue_final_message,
                tokenize=False,
                **variables,
            )
        )

    try:
        template = _template(tokenizer, given)
        if "message.thinking" in template:
            conversation = [*map(_with_thinking, conversation)]
        of_parts = _reads_parts(tokenizer, template)
        rendered = apply(list(map(_of_parts, conversation)) if of_parts else conversation)
        if check is not None:
            check(rendered)
        return {
            "prompt": rendered,
            "prompt_token_ids": tokenizer.encode(rendered, add_special_tokens=False, verbose=False),
        }
    except RequestError:
        raise
    except Exception as error:  # a template is a program and raises any type
        raise RequestError(f"the chat template cannot take these messages: {error}") from error


def _check(tokenizer: Any, given: Conversation) -> None:
    """Raise RequestError for a tokenizer that cannot render messages, and options that exclude each other."""
    if tokenizer is None:
        raise RequestError("messages need a tokenizer, and the checkpoint has none: pass LLM(tokenizer=…).")
    if given.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: pass chat_template=…, or write the prompt yourself and use "
            "generate.",
            "chat_template",
        )
    if given.add_generation_prompt and given.continue_final_message:
        raise RequestError(
            "continue_final_message goes on with the last message: set add_generation_prompt=False with it.",
            "continue_final_message",
        )


def _template(tokenizer: Any, given: Conversation) -> str:
    """The template of a conversation, also of a tokenizer that has several with names."""
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        return str(tokenizer.get_chat_template(given.chat_template, given.tools))
    return str(own if given.chat_template is None else given.chat_template)


def _reads_parts(tokenizer: Any, template: str) -> bool:
    """Whether a template reads contents only as lists of parts, and finds no text in a string.

    Templates of models that read images may do so.  The template is tried with one message, which depends on
    no request, as the answer holds for all of them.
    """
    known = DECIDED.setdefault(tokenizer, {})
    if template not in known:
        if len(known) >= MOST_DECIDED:
            known.clear()
        message = {"role": "user", "content": PROBE}
        of_parts = _of_parts(message)
        of_parts["content"][0][OTHER_PROBE] = OTHER_PROBE
        found = not _writes_text(tokenizer, template, message) and _writes_text(tokenizer, template, of_parts)
        known[template] = found
    return known[template]


def _writes_text(tokenizer: Any, template: str, message: dict[str, Any]) -> bool:
    """Whether the probe is in the prompt, but not as a part of a list that is written with all its keys."""
    try:
        text = tokenizer.apply_chat_template([message], chat_template=template, tokenize=False)
    except Exception:  # a template is a program and raises any type
        return False
    return PROBE in text and OTHER_PROBE not in text


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message for the template of gpt-oss, which names the reasoning in front of a call `thinking`.

    It takes either this or a content for a message with calls, and no content that is null.
    """
    thought = message.get("reasoning_content")
    if isinstance(thought, str) and thought:
        message = {"thinking": thought, **message}
    if message.get("tool_calls") and (message.get("thinking") or message["content"] is None):
        message = {name: value for name, value in message.items() if name != "content"}
    return message


def _of_parts(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("content") is None:
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _variables(given: Conversation, reserved: Sequence[str]) -> Mapping[str, Any]:
    variables = given.chat_template_kwargs or {}
    for name in reserved:
        if name in variables:
            text = f"chat_template_kwargs: {name!r} is no variable of the template that may be set."
            raise RequestError(text, "chat_template_kwargs")
    return variables


def _count(messages: Messages) -> int:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages must be a list such as [{{"role": "user", "content": "…"}}], got {messages!r}.'
        )
    if not messages:
        raise RequestError("the conversation is empty: it must have at least one message.")
    return len(messages)


def _message(messages: Messages, i: int) -> dict[str, Any]:
    """Normalize message i: content as a string, arguments of tool calls as objects.  Raises RequestError."""
    given = messages[i]
    if not isinstance(given, Mapping):
        raise RequestError(
            f'message {i} must be {{"role": …, "content": …}}, got {given!r}.', f"messages.{i}"
        )
    made = dict(given)
    if not isinstance(made.get("role"), str):
        raise RequestError(
            f"message {i} needs a role such as 'user', 'assistant' or 'system', got {made.get('role')!r}.",
            f"messages.{i}.role",
        )
    if made["role"] == "assistant" and made.get("content") is None and not made.get("tool_calls"):
        made["content"] = ""
    made["content"] = _content(made.get("content"), i, optional=bool(made.get("tool_calls")))
    if made.get("tool_calls"):
        if not isinstance(made["tool_calls"], (list, tuple)):
            text = f"tool_calls of message {i} must be a list, got {shortened(made['tool_calls'])}."
            raise RequestError(text, f"messages.{i}.tool_calls")
        made["tool_calls"] = [_call(call, i) for call in made["tool_calls"]]
    return made


def _content(given: Any, i: int, optional: bool) -> str | None:
    """Content as a string; parts of type text or refusal are joined by newlines.  None only if `optional`."""
    if isinstance(given, str) or (given is None and optional):
        return given
    parts = given if isinstance(given, (list, tuple)) else [given]
    texts: list[Any] = [
        part.get(part["type"]) if isinstance(part, Mapping) and part.get("type") in TEXTS else None
        for part in parts
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"the content of message {i} must be a string or a list of "
            f'{{"type": "text", "text": …}}, got {given!r}.',
            f"messages.{i}.content",
        )
    return "\n".join(texts)


def _call(given: Any, i: int) -> dict[str, Any]:
    try:
        function = dict(given["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**given, "function": function}
    except (TypeError, KeyError, ValueError) as error:
        raise RequestError(
            f"a tool call of message {i} has no function with JSON arguments: {given!r}.",
            f"messages.{i}.tool_calls",
        ) from error
