"""Outputs of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.core.logprobs import Entry
from outrider.core.row import DraftingSummary, LastDraft, Speculation


@dataclass
class CompletionOutput:
    """Output of one sample.

    finish_reason       "stop", "length", "abort" or "error"; None while it runs
    stop_reason         the stop string or stop token id that ended the text
    token_times         seconds from the arrival of the request to each token; empty until the sample ends
    token_sources       for each token the method that drafted it; None: the target's own
    logprobs            for each token {id: Logprob} of itself and of the best ones; None unless requested
    drafted_by          draft tokens by method
    last_draft          draft tree of the last step
    token_ends          for each token the length of the text behind it; empty unless streamed as text
    drafting            what adaptive speculation chose for it, and what came of it; None without
    cumulative_logprob  sum of the log-probabilities of the tokens; None unless requested
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
    token_sources: list[str | None] = field(default_factory=list)
    drafting: DraftingSummary | None = None
    drafted_by: dict[str, int] = field(default_factory=dict)
    last_draft: LastDraft | None = None
    token_ends: list[int] = field(default_factory=list)

    def copy(self) -> CompletionOutput:
        """A copy whose lists do not grow with this one's."""
        made = replace(self, token_ids=[*self.token_ids], token_sources=[*self.token_sources])
        made.token_ends = [*self.token_ends]
        made.logprobs = None if self.logprobs is None else [*self.logprobs]
        return made


@dataclass
class RequestOutput:
    """Output of one prompt.

    error              set if the request was invalid or failed before its end
    num_cached_tokens  prompt tokens taken from the prefix cache; None before admission
    queued_seconds     time until the request was admitted; None before
    prompt_logprobs    as `CompletionOutput.logprobs`, with None for the first token, which has no prediction
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    error: Exception | None = None
    prompt_logprobs: list[Entry | None] | None = None
    num_cached_tokens: int | None = None
    queued_seconds: float | None = None

    def copy(self) -> RequestOutput:
        """A copy whose lists do not grow with this one's."""
        return replace(self, outputs=[sample.copy() for sample in self.outputs])

    @property
    def speculation(self) -> Speculation:
        """Speculation statistics summed over all samples."""
        return sum((output.speculation for output in self.outputs), Speculation())
