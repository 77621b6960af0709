"""The data that travels through a step: small, with the shapes stated where they are defined.

p is the target's distribution, q the draft's.  A token tree hangs from the last certain token, the *root* (node -1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.block_table import BlockTable
from outrider.core.logprobs import Logprobs
from outrider.core.params import DistributionParams, SamplingParams
from outrider.core.processor import Processor
from outrider.errors import RequestError

ROOT = -1


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
        for name, kind in (("lora_name", str), ("lora_int_id", int), ("lora_path", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or not value or isinstance(value, bool):
                raise RequestError(
                    f"{name} must be {'a whole number of at least 1' if kind is int else 'a string'}, got {value!r}."
                )
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be a whole number of at least 1, got {self.lora_int_id}.")


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

    def count(self, step: RowStep, now: float, lossless: bool) -> None:
        """Add a step that emitted tokens to the statistics.  now: seconds, on the clock of `arrivals`."""
        self.steps += 1
        self.drafted += step.tree.size
        self.accepted += len(step.accepted)
        self.lossless = lossless
        self.arrivals += [now] * len(step.emitted)

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


@dataclass(frozen=True, slots=True)
class Budget:
    """Draft tokens that one row may get in a step: levels of the tree, and nodes.

    0 <= depth <= nodes always holds, and both are 0 if either is: a depth that the nodes cannot fill is cut.
    """

    depth: int = 0
    nodes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.depth <= self.nodes:
            depth = max(0, min(self.depth, self.nodes))
            object.__setattr__(self, "depth", depth)
            object.__setattr__(self, "nodes", self.nodes if depth else 0)

    def within(self, depth: int | None = None, nodes: int | None = None) -> Budget:
        """The same with at most this depth and so many nodes; None sets no limit."""
        deepest = self.depth if depth is None else min(self.depth, depth)
        return Budget(deepest, self.nodes if nodes is None else min(self.nodes, nodes))


class DraftTree(NamedTuple):
    """The tree of one row, as lists: parents[i] < i, -1 = root.

    laws, law_of: node i was drawn from the distribution laws[law_of[i]] (float64 [V]) at its parent; -1 means it was chosen, and an
    empty law_of that all were.  repeats: siblings of one law are independent draws; otherwise each is drawn from what is left of the
    law without those before it.  probes: the last so many nodes are there for what the target says after them, not to be accepted.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    distributions: Sequence[Tensor] = ()
    probs_of: Sequence[int] = ()
    repeats: bool = False
    probes: int = 0

    @staticmethod
    def chain(tokens: list[int], confidence: list[float]) -> DraftTree:
        return DraftTree(tokens, [*range(ROOT, len(tokens) - 1)], confidence)

    @property
    def chained(self) -> bool:
        """Whether every node hangs from the one before it."""
        return self.parents == [*range(ROOT, len(self.parents) - 1)]

    @property
    def size(self) -> int:
        """How many nodes may be accepted."""
        return len(self.tokens) - self.probes

    def only(self, keep: Sequence[int]) -> DraftTree:
        """These nodes, ascending; the parents of all are among them."""
        place = {ROOT: ROOT, **{node: at for at, node in enumerate(keep)}}
        return self._replace(
            tokens=[self.tokens[i] for i in keep],
            parents=[place[self.parents[i]] for i in keep],
            confidence=[self.confidence[i] for i in keep],
            probs_of=[self.probs_of[i] for i in keep] if self.probs_of else (),
            probes=sum(i >= self.size for i in keep),
        )

    def distribution(self, node: int) -> Tensor | None:
        """What `node` was drawn from, before any of its siblings; None if it was chosen."""
        return self.distributions[self.probs_of[node]] if self.probs_of and self.probs_of[node] >= 0 else None


EMPTY_TREE = DraftTree([], [], [])


class Resume(NamedTuple):
    """What the drafter has computed of the target's own forward, in the slots that this step gave it: verification begins there.

    states [m, hidden]: the residual stream before layer `layer`, of nodes[r] (ascending; ROOT is the last known token) of row 0, 1 …;
    K/V of the layers below is in the slots of these nodes.  Bit for bit what the target itself would compute.
    """

    layer: int
    states: Tensor
    nodes: list[list[int]]


class Draft(NamedTuple):
    """What a drafter proposes for one step: trees[r] hangs from the last known token of row r of the batch.

    Siblings that were chosen hold distinct tokens.
    """

    trees: Sequence[DraftTree]
    resume: Resume | None = None


NO_BUDGET = Budget()


