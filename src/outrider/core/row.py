"""Rows (the samples of requests) and their speculation statistics."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from outrider.core.block_table import ROOT, BlockTable
from outrider.core.logprobs import Logprobs
from outrider.core.noise import stream_of
from outrider.core.params import DistributionParams, SamplingParams
from outrider.core.processor import Grammar, Processor
from outrider.core.tree import DraftTree
from outrider.core.validate import Count, Text, check_fields
from outrider.errors import RequestError


class Speculation(NamedTuple):
    """Speculation statistics of one sample.

    steps     target forwards that emitted tokens
    drafted   draft tokens, without probes
    accepted  accepted draft tokens
    emitted   emitted tokens
    lossless  False if the verification rule changes the output distribution
    accepted_lengths  entry k: drafts of which k tokens were accepted

    tokens_per_step is emitted / steps, 1.0 without speculation.  acceptance is accepted / drafted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    lossless: bool = True
    accepted_lengths: tuple[int, ...] = ()

    @property
    def drafts(self) -> int:
        """Steps with draft tokens."""
        return sum(self.accepted_lengths)

    @property
    def accepted_at(self) -> list[int]:
        """Accepted draft tokens by depth, from 1."""
        return [sum(self.accepted_lengths[depth:]) for depth in range(1, len(self.accepted_lengths))]

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step; 0.0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens; 0.0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: Speculation) -> Speculation:  # type: ignore[override]
        steps, drafted, accepted, emitted = map(sum, zip(self[:4], other[:4]))
        lengths = zip_longest(self.accepted_lengths, other.accepted_lengths, fillvalue=0)
        return Speculation(
            steps, drafted, accepted, emitted, self.lossless and other.lossless, tuple(map(sum, lengths))
        )


class LastDraft(NamedTuple):
    """Draft tree of a row's last step that emitted tokens.

    accepted: path of nodes.  emitted: their tokens, and the target's own.  sources: names of the drafters
    that `DraftTree.source` refers to.
    """

    tree: DraftTree
    accepted: Sequence[int]
    emitted: Sequence[int]
    sources: Sequence[str]

    def source_of(self, node: int) -> str:
        """Name of the drafter of a node."""
        return self.sources[self.tree.source_of(node)]


class Drafted(NamedTuple):
    """Verified draft tokens, and how many of them were expected to be accepted, and were."""

    nodes: int = 0
    expected: float = 0.0
    accepted: int = 0


NO_DRAFTS = Drafted()


@dataclass(slots=True)
class DraftingSummary:
    """What an adaptive controller chose for a request, and what came of it.

    steps            steps by drafters asked: "off", "suffix", "suffix+draft_model", …; "automatic": by the
                     request's grammar or prediction
    nodes            verified draft tokens
    expected         expected number of accepted ones among them
    accepted         number of accepted ones
    seconds          its part of the time of the steps, with drafting and without prompts beside it
    plain_seconds    time that plain decoding would have taken for the same tokens, by the measured costs; an
                     accepted one counts by what it saves in its batch
    """

    steps: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    expected: float = 0.0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def add(
        self, arm: str, seconds: float, plain_seconds: float, steps: int = 1, drafted: Drafted = NO_DRAFTS
    ) -> None:
        """Add a step, or several with these sums.  arm: the drafters asked, as in `steps`."""
        self.steps[arm] = self.steps.get(arm, 0) + steps
        self.nodes += drafted.nodes
        self.expected += drafted.expected
        self.accepted += drafted.accepted
        self.seconds += seconds
        self.plain_seconds += plain_seconds

    def copy(self) -> DraftingSummary:
        return replace(self, steps=dict(self.steps))

    @property
    def gain(self) -> float:
        """Time of plain decoding over the time taken; 1.0 before the first step."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter of one request.

    lora_name: used in messages.  lora_int_id: unique id, at least 1.  lora_path: a PEFT folder or hub id.
    """

    lora_name: Text
    lora_int_id: Count
    lora_path: Text

    def __post_init__(self) -> None:
        check_fields(self, error=RequestError)


