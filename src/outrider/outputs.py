"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.logprobs import Entry
from outrider.core.row import Speculation


@dataclass
class CompletionOutput:
    """One sample.  finish_reason: "stop", "length", "abort", or None while it runs.  stop_reason: the stop string or id.

    token_times: seconds from the request's arrival until each token was there, once it has ended.
    logprobs: for each token {id: Logprob} of itself and of the best ones, and cumulative_logprob their sum, where asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: Speculation = field(default_factory=Speculation)
    logprobs: list[Entry] | None = None
    cumulative_logprob: float | None = None
    token_times: list[float] = field(default_factory=list)


@dataclass
class RequestOutput:
    """What became of one prompt.  `error` is set where the request could not be served, or not to its end.

    num_cached_tokens: how many of its tokens an earlier request had computed (None before it ran).
    prompt_logprobs: as `CompletionOutput.logprobs`, with None for the first token, which nothing predicts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    error: Exception | None = None
    prompt_logprobs: list[Entry | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def speculation(self) -> Speculation:
        """Of all samples together."""
        return sum((output.speculation for output in self.outputs), Speculation())