@dataclass(slots=True)
class RowStep:
    """One row in one step: what it computes, which draft tokens it gets, and what becomes of them.

        position   start ... end - 1 | end, end + 1, ...
                   known tokens      | slots of draft nodes 0, 1, ...

    The scheduler fills in the first five fields, the drafter `tree`, the controller `kept`, the verification rule
    `accepted` and `emitted`, the forward `topk`.
    """

    row: Row
    start: int  # position of the first known token
    known: int  # number of known tokens
    emits: bool = True  # the known tokens reach the row's last one, so that a new token can be picked
    budget: Budget = NO_BUDGET
    tree: DraftTree = EMPTY_TREE
    # ascending nodes of the proposed tree that a cut has left: node i of `tree` was node kept[i]; None: all
    kept: Sequence[int] | None = None
    accepted: list[int] = field(default_factory=list)  # path of accepted nodes
    emitted: list[int] = field(default_factory=list)  # their tokens and one more; empty unless `emits`
    # ids of the largest logits (see Needs.topk), best first, after the root and after each node; empty unless `emits`,
    # and none at a node without a finite logit
    topk: list[list[int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position of the first draft node: the number of tokens that are known to the forward."""
        return self.start + self.known

    @property
    def predicted(self) -> list[int]:
        """The tokens from position start + 1 on that this step predicted: known ones, then the emitted ones."""
        return self.row.tokens[self.start + 1 : self.end] + self.emitted


@dataclass(slots=True)
class Batch:
    """The rows of one step.  failed: rows that ended before they began.  prefill: some row computes a part of its prompt."""

    steps: list[RowStep] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    prefill: bool = False
    resume: Resume | None = None

    def add(self, row: Row, known: int, budget: Budget = NO_BUDGET) -> None:
        """Let `row` compute its next `known` tokens."""
        end = row.computed + known
        self.steps.append(RowStep(row, row.computed, known, end == len(row.tokens), budget))
        self.prefill |= end <= row.prompt

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[RowStep]:
        return iter(self.steps)

    def __getitem__(self, r: int) -> RowStep:
        return self.steps[r]

    @property
    def rows(self) -> list[Row]:
        return [step.row for step in self.steps]

    def within(self, budgets: Sequence[Budget]) -> Batch:
        """The same rows with other budgets."""
        return Batch([replace(step, budget=budget) for step, budget in zip(self.steps, budgets)])

    def take(self, draft: Draft) -> None:
        """Give every row its draft tree."""
        self.resume = draft.resume
        for step, tree in zip(self.steps, draft.trees):
            step.tree = tree


FINAL = -1  # the states that the head reads, after the last norm


class Needs(NamedTuple):
    """What a drafter wants to see of the target's forward.

    topk: so many ids with the largest logits (64 at most), at the root and at every guess.
    states: hidden states, at every token that becomes certain: FINAL, or the number of the layer that they enter.
    lookbehind: how many of the tokens that the prefix cache, or another sample, gives are computed again, for their states.
    """

    topk: int = 0
    states: tuple[int, ...] = ()
    lookbehind: int = 0

    def __or__(self, other: Needs) -> Needs:  # type: ignore[override]
        states = tuple(sorted({*self.states, *other.states}))
        return Needs(max(self.topk, other.topk), states, max(self.lookbehind, other.lookbehind))


class States(NamedTuple):
    """Hidden states of the target where tokens became certain.

    kept: what `Needs.states` names -> [n, hidden] for the n rows of the forward.  places[r]: which of these are the positions
    batch[r].start, … of row r, its chunk and then the path that was accepted.
    """

    kept: Mapping[int, Tensor]
    places: list[list[int]]

    def of(self, r: int, wanted: Sequence[int], last: bool = False) -> Tensor:
        """[positions, len(wanted) * hidden]: side by side, in this order; of the last position only, if asked for."""
        places = self.places[r][-1:] if last else self.places[r]
        return torch.cat([self.kept[which][places] for which in wanted], dim=-1)


NO_STATES = States({}, [])


class Commit(NamedTuple):
    """What is certain after a step: the only thing a drafter learns from.  A replay after preemption is recognised by `start`.

    states: the hidden states that `Needs.states` names.
    """

    batch: Batch
    states: States = NO_STATES


class Picker(Protocol):
    """The target's answers and the dice, asked lazily.  `path`: the tokens from the root to `node` (-1 = the root) of a batch row.

    What raises an OutriderError ends its row.  The three streams of random numbers (drawing guesses, accepting, drawing tokens) are
    functions of (seed, sample, length of the row, node), and independent of each other and of the noise that `pick` adds.
    """

    def pick(self, row: int, node: int, path: Sequence[int]) -> int:
        """The target's own token after `path`: what plain decoding says there."""

    def follow(self, row: int) -> tuple[list[int], list[int]] | None:
        """What `match` says of the row's tree, accepted nodes and tokens; None where it has to ask pick by pick."""

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        """The target's law after `path`, float64 [V]: processors, temperature, top_k, top_p and min_p included."""

    def accept(self, row: int, node: int, probability: float) -> bool:
        """True with this probability; asked at most once a node."""

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        """A token from `distribution`, to be emitted after `node`."""
