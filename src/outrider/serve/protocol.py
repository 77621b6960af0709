"""Bodies of requests, with OpenAI's fields and vLLM's extensions.  Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_SAMPLES = 128
MOST_PROMPTS = 1024

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # one error, however many items are wrong


BEAMS = "there is no beam search: use best_of of completions, or n"
CUT = "use temperature, min_p, top_k or top_p"
REPEATS = "use repetition_penalty, presence_penalty or frequency_penalty"
UNSUPPORTED = {  # fields of OpenAI's, vLLM's and llama.cpp's servers that are refused -> what to do instead
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "models take and make text",
    "moderation": "texts are not judged here",
    "web_search_options": "nothing is searched here: give the model a tool",
    "conversation": "responses are not stored: send the whole conversation as input",
    "context_management": "shorten the input yourself",
    "prompt_embeds": "give token ids as prompt",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "models take and make text"),
    "vllm_xargs": "give logits processors in Python, with SamplingParams",
    "repetition_detection": REPEATS,
    "previous_response": "send the whole conversation as input",
    "previous_input_messages": "send the whole conversation as input",
    "enable_response_messages": "send the whole conversation as input",
    "logits_processors": "use them in Python, with SamplingParams",
    "logprob_token_ids": "ask for more logprobs",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
    "beam_width": BEAMS,
    **dict.fromkeys(("typical_p", "tfs_z", "top_a", "top_n_sigma", "eta_cutoff", "epsilon_cutoff"), CUT),
    **dict.fromkeys(("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta"), CUT),
    **dict.fromkeys(("xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"), CUT),
    **dict.fromkeys(("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"), REPEATS),
    **dict.fromkeys(("dry_sequence_breakers", "no_repeat_ngram_size", "repeat_last_n"), REPEATS),
    "samplers": "leave it out, their order is fixed",
    "min_keep": "leave it out",
    "cache_prompt": "prompts are always cached: use cache_salt to keep one apart",
    "id_slot": "leave it out: rows have no fixed places",
    "grammar": "use structured_outputs",
    "json_schema": "use response_format",
    "mcp_servers": "call their tools in the client",
    **dict.fromkeys(("container", "compaction", "thread", "fallbacks"), "it is of Anthropic's service"),
    "kv_transfer_params": "prompts are computed by the server itself",
    "ec_transfer_params": "models take and make text",
}
# those that clients send without a content
EMPTY = {"functions", "kv_transfer_params", "ec_transfer_params", "logits_processors", "media_io_kwargs",
         "mm_processor_kwargs", "vllm_xargs"}  # fmt: skip
OFF = {"enable_response_messages"}  # those that clients send as false
# fields of which one value is accepted, that which changes nothing -> what to do instead of another one
CURES = {
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), BEAMS),
    "watermarking": "texts have no watermark",
    "routed_experts_prompt_start": "leave it out",
}


class Body(BaseModel):
    """Values have the types that are written here: "1" is no number.

    A field that is null is left out, unless null has a meaning of its own.  So are empty ones of EMPTY.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not cls._means_nothing(name, value)}

    @classmethod
    def _means_nothing(cls, name: str, value: Any) -> bool:
        if value is None:
            return not cls._has_null(name)
        return (name in EMPTY and value in ({}, [])) or (name in OFF and value is False)

    @classmethod
    def _has_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and type(None) in get_args(field.annotation)


class Fault(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """Body of a refusal."""

    error: Fault


class StreamOptions(Body):
    include_usage: bool | None = None  # None: if continuous_usage_stats is given
    continuous_usage_stats: bool = False  # vLLM's
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    # "schema" is a method of BaseModel
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    # vLLM's, of a structural_tag
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[str] | None = None
    format: dict[str, Any] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted output: text that the answer repeats in large parts."""

    type: Literal["content"]
    content: str | Many[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Speculate(Body):
    """Speculation of one request.

    enabled: false decodes plainly.  max_tokens: depth of a draft at most.  method: the one of several
    drafting methods that is used.
    """

    enabled: bool = True
    max_tokens: Token | None = None
    method: Text | None = None


class Sampling(Body):
    """Fields that all generating routes share."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    # of the client, of OpenAI's service or of other schedulers: without effect here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    session_id: str | None = None
    stream_interval: Count | None = None
    guided_decoding_backend: str | None = None
    # accepted as the values that change nothing
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    early_stopping: Literal[False] | None = None
    truncation_side: Literal["left"] | None = None
    watermarking: Literal[False] | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0, le=0)] | None = None
    # of vLLM's routes that only render prompts: without effect here, as there
    return_token_offsets: bool | None = None
    return_mm_kwargs: bool | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: Many[Token] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Token | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # without effect: of tokenizers in Python
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    allowed_token_ids: Many[Token] | None = None
    bad_words: Many[Text] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_whitespace_pattern: Text | None = None
    use_beam_search: Literal[False] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    priority: int = 0
    request_id: Text | None = None
    cache_salt: Text | None = None
    # ours
    speculation: Speculate | None = None
    return_speculation: bool = False


class Classic(Sampling):
    """Fields that /v1/completions and /v1/chat/completions share."""

    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    seed: int | None = None
    stop: Text | Many[Text] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Any] | None = None  # SamplingParams stops at the first fault
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(None, ge=-1)  # -1: the vocabulary; a server has a limit
    prediction: Prediction | None = None
    return_token_ids: bool = False  # vLLM's, as is the next one
    return_tokens_as_token_ids: bool = False
    return_origins: bool = False  # ours


Ids = Annotated[Many[Token], Field(min_length=1)]


class Calling(Body):
    """Fields of conversations, which may have tools and reasoning."""

    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None  # SGLang's; False: it stays in the text


class CompletionBody(Classic):
    prompt: (
        str
        | Ids
        | Annotated[Many[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[Many[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Token | None = 16  # 0 with echo alone: the prompt is scored
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatBody(Classic, Calling):
    messages: Many[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None  # for the chat template
    include_reasoning: bool | None = None  # False: it is left out of the response
    # without effect here
    verbosity: str | None = None
    # vLLM's
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_prompt_text: bool = False
    # accepted as vLLM's defaults alone
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None


class ResponseText(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Sampling, Calling):
    input: str | Annotated[Many[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    reasoning: dict[str, Any] | None = None  # its effort is for the chat template
    max_tool_calls: Count | None = None  # of the service's own tools: without effect here
    stream_options: StreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    previous_response_id: str | None = None
    background: bool | None = None
    include: Many[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # vLLM's
    seed: int | None = None
    stop: Text | Many[Text] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Any] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Many[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Many[Token]


class LoadLoraBody(Body):
    lora_name: Text
    lora_path: Text


class UnloadLoraBody(Body):
    lora_name: Text
