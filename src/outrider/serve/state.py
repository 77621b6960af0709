"""State of a running server: the engine, the models that it serves, and the room for requests."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

from outrider.async_llm import AsyncLLM
from outrider.core.params import SamplingParams
from outrider.core.reasoning import ReasoningMarkers
from outrider.core.row import LoRARequest
from outrider.core.validate import text_of
from outrider.errors import RequestError, about, shortened
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from outrider.progress import Request
from outrider.requests import Prompt, Reader
from outrider.serve.errors import ApiError, not_ready
from outrider.serve.metrics import Metrics
from outrider.serve.options import ServerOptions
from outrider.serve.reasoning import markers_for
from outrider.serve.tool_calls import ToolParser
from outrider.serve.tools import parser_for
from outrider.serve.traces import Traces

Result = TypeVar("Result")
Outputs = AsyncGenerator[tuple[int, RequestOutput]]
MEMORY = 0.9  # weight of the past in the mean duration of requests
log = logging.getLogger("outrider.serve")


@dataclass
class Server:
    """State shared by all routes.

    status: "loading", "ready" or "stopping".  open: samples that are read, queued or running.
    seconds: mean duration of the last requests.
    """

    options: ServerOptions
    model: str
    status: str = "loading"
    open: int = 0
    seconds: float = 1.0
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    template: str | None = None
    traces: Traces | None = None
    engine_: AsyncLLM | None = None
    _apart: Reader | None = None
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    _adapter_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        given = self.options.chat_template
        if given is not None:  # as vLLM, which takes a text with a brace for the template itself
            self.template = given if "{" in given or "\n" in given else text_of(given, "chat_template")
        if self.options.otlp_traces_endpoint is not None:
            self.traces = Traces(self.options.otlp_traces_endpoint, self.names[0])

    @property
    def names(self) -> tuple[str, ...]:
        return self.options.served_model_name or (self.model,)

    def check_ready(self) -> None:
        """Raise ApiError while the server is loading or stopping, and after a failure."""
        if self.engine_ is None or self.status != "ready":
            raise not_ready(self.status)
        if not self.engine_.is_running:
            raise ApiError(503, str(self.engine_.error or "the engine has stopped."), code="engine_stopped")

    @property
    def engine(self) -> AsyncLLM:
        """The engine, also for admitted requests of a server that stops.  Raises ApiError while loading."""
        if self.engine_ is None:
            raise not_ready(self.status)
        return self.engine_

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def reader(self) -> Reader:
        return self.llm.reader

    @property
    def tokenizer(self) -> Any:
        if (tokenizer := self.llm.tokenizer) is None:
            raise ApiError(400, "the model has no tokenizer: start the server with --tokenizer.")
        return tokenizer

    @property
    def known_template(self) -> str:
        """The chat template; empty if there is none, or several."""
        template = self.template or getattr(self.llm.tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""

    @property
    def tool_parser(self) -> ToolParser:
        return parser_for(self.options.tool_call_parser, self.known_template)

    @property
    def reasoning(self) -> ReasoningMarkers | None:
        """Markers of the reasoning that replies have apart; None if it stays in their text."""
        return markers_for(self.options.reasoning_parser, self.known_template)

    @cached_property
    def has_special_markers(self) -> bool:
        """Whether a marker of reasoning is, or has, a special token."""
        if (markers := self.reasoning) is None:
            return False
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return any(token in marker for token in filter(None, special) for marker in markers.texts)

    def started(self, engine: AsyncLLM) -> None:
        """Accept requests from now on.  Raises RequestError for an adapter that cannot be used."""
        self.engine_ = engine
        # copied before the first request: none waits for the lock meanwhile
        self._apart = replace(self.reader, tokenizer=copy.deepcopy(self.llm.tokenizer), lock=Lock())
        for module in self.options.lora_modules:
            self.add_adapter(*module.split("=", 1))
        self.metrics.watch(engine)
        self.status = "ready"

    async def end(self) -> None:
        """End the engine, and with it every request."""
        if self.engine_ is not None:
            await asyncio.to_thread(self.engine_.shutdown)

    def add_adapter(self, name: str, path: str) -> None:
        """Serve a LoRA adapter as a model of this name.  Raises RequestError or ApiError."""
        if (adapters := self.llm.engine.adapters) is None:
            raise RequestError("LoRA adapters need --enable-lora.")
        with self.reader.lock:
            if name in self.adapters or name in self.names:
                raise ApiError(400, f"the model {name!r} exists already.", "lora_name")
            adapter = LoRARequest(name, next(self._adapter_ids), path)
            with about("lora_path"):
                adapters.check(adapter)
            self.adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Serve an adapter no longer, and free its weights.  Raises ApiError."""
        if (adapter := self.adapters.pop(name, None)) is None:
            raise ApiError(404, f"there is no adapter {name!r}.", "lora_name")
        assert self.llm.engine.adapters is not None
        self.llm.engine.adapters.drop(adapter)

    def adapter_of(self, model: str | None) -> LoRARequest | None:
        """The adapter that a request's `model` names; None for the model itself."""
        if not model or model in self.names:  # vLLM takes an empty name for none
            return None
        if model not in self.adapters:
            served = ", ".join([*self.names, *self.adapters])
            raise ApiError(
                404, f"there is no model {shortened(model)}, but {served}.", "model", "model_not_found"
            )
        return self.adapters[model]

    def name_of(self, model: str | None) -> str:
        """Name in the response to a request's `model`: an adapter's own, else the first one."""
        return self.names[0] if not model or model in self.names else model

    def check_room(self, samples: int = 1) -> None:
        """Raise ApiError with status 429 if so many samples more exceed max_requests."""
        most = self.options.max_requests
        if samples > most:
            raise ApiError(400, f"a request may have {most} samples at most, got {samples}.", "n")
        if self.open + samples > most:
            self.metrics.refused.inc()
            wait = max(1, min(60, math.ceil(self.seconds / 2)))
            raise ApiError(429, f"all {most} places are taken: try again later.", retry_after=wait)

    @contextmanager
    def _taken(self, samples: int) -> Iterator[None]:
        self.check_room(samples)
        began = asyncio.get_running_loop().time()
        self.open += samples
        try:
            yield
        finally:
            self.open -= samples
            lasted = asyncio.get_running_loop().time() - began
            self.seconds = MEMORY * self.seconds + (1 - MEMORY) * lasted

    def room(self, requests: Sequence[Request]) -> ExitStack:
        """Take places for the samples of requests, until the end of its block or `close`.

        Raises ApiError with status 429.
        """
        taken = ExitStack()
        taken.enter_context(self._taken(sum(len(request.rows) for request in requests)))
        return taken

    async def read(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        id: str,
        adapter: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Tokenize the prompts of a request and check its parameters.  Raises RequestError and ApiError."""
        if cache_salt is not None:
            prompts = [{**_dict_of(prompt), "cache_salt": cache_salt} for prompt in prompts]
        engine, several, samples = self.engine, len(prompts) > 1, len(prompts) * params.n
        self.check_room(samples)
        self.open += samples  # reading may take a while: of long prompts, or behind those of others
        try:
            requests = list[Request]()
            for i, prompt in enumerate(prompts):
                name = f"{id}-{i}" if several else id
                requests.append(await engine.read(prompt, params, name, adapter, priority))
                if several:
                    await asyncio.sleep(0)  # for other requests: each may have been read in the event loop
        finally:
            self.open -= samples
        tokens = sum(len(request.ids) for request in requests)
        log.info("%r: %d prompt tokens, %d samples", id, tokens, sum(len(each.rows) for each in requests))
        if self.options.log_requests:
            log.info("%r: %s %s", id, [request.prompt or request.ids for request in requests], params)
        return requests

    async def outputs(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run requests to their ends.  Raises EngineError, and TimeoutError after request_timeout."""
        with self.room(requests) as room:
            async with self._followed(requests, room) as outputs:
                found = {i: output async for i, output in outputs}
        return [found[i] for i in range(len(requests))]

    def stream(
        self, requests: Sequence[Request], room: ExitStack, every_step: bool = False
    ) -> AbstractAsyncContextManager[Outputs]:
        """(index of the request, its output so far) of several requests as they come, within a block.

        All outputs of a request are one object.  room: places of the requests, left when all have been
        generated, also if the reader is slow.  every_step: without stream_interval, and with `token_ends`.
        Errors are those of `outputs`.
        """
        for request in requests:
            request.ends = every_step
        return self._followed(requests, room, interval=0.0 if every_step else self.options.stream_interval)

    @asynccontextmanager
    async def _followed(
        self, requests: Sequence[Request], room: ExitStack, interval: float | None = None
    ) -> AsyncIterator[Outputs]:
        """interval: least seconds between two outputs of a request; None: only the last ones."""
        running = set(range(len(requests)))

        def end(i: int, output: RequestOutput) -> None:
            if i in running:
                running.discard(i)
                self._finish(output)
            if not running:
                room.close()

        timeout = self.options.request_timeout
        try:
            final, least = interval is None, interval or 0.0
            async with aclosing(self.engine.follow(requests, final, end, timeout, least)) as outputs:
                yield outputs
        except BaseException as error:
            while running:
                running.pop()
                self.metrics.failed(error)
            raise

    def _finish(self, output: RequestOutput) -> None:
        if output.error is not None:
            self.metrics.failed(output.error)
            return
        self.metrics.finished(output)
        if self.traces is not None:
            self.traces.finished(output)

    async def apart(self, work: Callable[[Reader], Result]) -> Result:
        """The result of `work`, run in another thread with a reader that has a tokenizer of its own.

        For texts of any length: no request waits for that tokenizer.  The calls take turns, so that they take
        one thread.  Raises ApiError without a tokenizer.
        """
        assert self.tokenizer is not None, "it has raised"
        assert self._apart is not None, "copied as the server started"
        async with self._turns:
            return await asyncio.to_thread(work, self._apart)

    def encode(self, text: str, special: bool, endless: bool) -> list[int]:
        """Token ids of a prompt.  endless: it may exceed the context.

        Raises ApiError without a tokenizer, and RequestError.
        """
        assert self.tokenizer is not None, "it has raised"
        with self.reader.lock:
            if not endless:
                self.reader.refuse_endless(text)
            return self.reader.encode(text, "prompt", special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids.  Raises ApiError without a tokenizer."""
        with self.reader.lock:
            text: str = self.tokenizer.decode(ids)
        return text

    def conversation(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A prompt of messages, in the template of the server."""
        known = [*map(_known, messages)]
        given = {"chat_template": self.template, **{k: v for k, v in more.items() if v is not None}}
        if (defaults := self.options.default_chat_template_kwargs) is not None:
            given["chat_template_kwargs"] = {**defaults, **(more.get("chat_template_kwargs") or {})}
        return {"messages": known, **given}


def _known(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates know it: its role is not "developer", its reasoning `reasoning_content`."""
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    thought = message.get("reasoning")
    return {"reasoning_content": thought, **message} if isinstance(thought, str) else message


def _dict_of(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
