"""The offline API: `LLM(model, speculative_config=…).generate(prompts, sampling_params)`, in vLLM's names."""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.config import EngineOptions, SpeculativeOptions, options
from outrider.engine.engine import Engine
from outrider.engine.text import Detokenizer, shown
from outrider.errors import ConfigError, RequestError
from outrider.models.hub import read_tokenizer
from outrider.sampling.noise import mix
from outrider.sampling.params import SamplingParams
from outrider.sampling.processors import min_tokens
from outrider.types import Row, Speculation

Prompt = str | Mapping[str, Any]  # "text", {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}


@dataclass
class CompletionOutput:
    """One sample.  finish_reason: "stop", "length", "abort", or None while it runs.  stop_reason: the stop string or id."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: Speculation = field(default_factory=Speculation)


@dataclass
class RequestOutput:
    """What became of one prompt.  `error` is set where the request could not be served, or not to its end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    error: Exception | None = None

    @property
    def speculation(self) -> Speculation:
        """Of all samples together."""
        return sum((output.speculation for output in self.outputs), Speculation())


@dataclass
class _Request:
    id: str
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    rows: list[Row]

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)


class LLM:
    """A model, ready to answer.

    model: a folder, a .gguf file, a hub id, or "builtin".  speculative_config: {"method": …, "model": …,
    "num_speculative_tokens": …} as in vLLM; None decodes plainly.  Every other keyword is a field of `EngineOptions`.
    Raises ConfigError, ModelError or CapacityError, each naming the value and the cure.
    """

    def __init__(self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **engine: Any) -> None:
        given = options(EngineOptions, {"model": model, **engine}, "engine option")
        self.engine = Engine(given, SpeculativeOptions.of(speculative_config))
        self.seed = secrets.randbits(63) if given.seed is None else given.seed
        checkpoint = self.engine.checkpoint
        if given.tokenizer is not None:
            self.tokenizer: Any = read_tokenizer(given.tokenizer)
        else:
            self.tokenizer = checkpoint.tokenizer
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers all prompts, batched as the engine sees fit; outputs stand in the order of the prompts.

        A single bad prompt raises (a RequestError, as a rule); among several the bad one comes back with `.error`, and the
        others are answered.
        use_tqdm shows a progress bar.
        """
        requests = self._enter(prompts, sampling_params)
        live = [request for request in requests if isinstance(request, _Request)]
        try:
            self._admit(live)
            if use_tqdm:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                with Progress(*columns, transient=True) as bar:
                    task = bar.add_task("Answering", total=len(live))
                    self._run(live, lambda: bar.update(task, completed=sum(request.finished for request in live)))
            else:
                self._run(live, lambda: None)
        finally:
            done = [self._leave(request) if isinstance(request, _Request) else request for request in requests]
        if len(done) == 1 and done[0].error is not None:
            raise done[0].error
        return done

    def _run(self, live: list[_Request], tick: Callable[[], None]) -> None:
        for request in live:
            while not request.finished:
                self.engine.step()
                tick()

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yields a request's output so far whenever it grew; the last one of each has `finished`.

        Closing the iterator aborts what still runs.  Bad prompts are yielded first, with `.error`.
        """
        requests = self._enter(prompts, sampling_params, streaming=True)
        live = {request.id: request for request in requests if isinstance(request, _Request)}
        try:
            self._admit(live.values())
            yield from (request for request in requests if isinstance(request, RequestOutput))
            while live:
                grown = {row.id for row in self.engine.step()}
                for request in list(live.values()):
                    if request.finished:
                        yield self._leave(live.pop(request.id))
                    elif request.id in grown:
                        yield self._output(request)
        finally:
            for request in live.values():
                self._leave(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; its output so far is returned with finish_reason "abort".  Unknown ids are ignored."""
        request = self._requests.get(request_id)
        for row in request.rows if request else ():
            self.engine.scheduler.abort(row)

    def _admit(self, requests: Iterable[_Request]) -> None:
        for request in requests:
            self._requests[request.id] = request
            for row in request.rows:
                self.engine.add(row)

    def _enter(
        self, prompts: Prompt | Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None, streaming: bool = False
    ) -> list[_Request | RequestOutput]:
        several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * len(several)
        elif isinstance(given, Sequence):
            params = list(given)
        else:
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {given!r}.")
        if len(params) != len(several):
            raise RequestError(f"got {len(several)} prompts and {len(params)} SamplingParams: give one for all, or one for each.")
        return [self._request(prompt, p, streaming) for prompt, p in zip(several, params)]

    def _request(self, prompt: Prompt, params: SamplingParams, streaming: bool) -> _Request | RequestOutput:
        id = str(next(self._ids))
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
        try:
            ids = self._read(prompt, text)
            return _Request(id, text, ids, params, self._rows(id, ids, params, streaming))
        except RequestError as error:
            return RequestOutput(id, text, [], finished=True, error=error)

    def _read(self, prompt: Prompt, text: str | None) -> list[int]:
        """The ids of a prompt.  Raises RequestError where there is nothing to go on, or ids that do not exist."""
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if text is None and ids is None:
            raise RequestError(f'a prompt must be a string, {{"prompt": …}} or {{"prompt_token_ids": […]}}, got {prompt!r}.')
        if ids is None:
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer: pass token ids, or LLM(tokenizer=…).")
            if not isinstance(text, str):
                raise RequestError(f"a text prompt must be a string, got {text!r}.")
            try:
                ids = self.tokenizer.encode(text)
            except Exception as error:  # tokenizers raise what they like, over a lone surrogate for instance
                raise RequestError(f"the tokenizer cannot read the prompt {text!r}: {error}") from error
        vocabulary, longest = self.engine.checkpoint.spec.vocabulary, self.engine.max_len
        if not isinstance(ids, (list, tuple)):
            raise RequestError(f"prompt_token_ids must be a list, got {type(ids).__name__}.")
        if len(ids) == 0:
            raise RequestError("the prompt is empty: it must have at least one token.")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise RequestError(f"token id {token!r} does not exist: the vocabulary has ids 0 … {vocabulary - 1}.")
        if len(ids) >= longest:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {longest} and one must be left for the answer.")
        return list(ids)

    def _rows(self, id: str, ids: list[int], params: SamplingParams, streaming: bool) -> list[Row]:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
        reads = bool(params.stop) or streaming
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the checkpoint has none: use stop_token_ids.")
        eos = frozenset() if params.ignore_eos else self.engine.ending
        ending = eos | frozenset(params.stop_token_ids or ())
        if params.min_tokens and ending.issuperset(range(self.engine.checkpoint.spec.vocabulary)):
            raise RequestError("min_tokens forbids the tokens that end the text, and here that is every token there is.")
        limit = min(self.engine.max_len, len(ids) + (params.max_tokens or self.engine.max_len))
        seed = params.seed if params.seed is not None else mix(self.seed + int(id))
        rows: list[Row] = []
        for index in range(params.n):
            rows.append(
                Row(
                    id=id, index=index, tokens=list(ids), prompt=len(ids), params=params, law=params.law, seed=seed,
                    processors=min_tokens(len(ids), params.min_tokens, tuple(ending)), limit=limit, ending=ending,
                    source=rows[0] if rows else None, text=Detokenizer(self.tokenizer) if reads and self.tokenizer else None,
                )
            )  # fmt: skip
        return rows

    def _leave(self, request: _Request) -> RequestOutput:
        """The final output; whatever still runs is aborted."""
        self.abort(request.id)
        self._requests.pop(request.id, None)
        return self._output(request)

    def _output(self, request: _Request) -> RequestOutput:
        outputs = [
            CompletionOutput(row.index, self._text(row), row.output, row.finish_reason, row.stop_reason, row.stats) for row in request.rows
        ]
        error = next((row.error for row in request.rows if row.error), None)
        return RequestOutput(request.id, request.prompt, request.ids, outputs, request.finished, error)

    def _text(self, row: Row) -> str:
        """Token ids that end the text are not part of it, nor is a stop string."""
        if row.text is not None:
            if row.finish_reason is None:
                return shown(row.text.text, tuple(row.params.stop or ()))
            if not isinstance(row.stop_reason, str):
                row.text.flush()
            text: str = row.text.text
            return text
        if self.tokenizer is None:
            return ""
        decoded: str = self.tokenizer.decode(row.output[:-1] if row.finish_reason == "stop" else row.output, skip_special_tokens=True)
        return decoded

    def variant(self, speculative_config: Mapping[str, Any] | None) -> LLM:
        """Another LLM on the same weights, with a drafter, a cache and a queue of its own: to compare methods side by side.

        Requests without a seed draw the same ones in the same order.  Each variant takes its own kv_cache_memory_bytes.
        """
        twin = copy.copy(self)
        twin.engine, twin._requests, twin._ids = copy.copy(self.engine), {}, itertools.count()
        speculation = SpeculativeOptions.of(speculative_config)
        twin.engine.use(speculation.method(speculation.options, self.engine.target), speculation)
        return twin

    def use(self, speculative_config: Mapping[str, Any] | None) -> None:
        """Changes the drafter of a loaded model; the weights of the target stay.  Nothing may be in flight."""
        if self.engine.busy:
            raise ConfigError("the drafter cannot be changed while requests are running.")
        speculation = SpeculativeOptions.of(speculative_config)
        self.engine.use(speculation.method(speculation.options, self.engine.target), speculation)
