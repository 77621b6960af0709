"""Steps an engine by hand, so that a test decides what happens between two steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.config import SpeculativeOptions
from outrider.core.params import SamplingParams
from outrider.core.row import LoRARequest, Row
from outrider.draft import method
from outrider.engine.loop import EngineLoop
from outrider.llm import LLM
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.progress import Request
from outrider.requests import Prompt, Reader
from outrider.testing.leaks import leaks


class EngineDriver:
    """Requests of one LLM, stepped by hand. Method names are those of vLLM's `LLMEngine`.

        driver = EngineDriver(llm)
        request = driver.add_request("A prompt", SamplingParams(max_tokens=8))
        while not request.finished:
            driver.step()
        output = driver.finish(request)

    `generate` and `stream` of the same LLM step these requests, too.
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self._reader = Reader(llm.engine, llm.tokenizer, llm.seed)
        self._loop = EngineLoop(llm.engine)
        self._ids = itertools.count()

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> Request:
        """A request that is not queued yet. Raises RequestError if prompt or parameters are invalid."""
        name = f"driver-{next(self._ids)}" if request_id is None else request_id
        request = self._reader.request(name, prompt, params or SamplingParams(), lora_request)
        if isinstance(request, RequestOutput):
            assert request.error is not None
            raise request.error
        return request

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """Queue a request, for the next step that has room.  options: those of `make_request`."""
        request = self.make_request(prompt, params, **options)
        self._loop.submit(request.rows)
        return request

    def step(self) -> list[Row]:
        """One step of the engine; the rows that emitted tokens or failed."""
        return self.engine.step()

    def abort_request(self, request: Request) -> None:
        """End a request before the next step. A finished request is left as it is."""
        self._loop.abort(request.id)

    def finish(self, request: Request) -> RequestOutput:
        """The output of a request, which is aborted if it still runs."""
        self.abort_request(request)
        return request.output()

    def has_unfinished_requests(self) -> bool:
        return self.engine.busy


def run_staggered(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    aborts: Mapping[int, int] | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[RequestOutput]:
    """Answer prompts that arrive one after another: two at first, one more every second step.

    params: for all prompts, or one for each. aborts: prompt i is aborted once its first sample has aborts[i]
    tokens. on_step: called after every step. The engine's page accounting is checked after every step.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    driver, requests, done = EngineDriver(llm), list[Request](), dict[int, RequestOutput]()
    for step in itertools.count():
        while len(requests) < min(len(prompts), 2 + step // 2):
            i = len(requests)
            requests.append(driver.add_request(list(prompts[i]), each[i]))
        if len(done) == len(prompts):
            break
        driver.step()
        llm.engine.check()
        if on_step:
            on_step()
        for i, request in enumerate(requests):
            aborted = aborts is not None and len(request.rows[0].output) >= aborts.get(i, 1 << 30)
            if i not in done and (request.finished or aborted):
                done[i] = driver.finish(request)
    return [done[i] for i in range(len(prompts))]


def use_example(llm: LLM, name: str, **options: Any) -> None:
    """Put the `example` drafter of a method to work, the one that the exactness suite runs.

    options: keys of speculative_config that every method has, e.g. num_speculative_tokens.
    """
    speculation = SpeculativeOptions.of({"method": name, **options})
    llm.engine.use(method(name).example(llm.engine.target_for(speculation)), speculation)


def check_idle(llm: LLM) -> None:
    """Raise AssertionError unless no request is open, no page is lost and the drafter holds no row."""
    found = leaks(llm)
    assert not found, "; ".join(found)


def check_statistics(outputs: Sequence[CompletionOutput]) -> None:
    """Raise AssertionError unless each step emitted its accepted tokens and one more."""
    for output in outputs:
        stats = output.speculation
        assert stats.emitted == len(output.token_ids)
        assert stats.accepted == stats.emitted - stats.steps
        assert stats.accepted <= stats.drafted


def visible_parts(outputs: Sequence[CompletionOutput]) -> list[tuple[Any, ...]]:
    """Tokens, text, finish_reason and stop_reason of every sample: what speculation must not change."""
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in outputs]
