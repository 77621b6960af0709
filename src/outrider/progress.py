"""Outputs of a request, as far as its rows are committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from outrider.core.params import SamplingParams
from outrider.core.row import DraftingSummary, LastDraft, Row, Speculation
from outrider.engine.detokenizer import Detokenizer, visible_text
from outrider.outputs import CompletionOutput, RequestOutput


class RowState(NamedTuple):
    """Committed state of one row, taken between two steps.

    num_tokens: of the output.  text: that of the row's detokenizer, which exists if there are stop strings.
    The fields from `stats` on are statistics, which a brief state lacks.
    """

    num_tokens: int
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    stats: Speculation = Speculation()
    drafting: DraftingSummary | None = None
    drafted_by: Mapping[str, int] = MappingProxyType({})
    last_draft: LastDraft | None = None

    @staticmethod
    def of(row: Row, brief: bool = False) -> RowState:
        """brief: without statistics as long as the row runs."""
        text = None if row.text is None else row.text.text
        if brief and row.finish_reason is None:
            return RowState(len(row.arrivals), text, None, row.stop_reason)
        drafting = None if row.drafting is None else row.drafting.copy()
        return RowState(
            len(row.arrivals),
            text,
            row.finish_reason,
            row.stop_reason,
            row.stats,
            drafting,
            dict(row.drafted_by),
            row.last_draft,
        )


@dataclass
class Request:
    """A prompt being served, with one row for each of its n samples.

    The thread that steps the engine takes `states()` between steps.  Any other thread builds outputs from
    it: they read only tokens that are committed.  Partial texts are detokenized there, outside the step.

    ends: outputs have `token_ends`.  Without, the new tokens of a text are decoded at once.
    """

    id: str
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    rows: list[Row]
    tokenizer: Any
    truncated: bool = False  # `ids` lack the beginning of the prompt
    texts: dict[int, Detokenizer] = field(default_factory=dict)  # sample -> its text, as far as it was read
    shared: RequestOutput | None = None  # that of `extended`, None until its first call
    ends: bool = True

    @property
    def detokenizes(self) -> bool:
        """Whether its outputs have texts."""
        return self.tokenizer is not None and self.params.detokenize

    @property
    def finished(self) -> bool:
        return None not in [row.finish_reason for row in self.rows]

    def states(self, brief: bool = False) -> list[RowState]:
        """brief: of running rows without statistics, which take most of the time."""
        return [RowState.of(row, brief) for row in self.rows]

    def output(self, states: Sequence[RowState] | None = None) -> RequestOutput:
        """The output as of `states`; by default the output so far, to be read between steps."""
        return self._extended(self._empty(), states or self.states())

    def extended(self, states: Sequence[RowState]) -> RequestOutput:
        """The output as of `states`: the same object in every call, to which the new tokens are added."""
        self.shared = self.shared or self._empty()
        return self._extended(self.shared, states)

    def _empty(self) -> RequestOutput:
        samples = [CompletionOutput(row.index, "", []) for row in self.rows]
        return RequestOutput(self.id, self.prompt, self.ids, samples)

    def _extended(self, made: RequestOutput, states: Sequence[RowState]) -> RequestOutput:
        first, made.error, made.finished = self.rows[0], None, True
        if self.params.prompt_logprobs is not None and first.logprobs is not None:
            made.prompt_logprobs = list(first.logprobs.prompt)
        for sample, row, so_far in zip(made.outputs, self.rows, states):
            self._extend(sample, row, so_far)
            made.error = made.error or row.error
            if so_far.finish_reason is None:
                made.finished = False
        made.num_cached_tokens, made.queued_seconds = first.cached, first.queued
        return made

    def _extend(self, made: CompletionOutput, row: Row, so_far: RowState) -> None:
        """Add to a sample what it lacks of a later state."""
        if made.finish_reason is not None:
            return
        start, end = len(made.token_ids), so_far.num_tokens
        made.token_ids += row.tokens[row.prompt + start : row.prompt + end]
        made.token_sources += row.sources[start:end]
        made.finish_reason, made.stop_reason = so_far.finish_reason, so_far.stop_reason
        made.speculation, made.drafting = so_far.stats, so_far.drafting
        made.drafted_by, made.last_draft = dict(so_far.drafted_by), so_far.last_draft
        made.text = self._text(row, made.token_ids, so_far)
        if self.ends and (text := row.text or self.texts.get(row.index)) is not None:
            made.token_ends += text.ends[len(made.token_ends) : end]
        if made.finish_reason is not None:
            made.token_times = [time - row.entered for time in row.arrivals]
        if row.logprobs is not None and row.logprobs.count is not None:
            # The last step may have emitted tokens past the end of the text.
            new = row.logprobs.sampled[start:end]
            made.logprobs = made.logprobs or []
            made.logprobs += new
            made.cumulative_logprob = made.cumulative_logprob or 0.0
            for token, entry in zip(made.token_ids[start:], new):
                made.cumulative_logprob += entry[token].logprob

    def _text(self, row: Row, ids: list[int], so_far: RowState) -> str:
        """Text of the output.

        Excludes the stop string or final token unless include_stop_str_in_output is set.
        """
        params, ended = row.params, so_far.finish_reason is not None
        if not self.detokenizes:
            return ""
        if so_far.text is not None:
            if not ended:
                return visible_text(
                    so_far.text, () if params.include_stop_str_in_output else tuple(params.stop or ())
                )
            if not isinstance(so_far.stop_reason, str):
                row.text.flush()
            text: str = row.text.text
            return text
        if so_far.finish_reason == "stop" and not params.include_stop_str_in_output:
            ids = ids[:-1]
        return self._streamed(row.index, ids, ended) if self.shared else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens)
        return text

    def _streamed(self, index: int, ids: list[int], ended: bool) -> str:
        """Text of a sample, whose new tokens alone are decoded."""
        if index not in self.texts:
            self.texts[index] = Detokenizer(self.tokenizer, self.params.skip_special_tokens)
        text = self.texts[index]
        if self.ends:
            for token in ids[text.count :]:
                text.feed(token)
        else:
            text.feed_all(ids[text.count :])
        if ended:
            text.flush()
        return text.text
