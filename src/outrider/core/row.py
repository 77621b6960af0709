"""Rows: the samples of requests, and what speculation did for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.core.block_table import BlockTable
from outrider.core.logprobs import Logprobs
from outrider.core.params import DistributionParams, SamplingParams
from outrider.core.processor import Processor
from outrider.core.validate import TEXT, check_fields, whole
from outrider.errors import RequestError


class Speculation(NamedTuple):
    """What speculation did for one sample: tokens per step = emitted / target forwards that emitted (plain decoding: 1.0);
    acceptance = accepted / drafted, probes aside.
    lossless: False where the verification rule changes what the target says.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    lossless: bool = True

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: Speculation) -> Speculation:  # type: ignore[override]
        steps, drafted, accepted, emitted = map(sum, zip(self[:4], other[:4]))
        return Speculation(steps, drafted, accepted, emitted, self.lossless and other.lossless)


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter for one request: a name for people, an id of at least 1 that belongs to it alone, a PEFT folder or hub id."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_fields(self, {"lora_name": TEXT, "lora_int_id": whole(1), "lora_path": TEXT}, RequestError)


@dataclass(eq=False, slots=True)
class Row:
    """One sample of one request: what the scheduler moves and a drafter sees.

    tokens: prompt and output; `computed` of them have K/V in the target's cache.  The rest are known tokens: a chunk of the
    prompt, or the one pending token that the last step emitted.
    """

    id: str
    index: int  # which of the request's n samples
    tokens: list[int]
    prompt: int  # length of the prompt
    params: SamplingParams
    distribution: DistributionParams
    seed: int
    processors: Sequence[Processor]
    limit: int  # tokens at most, prompt included
    ending: frozenset[int]  # token ids that end the text
    source: Row | None = None  # the sample whose prompt this one shares
    lora: LoRARequest | None = None
    adapter: Any = None  # its weights, while the row runs
    table: BlockTable | None = None
    computed: int = 0
    cached: int | None = None  # tokens whose K/V was there when it was first admitted
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None
    error: Exception | None = None  # why it could not go on (finish_reason "error")
    steps: int = 0  # target forwards that emitted, what was guessed for these, and what of it was accepted
    drafted: int = 0
    accepted: int = 0
    lossless: bool = True  # as the verification rule says
    text: Any = None  # the incremental detokeniser
    logprobs: Logprobs | None = None  # kept where the request asks for log-probabilities
    entered: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(
        default_factory=list
    )  # when each token of the output was there, on the same clock

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    def undo(self) -> None:
        """Drop the tokens of a step that was not completed: those without an entry in `arrivals`."""
        if len(self.output) > len(self.arrivals):
            del self.tokens[self.prompt + len(self.arrivals) :]
            if self.finish_reason in ("stop", "length"):
                self.finish_reason = self.stop_reason = None
            if self.text is not None:
                self.text = self.text.again(self.output)

    @property
    def stats(self) -> Speculation:
        return Speculation(
            self.steps, self.drafted, self.accepted, len(self.tokens) - self.prompt, self.lossless
        )

    @property
    def reusable(self) -> int:
        """How many tokens may come from the prefix cache: the last one is always computed, as is what prompt_logprobs still needs."""
        asked = self.logprobs
        scored = self.prompt if asked is None or asked.prompt_count is None else len(asked.prompt)
        return (len(self.tokens) if scored == self.prompt else scored) - 1

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)
