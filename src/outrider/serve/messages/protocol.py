"""Bodies of requests, with the fields of Anthropic's Messages API.  Unknown fields are refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.serve.protocol import Body, Count, Many, Sampling, Text


class OutputFormat(Body):
    type: Literal["json_schema"]
    # "schema" is a method of BaseModel
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None  # for the chat template
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None  # without effect here


class ConversationBody(Body):
    """Fields of /v1/messages and /v1/messages/count_tokens.

    Blocks and tools are checked by `chat_body`: they have keys of Anthropic's service, which are left out.
    """

    model: str | None = None
    messages: Many[dict[str, Any]] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    # of Anthropic's service: without effect here
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None


class CountBody(ConversationBody):
    """Body of /v1/messages/count_tokens."""


class MessagesBody(Sampling, ConversationBody):
    """Body of /v1/messages.  Beside Anthropic's fields, those of `Sampling` and a seed."""

    max_tokens: Count
    stop_sequences: Many[Text] | None = None
    stream: bool | None = None
    inference_geo: str | None = None  # without effect here
    seed: int | None = None


class MessagesFault(Body):
    type: str
    message: str
    code: str | None = None


class MessagesErrorBody(Body):
    """Body of a refusal."""

    type: Literal["error"]
    error: MessagesFault