@dataclass(eq=False, slots=True)
class Row:
    """Scheduling state of one sample of one request.

    tokens: prompt and output.  The first `computed` have K/V in the target's cache.  The rest are the
    uncomputed part of the prompt, or the one pending token that the last step emitted.
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
    grammar: Grammar | None = None  # of structured_outputs; its mask is one of `processors`
    prediction: Sequence[int] = ()  # text that the output may repeat
    source: Row | None = None  # the sample whose prompt this one shares
    priority: int = 0  # rows of a smaller one come first
    lora: LoRARequest | None = None
    cache_salt: str | None = None  # pages are shared with rows of the same salt only
    adapter: Any = None  # packed weights of `lora`, while the row runs
    table: BlockTable | None = None
    computed: int = 0
    cached: int | None = None  # tokens with cached K/V at first admission
    queued: float | None = None  # seconds until first admission
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None
    error: Exception | None = None  # cause of finish_reason "error"
    steps: int = 0  # target forwards that emitted tokens
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # accepted tokens of a draft -> drafts
    lossless: bool = True  # False if the verification rule changes the output distribution
    drafting: DraftingSummary | None = None  # None unless the controller is adaptive
    left_out: frozenset[str] = frozenset()  # methods that will not draft for it, and need not read its prompt
    text: Any = None  # incremental detokenizer
    logprobs: Logprobs | None = None  # None unless requested
    entered: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)  # of each output token, on the clock of `entered`
    sources: list[str | None] = field(default_factory=list)  # drafter of each output token; None: the target
    drafted_by: Counter[str] = field(default_factory=Counter)  # draft tokens by drafter, without probes
    last_draft: LastDraft | None = None
    # whether it has a grammar or a prediction, from which automatic drafters propose
    guided: bool = field(init=False)
    stream: int = field(init=False)  # random stream of the sample

    def __post_init__(self) -> None:
        self.stream = stream_of(self.seed, self.index)
        self.guided = self.grammar is not None or bool(self.prediction)

    def drafts_with(self, sources: Sequence[str]) -> bool:
        """Whether one of these methods may draft for it."""
        return self.accepts(sources) and not self.left_out.issuperset(sources)

    def accepts(self, sources: Sequence[str]) -> bool:
        """Whether the request lets one of these methods draft for it."""
        method = self.params.draft_method
        return method is None or method in sources

    @property
    def cache_root(self) -> Hashable:
        """Root of its pages in the prefix index, one for each LoRA adapter and salt."""
        if self.lora is None and self.cache_salt is None:
            return ROOT
        return self.lora and self.lora.lora_int_id, self.cache_salt

    @property
    def slots(self) -> array[int]:
        """Cache slots of its tokens and of this step's draft tokens, in position order, while it runs."""
        assert self.table is not None
        return self.table.slots

    @property
    def output(self) -> list[int]:
        """Token ids after the prompt."""
        return self.tokens[self.prompt :]

    def undo(self) -> None:
        """Drop the tokens of a step that was not completed: those without an entry in `arrivals`.

        Drop its error, too, unless it has ended the row: the step that repeats it raises it again.
        """
        if self.finish_reason is None:
            self.error = None
        del self.sources[len(self.arrivals) :]
        if len(self.output) > len(self.arrivals):
            del self.tokens[self.prompt + len(self.arrivals) :]
            if self.finish_reason in ("stop", "length"):
                self.finish_reason = self.stop_reason = None
            if self.text is not None:
                self.text = self.text.again(self.output)

    @property
    def stats(self) -> Speculation:
        emitted, lengths = len(self.tokens) - self.prompt, tuple[int, ...]()
        if self.accepted_lengths:
            longest = max(self.accepted_lengths)
            lengths = tuple(self.accepted_lengths[length] for length in range(longest + 1))
        return Speculation(self.steps, self.drafted, self.accepted, emitted, self.lossless, lengths)

    @property
    def reusable(self) -> int:
        """Maximum number of tokens taken from the prefix cache.

        Excludes the last token, and the tokens whose logits prompt_logprobs still needs.
        """
        asked = self.logprobs
        scored = self.prompt if asked is None or asked.prompt_count is None else len(asked.prompt)
        return (len(self.tokens) if scored == self.prompt else scored) - 1

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still emit."""
        return self.limit - len(self.tokens)

    @property
    def draft_depth(self) -> int:
        """Maximum depth of its next draft, by its parameters and what is left to emit."""
        if not self.params.speculate or (self.grammar is not None and not self.grammar.drafts):
            return 0
        # the last token of a row is never drafted: the step that verifies the ones before it emits it
        depth, most = max(0, self.limit - len(self.tokens) - 1), self.params.max_draft_tokens
        return depth if most is None else min(depth, most)
