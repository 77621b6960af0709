"""Options of the server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Annotated

from outrider.core.validate import (
    TEXT,
    Checked,
    Count,
    Flag,
    JsonObject,
    Kind,
    Text,
    json_text,
    one_of,
    real,
    text_of,
    whole,
)
from outrider.errors import ConfigError
from outrider.serve import reasoning
from outrider.serve.tools import PARSERS

TEXTS = Kind("a list of strings", lambda value: isinstance(value, tuple) and all(map(TEXT.accepts, value)))
KEY_VARIABLE = "OUTRIDER_API_KEY"
Texts = Annotated[tuple[str, ...], TEXTS]
Seconds = Annotated[float, real("a number of seconds above 0", lambda value: value > 0)]
INTERVAL = real("a number of seconds (not of tokens) in [0, 1)", lambda value: 0 <= value < 1)
ROOT = Kind(
    'empty or a path such as "/llm", without "/" at its end',
    lambda value: isinstance(value, str) and re.fullmatch(r"(/[\w~-][\w.~-]*)*", value, re.ASCII) is not None,
)


@dataclass(frozen=True)
class ServerOptions(Checked):
    """Options of the server, each with its unit and the meaning of its default.

    port                 0: any free port
    uds                  path of a Unix socket to listen on, instead of host and port
    served_model_name    names of the model in requests, the first one in responses; none: the model's path
    api_key              keys of which a request must carry one; none: no key is needed
    api_key_file         file with one key a line, beside `api_key`
    max_requests         samples that may be queued or running; more are refused with status 429
    max_logprobs         log-probabilities that a request may ask for, of each token; -1: of all tokens
    max_body_bytes       of a request
    body_timeout         seconds in which the headers of a request must arrive, and then its body
    request_timeout      seconds after which a request is ended with an error
    shutdown_timeout     seconds that open requests have left after SIGTERM
    stream_interval      seconds between parts of a stream, more with more than 8 samples; 0: a part a step
    enable_force_include_usage    every stream of chats and completions ends with its usage
    log_interval         seconds between two lines about throughput
    allowed_origins      origins of web pages that may call the server (CORS); none: no other page may
    lora_modules         NAME=PATH of LoRA adapters, which are models of those names
    allow_lora_loading   clients may load and unload adapters from paths on this machine
    warmup               on a GPU, answer made-up requests first, for seconds, so that real ones do not wait
    restart_engine       go on after a step that failed, instead of refusing all further requests
    log_requests         log the prompts and parameters of requests
    ssl_certfile, ssl_keyfile   files for TLS
    chat_template        Jinja template, or a file with one, instead of the model's own
    default_chat_template_kwargs  variables of the template that requests do not set, as
                         {"enable_thinking": false}
    trust_request_chat_template   requests may have templates, which can take any time and memory
    tool_call_parser     format of tool calls in the text; auto: by the chat template
    reasoning_parser     format of what the model thinks before its answer, which replies have apart then;
                         auto: by the chat template; none: it stays in the text
    otlp_traces_endpoint  URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces
    root_path            path under which a proxy serves this server
    replicas             processes that serve the model; above 1, a router in front of them answers
    replica_timeout      seconds without an answer after which a replica counts as frozen and is restarted
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, whole(0, 65535)] = 8000
    uds: Text | None = None
    served_model_name: Texts = ()
    api_key: Texts = ()
    api_key_file: Text | None = None
    max_requests: Count = 256
    max_logprobs: Annotated[int, whole(-1)] = 20
    max_body_bytes: Count = 8 << 20
    body_timeout: Seconds = 30.0
    request_timeout: Seconds = 600.0
    shutdown_timeout: Seconds = 30.0
    stream_interval: Annotated[float, INTERVAL] = 0.05
    enable_force_include_usage: Flag = False
    log_interval: Seconds = 10.0
    allowed_origins: Texts = ()
    lora_modules: Texts = ()
    allow_lora_loading: Flag = False
    warmup: Flag = True
    restart_engine: Flag = False
    log_requests: Flag = False
    ssl_certfile: Text | None = None
    ssl_keyfile: Text | None = None
    chat_template: Text | None = None
    default_chat_template_kwargs: JsonObject = None
    trust_request_chat_template: Flag = False
    tool_call_parser: Annotated[str, one_of("auto", *PARSERS)] = "auto"
    reasoning_parser: Annotated[str, one_of("none", "auto", *reasoning.PARSERS)] = "none"
    otlp_traces_endpoint: Text | None = None
    root_path: Annotated[str, ROOT] = ""
    replicas: Count = 1
    replica_timeout: Seconds = 10.0

    def __post_init__(self) -> None:
        name = "default_chat_template_kwargs"
        object.__setattr__(self, name, json_text(self.default_chat_template_kwargs, name))
        super().__post_init__()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both ssl_certfile and ssl_keyfile.")
        if self.ssl_certfile is not None:
            try:
                SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(
                    self.ssl_certfile, self.ssl_keyfile, password=_locked
                )
            except _Locked:
                pass  # the server asks for the passphrase, once, when it begins to listen
            except OSError as error:
                files = f"ssl_certfile {self.ssl_certfile!r} and ssl_keyfile {self.ssl_keyfile!r}"
                raise ConfigError(f"{files} cannot be used: {error.strerror or error}.") from error
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not (name and path):
                raise ConfigError(f"lora_modules must be NAME=PATH, got {module!r}.")

    def keys(self) -> tuple[bytes, ...]:
        """All keys.  Raises ConfigError if the file cannot be read or has none."""
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("api_key has a blank key.")
        if not os.environ.get(KEY_VARIABLE, "set").strip():
            raise ConfigError(f"{KEY_VARIABLE} is blank: unset it, or put a key into it.")
        found = list(self.api_key)
        if self.api_key_file is not None:
            lines = [line.strip() for line in text_of(self.api_key_file, "api_key_file").splitlines()]
            if not any(lines):
                raise ConfigError(f"api_key_file {self.api_key_file!r} has no key: write one a line.")
            found += [line for line in lines if line]
        return tuple(key.encode() for key in found)


class _Locked(Exception):
    """The key of a certificate is encrypted."""


def _locked() -> str:
    raise _Locked
