"""The offline API: `LLM(model, speculative_config=…).generate(prompts, sampling_params)`, in vLLM's names."""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.config import EngineOptions, SpeculativeOptions, options
from outrider.engine.engine import Engine
from outrider.engine.template import Messages, conversations
from outrider.errors import ConfigError, RequestError
from outrider.models.hub import read_tokenizer
from outrider.outputs import RequestOutput
from outrider.requests import Prompt, Reader, Request
from outrider.sampling.params import SamplingParams
from outrider.types import LoRARequest

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
        self._requests: dict[str, Request] = {}

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

        A single bad prompt raises (a RequestError, as a rule); among several the bad one comes back with `.error`, and the
        others are answered.
        use_tqdm shows a progress bar.  lora_request: an adapter for all prompts, or one (or None) for each.
        """
        requests = self._enter(prompts, sampling_params, lora_request)
        live = [request for request in requests if isinstance(request, Request)]
        try:
            self._admit(live)
            if use_tqdm:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                )
                with Progress(*columns, transient=True) as bar:
                    task = bar.add_task("Answering", total=len(live))
                    self._run(
                        live, lambda: bar.update(task, completed=sum(request.finished for request in live))
                    )
            else:
                self._run(live, lambda: None)
        finally:
            done = [self._leave(request) if isinstance(request, Request) else request for request in requests]
        if len(done) == 1 and done[0].error is not None:
            raise done[0].error
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

    def _run(self, live: list[Request], tick: Callable[[], None]) -> None:
        for request in live:
            while not request.finished:
                self.engine.step()
                tick()

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
        try:
            self._admit(live.values())
            yield from (request for request in requests if isinstance(request, RequestOutput))
            while live:
                grown = {row.id for row in self.engine.step()}
                for request in list(live.values()):
                    if request.finished:
                        yield self._leave(live.pop(request.id))
                    elif request.id in grown:
                        yield request.output()
        finally:
            for request in live.values():
                self._leave(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; its output so far is returned with finish_reason "abort".  Unknown ids are ignored."""
        request = self._requests.get(request_id)
        for row in request.rows if request else ():
            self.engine.scheduler.abort(row)

    def _admit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._requests[request.id] = request
            for row in request.rows:
                self.engine.add(row)

    def _enter(
        self,
        prompts: Prompt | Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Loras,
        streaming: bool = False,
    ) -> list[Request | RequestOutput]:
        one = isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable)
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
        self._requests.pop(request.id, None)
        return request.output()

    def variant(self, speculative_config: Mapping[str, Any] | None) -> LLM:
        """Another LLM on the same weights, with a drafter, a cache and a queue of its own: to compare methods side by side.

        Requests without a seed draw the same ones in the same order.  Each variant takes its own kv_cache_memory_bytes.
        """
        twin = copy.copy(self)
        twin.engine, twin._requests, twin._ids = copy.copy(self.engine), {}, itertools.count()
        twin._reader = replace(self._reader, engine=twin.engine)
        speculation = SpeculativeOptions.of(speculative_config)
        twin.engine.use(speculation.method(speculation.options, self.engine.target), speculation)
        return twin

    def use(self, speculative_config: Mapping[str, Any] | None) -> None:
        """Changes the drafter of a loaded model; the weights of the target stay.  Nothing may be in flight."""
        if self.engine.busy:
            raise ConfigError("the drafter cannot be changed while requests are running.")
        speculation = SpeculativeOptions.of(speculative_config)
        self.engine.use(speculation.method(speculation.options, self.engine.target), speculation)
