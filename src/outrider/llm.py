"""Offline API with vLLM's names: `LLM(model, speculative_config=…).generate(prompts, sampling_params)`."""

from __future__ import annotations

import copy
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.checkpoints.generation import FILE, SAMPLING, generation_config, sampling_of
from outrider.checkpoints.hub import Checkpoint, read_tokenizer
from outrider.config import EngineOptions, SpeculativeOptions, options
from outrider.core.collector import rare_collections
from outrider.core.params import SamplingParams, to_int
from outrider.core.row import LoRARequest
from outrider.core.validate import path_text
from outrider.engine.chat_template import Messages, conversations
from outrider.engine.engine import Engine
from outrider.engine.loop import EngineLoop, Ticket
from outrider.errors import ConfigError, EngineError, RequestError, refuse_unknown
from outrider.outputs import RequestOutput
from outrider.progress import Request, RowState
from outrider.requests import Prompt, Reader
from outrider.warm_up import warm_up

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one for each
Loras = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Loaded model with an engine for offline generation.

    model: a folder, a .gguf file, a hub id, or "builtin".
    speculative_config: {"method": …, "model": …, "num_speculative_tokens": …} as in vLLM, or the name of a
    method.  The default drafts what pays, by measurement; None or "off" disables speculation.
    engine: fields of `EngineOptions`.
    Raises ConfigError, ModelError or CapacityError, each naming the value and a remedy.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: Mapping[str, Any] | str | None = "auto",
        **engine: Any,
    ) -> None:
        given = options(EngineOptions, {"model": path_text(model), **engine}, "engine option")
        self.engine = Engine(given, SpeculativeOptions.of(speculative_config))
        self.seed = secrets.randbits(63) if given.seed is None else given.seed
        checkpoint = self.engine.checkpoint
        if given.tokenizer is not None:
            self.tokenizer: Any = read_tokenizer(given.tokenizer, given.trust_remote_code)
        else:
            self.tokenizer = checkpoint.tokenizer
        self.reader = Reader(self.engine, self.tokenizer, self.seed)
        self.sampling = sampling_defaults(checkpoint, given)
        self._ids = itertools.count()
        self.loop = EngineLoop(self.engine)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer."""
        return getattr(self.tokenizer, "full", self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of requests without any, from the model's generation_config.json."""
        return SamplingParams(**self.sampling)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Params = None,
        use_tqdm: bool = False,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
        *,
        prompt_token_ids: None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for all prompts in one continuous batch.

        Returns them in the order of the prompts.

        prompts: a text, a list of token ids or a dict (see `requests.Prompt`), or a list of these.
        sampling_params: one for all prompts, or one for each; None: `get_default_sampling_params()`.
        use_tqdm: show a progress bar.
        lora_request: an adapter for all prompts, or one (or None) for each.
        priority: a number for each prompt; those with a smaller one start first.
        prompt_token_ids: of earlier versions of vLLM, refused: lists of token ids are prompts.

        A single invalid prompt raises, usually RequestError.  Among several, its output has `.error` set.
        Thread-safe: calls from several threads share one batch.  Each returns when its own prompts are
        finished.
        """
        if prompt_token_ids is not None:
            raise RequestError(
                "prompt_token_ids is no argument of generate: a list of token ids is a prompt, and so is "
                '{"prompt_token_ids": [1, 2, 3]}: call generate([[1, 2, 3], …], sampling_params).',
                "prompt_token_ids",
            )
        requests = self._enter(prompts, sampling_params, lora_request, priority)
        live = [request for request in requests if isinstance(request, Request)]
        try:
            tickets = self._admit(live)
            if use_tqdm:
                with _progress(tickets) as tick:
                    self._run(tickets, tick)
            else:
                self._run(tickets)
        finally:
            for request in live:
                self.abort(request.id)
        done = [request.output() if isinstance(request, Request) else request for request in requests]
        for output in done:
            if isinstance(output.error, EngineError) or (output.error is not None and len(done) == 1):
                raise output.error
        return done

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Generate replies to a conversation or a list of conversations, rendered by a chat template.

        messages: [{"role": "user", "content": "…"}, …], or a list of these.
        chat_template: replaces the template of the tokenizer.
        continue_final_message: continue the last message; requires add_generation_prompt=False.
        Errors are handled as in `generate`.
        """
        several = conversations(messages)
        given = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [{"messages": conversation, **given} for conversation in several]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def _run(self, tickets: Iterable[Ticket], tick: Callable[[], None] | None = None) -> None:
        def done(ticket: Ticket) -> bool:
            if tick is not None:
                tick()
            return ticket.finished

        with rare_collections:
            for ticket in tickets:
                self.loop.run_until(partial(done, ticket))

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, lora_request: Loras = None
    ) -> Iterator[RequestOutput]:
        """Yield the partial output of a request after each step that extended it.

        The last output of each request has `finished` set.  Invalid prompts are yielded first, with `.error`
        set.  Closing the iterator aborts the unfinished requests.
        """
        requests = self._enter(prompts, sampling_params, lora_request)
        live = {request.id: request for request in requests if isinstance(request, Request)}
        news: dict[str, list[RowState]] = {}  # the newest of each request, until its output is yielded
        try:
            self._admit(live.values(), lambda request: news.update({request.id: request.states()}))
            yield from (request for request in requests if isinstance(request, RequestOutput))
            while live:
                self.loop.run_until(lambda: bool(news))
                for id in [id for id in live if id in news]:
                    output = live[id].extended(news.pop(id)).copy()
                    if output.finished:
                        del live[id]
                    if isinstance(output.error, EngineError):
                        raise output.error
                    yield output
        finally:
            for id in live:
                self.abort(id)

    def enqueue(self, prompts: Prompts, sampling_params: Params = None) -> list[Ticket]:
        """Queue prompts for `loop.run_until`, for callers that count steps.

        Raises the error of the first invalid prompt.
        """
        requests = self._enter(prompts, sampling_params, None)
        for request in requests:
            if isinstance(request, RequestOutput) and request.error is not None:
                raise request.error
        return self._admit([request for request in requests if isinstance(request, Request)])

    def warm_up(self) -> None:
        """Answer made-up requests, so that the first real ones wait for no kernel or graph of a GPU.

        Takes seconds; call it before any request.  What controllers and drafters know does not change.
        """
        ids, self._ids = self._ids, itertools.count()  # requests without a seed get theirs from their ids
        try:
            warm_up(self.engine, self.generate)
        finally:
            self._ids = ids

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort", keeping its output so far.  Unknown ids are ignored."""
        self.loop.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether any thread has a request queued or running."""
        return bool(self.loop.tickets) or self.engine.busy

    def _admit(
        self, requests: Iterable[Request], listener: Callable[[Request], None] | None = None
    ) -> list[Ticket]:
        """Queue requests.  `listener` is called with a request after each step that extended or ended it."""
        return [
            self.loop.submit(request.rows, None if listener is None else partial(listener, request))
            for request in requests
        ]

    def _enter(
        self,
        prompts: Prompts | None,
        given: Params,
        lora_request: Loras,
        priority: Sequence[int] | None = None,
    ) -> list[Request | RequestOutput]:
        one = (
            isinstance(prompts, (str, bytes, Mapping))
            or not isinstance(prompts, Iterable)
            or hasattr(prompts, "tolist")  # an array is no prompt, nor are its numbers
            or _is_ids(prompts)
        )
        several: list[Any] = [prompts] if one or prompts is None else list(prompts)
        if not isinstance(given, (SamplingParams, Sequence, NoneType)):
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {given!r}.")
        params = _one_each(
            self.get_default_sampling_params() if given is None else given, len(several), "SamplingParams"
        )
        loras = _one_each(lora_request, len(several), "LoRARequests")
        ranks = _one_each(0 if priority is None else priority, len(several), "priorities")
        read = self.reader.request
        return [read(str(next(self._ids)), *each) for each in zip(several, params, loras, ranks)]

    def variant(self, speculative_config: Mapping[str, Any] | str | None) -> LLM:
        """Create an LLM on the same weights with its own drafter, KV cache and queue, to compare methods.

        Requests without a seed get the same seeds in the same order.  Each variant allocates
        kv_cache_memory_bytes.
        """
        speculation = SpeculativeOptions.of(speculative_config)
        twin = copy.copy(self)
        with self.engine.turn.taken():
            twin.engine, twin._ids = copy.copy(self.engine), itertools.count()
            twin.engine.use(twin.engine.new_drafter(speculation), speculation)
        twin.loop = EngineLoop(twin.engine)
        twin.reader = replace(self.reader, engine=twin.engine)
        return twin

    def use(self, speculative_config: Mapping[str, Any] | str | None) -> None:
        """Replace the drafter of a loaded model and keep the weights of the target.

        Raises ConfigError while any thread has a request running.
        """
        with self.loop.idle():
            speculation = SpeculativeOptions.of(speculative_config)
            self.engine.use(self.engine.new_drafter(speculation), speculation)


def sampling_defaults(checkpoint: Checkpoint, given: EngineOptions) -> dict[str, Any]:
    """Sampling parameters for requests that do not give them.

    Raises ConfigError for unknown ones, ModelError for a file that cannot be used.
    """
    match given.generation_config:
        case "auto":
            config = checkpoint.generation
        case "none" | "vllm":
            config = {}
        case folder:
            config = generation_config(found := Path(os.path.expanduser(folder)))
            if not (found / FILE).is_file():
                raise ConfigError(
                    f"generation_config {folder!r} has no generation_config.json: give a folder with one, "
                    "auto or none."
                )
    override = given.override_generation_config or {}
    refuse_unknown(override, SAMPLING, "key", "override_generation_config")
    params = sampling_of({**config, **override})
    try:
        SamplingParams(**params)
    except RequestError as error:
        raise ConfigError(f"generation_config: {error}") from error
    return params


def _one_each(given: T | Sequence[T], count: int, what: str) -> list[T]:
    """One value for each of `count` prompts, from a list of them or one for all."""
    each: list[T] = list(given) if isinstance(given, Sequence) else [given] * count
    if len(each) != count:
        raise RequestError(f"got {count} prompts and {len(each)} {what}: give one for all, or one for each.")
    return each


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids, not several prompts (as in vLLM)."""
    return (
        isinstance(prompts, (list, tuple))
        and len(prompts) > 0
        and all(to_int(token) is not None for token in prompts)
    )


@contextmanager
def _progress(tickets: Sequence[Ticket]) -> Iterator[Callable[[], None]]:
    """Show a progress bar over requests on a terminal or in a notebook.  Yields what updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("Answering", total=len(tickets))
        yield lambda: bar.update(task, completed=sum(ticket.finished for ticket in tickets))
