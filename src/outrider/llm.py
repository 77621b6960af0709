"""The offline API: `LLM(model, speculative_config=…).generate(prompts, sampling_params)`, in vLLM's names."""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.checkpoints.hub import read_tokenizer
from outrider.config import EngineOptions, SpeculativeOptions, options
from outrider.core.params import SamplingParams, whole
from outrider.core.row import LoRARequest
from outrider.engine.chat_template import Messages, conversations
from outrider.engine.engine import Engine
from outrider.engine.loop import EngineLoop, Ticket
from outrider.errors import EngineError, RequestError
from outrider.outputs import RequestOutput
from outrider.requests import Prompt, Reader, Request

Loras = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model, ready to answer.

    model: a folder, a .gguf file, a hub id, or "builtin".  speculative_config: {"method": …, "model": …,
    "num_speculative_tokens": …} as in vLLM; None decodes plainly.  Every other keyword is a field of `EngineOptions`.
    Raises ConfigError, ModelError or CapacityError, each naming the value and the cure.
    """

    def __init__(
        self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **engine: Any
    ) -> None:
        given = options(EngineOptions, {"model": model, **engine}, "engine option")
        self.engine = Engine(given, SpeculativeOptions.of(speculative_config))
        self.seed = secrets.randbits(63) if given.seed is None else given.seed
        checkpoint = self.engine.checkpoint
        if given.tokenizer is not None:
            self.tokenizer: Any = read_tokenizer(given.tokenizer, given.trust_remote_code)
        else:
            self.tokenizer = checkpoint.tokenizer
        self._reader = Reader(self.engine, self.tokenizer, self.seed)
        self._ids = itertools.count()
        self._loop = EngineLoop(self.engine)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, batched as the engine sees fit; outputs stand in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict (see `requests.Prompt`).

        A single bad prompt raises (a RequestError, as a rule); among several the bad one comes back with `.error`, and the
        others are answered.
        Calls from several threads join one batch; each returns when its own prompts are answered.
        use_tqdm shows a progress bar.  lora_request: an adapter for all prompts, or one (or None) for each.
        """
        requests = self._enter(prompts, sampling_params, lora_request)
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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them, through the tokenizer's chat template (or `chat_template`).

        messages: [{"role": "user", "content": "…"}, …].  continue_final_message lets the answer go on with the last message
        (with add_generation_prompt=False).  Bad messages are treated as bad prompts are by `generate`.
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

    def _run(self, tickets: Iterable[Ticket], tick: Callable[[], None] = lambda: None) -> None:
        for ticket in tickets:

            def done(ticket: Ticket = ticket) -> bool:
                tick()
                return ticket.finished

            self._loop.run_until(done)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Loras = None,
    ) -> Iterator[RequestOutput]:
        """Yields a request's output so far whenever it grew; the last one of each has `finished`.

        Closing the iterator aborts what still runs.  Bad prompts are yielded first, with `.error`.
        """
        requests = self._enter(prompts, sampling_params, lora_request, streaming=True)
        live = {request.id: request for request in requests if isinstance(request, Request)}
        news: dict[str, RequestOutput] = {}  # the newest output of each request, until it is yielded
        try:
            self._admit(live.values(), lambda request: news.update({request.id: request.output()}))
            yield from (request for request in requests if isinstance(request, RequestOutput))
            while live:
                self._loop.run_until(lambda: bool(news))
                for id in [id for id in live if id in news]:
                    output = news.pop(id)
                    if output.finished:
                        del live[id]
                    if isinstance(output.error, EngineError):
                        raise output.error
                    yield output
        finally:
            for id in live:
                self.abort(id)

    def abort(self, request_id: str) -> None:
        """Ends a request; its output so far is returned with finish_reason "abort".  Unknown ids are ignored."""
        self._loop.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a request is queued or running, in whichever thread."""
        return bool(self._loop.tickets) or self.engine.busy

    def _admit(
        self, requests: Iterable[Request], listener: Callable[[Request], None] | None = None
    ) -> list[Ticket]:
        """Queue requests; `listener` is called with a request whenever it grew or ended."""
        return [
            self._loop.submit(request.rows, None if listener is None else partial(listener, request))
            for request in requests
        ]

    def _enter(
        self,
        prompts: Prompt | Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Loras,
        streaming: bool = False,
    ) -> list[Request | RequestOutput]:
        one = (
            isinstance(prompts, (str, bytes, Mapping))
            or not isinstance(prompts, Iterable)
            or _is_ids(prompts)
        )
        several: list[Any] = [prompts] if one else list(prompts)
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * len(several)
        elif isinstance(given, Sequence):
            params = list(given)
        else:
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {given!r}.")
        if len(params) != len(several):
            raise RequestError(
                f"got {len(several)} prompts and {len(params)} SamplingParams: give one for all, or one for each."
            )
        loras = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * len(several)
        if len(loras) != len(several):
            raise RequestError(
                f"got {len(several)} prompts and {len(loras)} LoRARequests: give one for all, or one for each."
            )
        return [self._request(prompt, p, streaming, lora) for prompt, p, lora in zip(several, params, loras)]

    def _request(
        self, prompt: Prompt, params: SamplingParams, streaming: bool, lora: LoRARequest | None = None
    ) -> Request | RequestOutput:
        return self._reader.request(str(next(self._ids)), prompt, params, streaming, lora)

    def _leave(self, request: Request) -> RequestOutput:
        """The final output; whatever still runs is aborted."""
        self.abort(request.id)
        return request.output()

    def variant(self, speculative_config: Mapping[str, Any] | None) -> LLM:
        """Another LLM on the same weights, with a drafter, a cache and a queue of its own: to compare methods side by side.

        Requests without a seed draw the same ones in the same order.  Each variant takes its own kv_cache_memory_bytes.
        """
        speculation = SpeculativeOptions.of(speculative_config)
        twin = copy.copy(self)
        with self.engine.turn.taken():
            twin.engine, twin._ids = copy.copy(self.engine), itertools.count()
            twin.engine.use(twin.engine.new_drafter(speculation), speculation)
        twin._loop = EngineLoop(twin.engine)
        twin._reader = replace(self._reader, engine=twin.engine)
        return twin

    def use(self, speculative_config: Mapping[str, Any] | None) -> None:
        """Changes the drafter of a loaded model; the weights of the target stay.

        Raises ConfigError while requests are running, in whichever thread.
        """
        with self._loop.idle():
            speculation = SpeculativeOptions.of(speculative_config)
            self.engine.use(self.engine.new_drafter(speculation), speculation)


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids, not several prompts; as in vLLM."""
    return (
        isinstance(prompts, (list, tuple))
        and len(prompts) > 0
        and all(whole(token) is not None for token in prompts)
    )


@contextmanager
def _progress(tickets: Sequence[Ticket]) -> Iterator[Callable[[], None]]:
    """A progress bar over requests, and what brings it up to date."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("Answering", total=len(tickets))
        yield lambda: bar.update(task, completed=sum(ticket.finished for ticket in tickets))
