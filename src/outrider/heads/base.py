"""Base classes of drafters with a trained head: opening its file, and the target's last hidden state of
every row.

A head drafts after a token whose predecessor's state was computed in this engine:

    position            …  e-2   e-1 │ e        e = step.end, known = 1
    state of the target   f_e-2      │          of the last token that the target computed
    token                      x_e-1 │ draft    x_e-1 is pending; the target emitted it from f_e-2
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.cache.catch_up import CatchUp, Cursor
from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantize import Quantization, bits_of
from outrider.checkpoints.quantized_layers import QuantizedLayers
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Commit, Needs, RowStep
from outrider.core.step_input import StepInput
from outrider.core.tree import EMPTY_TREE, Budget, Draft, DraftTree
from outrider.core.validate import Checked, Count, Kind, Text, is_whole
from outrider.drafting.base import DEPTHS, Drafter, Storage, Target
from outrider.errors import ConfigError, ModelError
from outrider.heads.choose import Chooser
from outrider.heads.device_trees import on_device
from outrider.heads.growth import DeviceGrowth, Front, GrowthPlan, LevelInput, grow
from outrider.heads.layouts import HeadFormat
from outrider.heads.outer import Ids
from outrider.heads.reader import Reader
from outrider.heads.trees import Growth, LevelTree, SampledTree, frontier_tokens
from outrider.heads.vocabulary import check_size

FINGERPRINT = "target_fingerprint"  # in the config of a head: `Checkpoint.fingerprint` of its target
State = tuple[Tensor, ...]  # of a head that drafts level by level: [n, …] each
LAYER_SETTINGS = (
    "num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters",
    "rope_scaling", "max_position_embeddings",
)  # fmt: skip
ROW_STATE = ("catch_up", "last_states", "memory", "trees", "deferred")  # of a drafter, besides its weights
log = logging.getLogger("outrider")
# Names of tensors beside, or in place of, quantized weights.
QUANTIZED = re.compile(r"\.(weight_(scale(_inv)?|packed|zero_point)|qweight|scales)$")


MODEL = Kind("the folder or hub id of a head", lambda value: isinstance(value, str))
ONE = Kind("1, because one rank runs a head of this kind", lambda value: is_whole(value, 1, 1))


@dataclass(frozen=True)
class HeadOptions(Checked):
    """model: folder or hub id of the head.  quantization: of its weights while loading, int8 or int4."""

    model: Annotated[str, MODEL] = ""
    revision: Text | None = None
    quantization: Quantization | None = None
    draft_tensor_parallel_size: Annotated[int, ONE] = 1


@dataclass(frozen=True)
class LayerOptions(HeadOptions):
    """draft_tensor_parallel_size: 1: all on rank 0; the target's tensor_parallel_size: decoder layers are
    divided over the ranks of its first stage."""

    draft_tensor_parallel_size: Count = 1


def random_head(make: Callable[..., Any], *args: Any, **options: Any) -> Head:
    """A head with the weights of a new network, always the same, with noise in place of zeros."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = make(*args, **options)
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return Head.of("example", network.config(), network.state_dict())


class HeadDrafter(Drafter):
    """Base of drafters with a trained head.

    head: the opened file, under our names.  reader: packs its tensors.  choose: draft tokens from logits.
    packed: the file's tensors, if some of them are quantized.
    FORMAT: the table of the method's published names.  memory: accuracy of ranks, for trees that follow it.
    """

    FORMAT: ClassVar[HeadFormat] = HeadFormat(())
    tunable: ClassVar[Mapping[str, Sequence[Any]]] = DEPTHS
    needs = Needs(states=(FINAL,))
    pooled: Any = None  # a `Stack` with K/V at the target's slots, in a pool of its own

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target)
        if head is None and not options.model:
            raise ConfigError("the method needs 'model': the folder or hub id of a trained head.")
        self.backend, self.hidden = target.decoder.backend, target.decoder.spec.hidden
        opened = head or self._open(options)
        check_size(opened, target.vocabulary)
        self.packed = opened.tensors if isinstance(opened.tensors, QuantizedLayers) else None
        self.head = self.translate(opened)
        bits, ranks = bits_of(options.quantization), options.draft_tensor_parallel_size
        self.reader = Reader(self.head, self.backend, bits, ranks)
        self.choose, self.catch_up = Chooser(target), CatchUp()
        self.trees: dict[Row, DraftTree] = {}  # as proposed and not yet observed; a part may be verified

    @staticmethod
    def can_draft(step: RowStep) -> bool:
        """Whether the row has emitted a token, and only the pending one is unknown to the target."""
        return step.budget.nodes > 0 and step.decodes

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter({device: self.slot_bytes})

    @property
    def slot_bytes(self) -> int:
        """Bytes of K/V for every slot of the target's cache."""
        return self.pooled.slot_bytes if self.pooled else 0

    def allocate(self, slots: int, pool: Pool) -> Storage:
        if self.pooled is None:
            return Storage()
        self.pool: Pool = self.pooled.pool(slots)
        return Storage([self.pool])

    def forget(self, row: Row, reason: str) -> None:
        self.catch_up.forget(row)
        self.trees.pop(row, None)

    def filled(self, row: Row) -> int:
        return self.catch_up.filled(row)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        config = {key: value for key, value in self.head.config.items() if key != "quantization_config"}
        options = self.options
        bits = self.packed.bits(self.head.stored.values()) if self.packed else None
        if bits and options.quantization is None:
            options = replace(options, quantization=f"int{bits}")
        fresh = type(self)(options, self.target, Head.of(self.head.name, config, tensors))
        kept = {name: value for name, value in vars(fresh).items() if name not in ROW_STATE}
        needs = self.needs  # a learner may have added states
        vars(self).update(kept, needs=needs)

    @classmethod
    def claims(cls, head: Head) -> int:
        """Whether a file is for this method: 2 by its tensors, 1 by its config, 0 no."""
        return 2 if cls.FORMAT.layout_of(head) else int(cls.FORMAT.named_in(head.config))

    @classmethod
    def translate(cls, head: Head) -> Head:
        """The head under our names, with a flat config.  Raises ModelError for unsupported kinds."""
        return cls.FORMAT.translate(head)

    @classmethod
    def check(cls, head: Head) -> None:
        """Raise ModelError for a file that fits no target, judged by its config and tensor names."""
        quantized = next((name for name in head if QUANTIZED.search(name)), None)
        whole = "model.norm.weight" in head  # a target, which may hold any tensors besides the head's
        if quantized and not whole:
            raise ModelError(
                f"{head.name!r} is quantized ({quantized}): load the unquantized head, or one in fp8, "
                "compressed-tensors, GPTQ or AWQ (gemm); 'quantization' quantizes it while loading."
            )
        cls.translate(head)

    def complete_config(self) -> None:
        """Take the settings of layers from the target where the head's config has none: Hydra's files."""
        if "num_attention_heads" not in self.head.config:
            theirs = {name: getattr(self.target.checkpoint.config, name, None) for name in LAYER_SETTINGS}
            config = {name: value for name, value in theirs.items() if value is not None}
            self.head = replace(self.head, config={**config, **self.head.config})
            self.reader = replace(self.reader, head=self.head)

    def check_depth(self, depth: int, most: int, parts: str = "heads") -> None:
        """Raise ConfigError for more levels than the file has parts for."""
        if depth > most:
            raise ConfigError(
                f"num_speculative_tokens {depth} is more than the {most} {parts} of {self.head.name!r}: one "
                "drafts each level."
            )

    def check_embedding(self) -> None:
        """Raise ModelError if the target's embeddings are not as wide as its states."""
        if (wide := self.target.decoder.embed([0]).shape[1]) != self.hidden:
            raise ModelError(
                f"{self.head.name!r} reads embeddings as wide as the target's states, {self.hidden}, and the "
                f"target's are {wide}."
            )

    @staticmethod
    def pending(cursors: Mapping[Row, Cursor]) -> tuple[StepInput, Tensor]:
        """The positions of all pending states of these rows, and the states [n, width]."""
        step_input, states = StepInput(), list[Tensor]()
        for row, cursor in cursors.items():
            step_input.chain(row.slots, cursor.first, [0] * cursor.count)
            states += cursor.states
        return step_input.build(), torch.cat(states)

    def sampled_tree(self, row: Row, table: array[int], base: int, budget: Budget, k: int) -> SampledTree:
        """An empty tree of samples: at most k on a level, and few enough that every level can have as many.

        table, base: as of `DynamicTree`.
        """
        siblings = min(k, max(1, budget.nodes // budget.depth))
        return SampledTree(row, table, base, budget, siblings, self.target.stream_id)

    def propose_for(self, batch: Batch, trees: Mapping[int, DraftTree]) -> Draft:
        """The draft with these trees, by row of the batch; `learn` judges them."""
        proposed = [trees.get(r, EMPTY_TREE) for r in range(len(batch))]
        if self.memory is not None:
            self.trees.update(zip(batch.rows, proposed))
        return Draft(proposed)

    def learn(self, commit: Commit) -> None:
        """Update the accuracy of ranks, if trees follow it."""
        if self.memory is not None:
            for step in commit.batch:
                self.memory.update(self.trees.pop(step.row, EMPTY_TREE), step.emitted)

    def _open(self, options: Any) -> Head:
        """The head of these options.  Raises ModelError for one of another method, or that is unusable."""
        head = Head.open(options.model, options.revision)
        if not self.claims(head):
            named = head.config.get("speculators_model_type")
            others = [named] if named and named not in self.sources else []
            for name in [*self.target.methods_of(head), *others]:
                raise ModelError(
                    f"{options.model!r} is a head for another method: say {name!r}, or leave method out."
                )
        self.check(head)
        trained_for = head.config.get(FINGERPRINT)
        if trained_for is not None and trained_for != self.target.checkpoint.fingerprint:
            found = "%s was trained for another target than %s: few of its tokens will be accepted"
            log.warning(found, head.name, self.target.checkpoint.name)
        return head


class LastState(NamedTuple):
    """The target's state [1, hidden] at the last of the `computed` first tokens of a row."""

    computed: int
    state: Tensor


class StateDrafter(HeadDrafter):
    """Base of heads that draft from one state, that of the last computed token.  tap: which state of the
    target.

    Unless it has its own `propose`, a subclass defines `tree` and `advance`, and a level is one pass over
    all rows' trees:

        level 0   advance(0, begin(f_e-2), x_e-1)         logits of the first draft token c_1
        level 1   advance(1, the state of level 0, c_1)   logits of c_2 …
    """

    tap = FINAL

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.last_states: dict[Row, LastState] = {}

    def ready(self, batch: Batch) -> list[int]:
        """The rows to draft for: allowed to, and with the state of the token before the pending one."""
        return [r for r, step in enumerate(batch) if self.can_draft(step) and self._is_current(step)]

    def _is_current(self, step: RowStep) -> bool:
        last = self.last_states.get(step.row)
        return last is not None and last.computed == step.start

    def states(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: f_e-2 of each."""
        return torch.cat([self.last_states[batch[r].row].state for r in rows]).to(self.backend.activations)

    def tree(self, step: RowStep) -> LevelTree:
        """The empty tree of a row."""
        raise NotImplementedError

    def begin(self, states: Tensor) -> State:
        """The state before the pending tokens, from the target's [n, hidden]."""
        return (states,)

    def advance(self, level: int, state: State, tokens: Ids) -> tuple[State, Tensor]:
        """The state after these tokens, and the logits float32 [n, V] of the next ones.

        tokens: for `embed`; on the device where trees grow there
        """
        raise NotImplementedError

    def propose(self, batch: Batch) -> Draft:
        trees = {r: self.tree(batch[r]) for r in self.ready(batch)}
        if trees:
            self._grow(list(trees.values()), self.begin(self.states(batch, list(trees))))
        return self.propose_for(batch, {r: tree.draft_tree for r, tree in trees.items()})

    def _grow(self, trees: Sequence[LevelTree], state: State) -> None:
        state, logits = self.advance(0, state, frontier_tokens(trees))
        embeds = self.target.decoder.embedding is not None
        if embeds and (device_growth := on_device(trees, self.choose)) is not None:
            self._grow_on_device(device_growth, state, logits)
            return
        growth = Growth(trees, self.choose)
        while growth.add(logits):
            parents = tuple(part[growth.sources] for part in state)
            state, logits = self.advance(growth.level, parents, frontier_tokens(growth.trees))

    def _grow_on_device(self, growth: DeviceGrowth, state: State, logits: Tensor) -> None:
        """Grow trees whose first state and logits are given; the host reads the complete trees."""
        plan = GrowthPlan.of(growth, self.choose).on(self.backend.device)
        growth.set_trees(grow(plan, self.choose, Front(state, logits), self._deepen))

    def _deepen(self, level: int, state: State, given: LevelInput) -> Front[State]:
        parents = tuple(part.index_select(0, given.sources) for part in state)
        return Front(*self.advance(level, parents, given.ids))

    def observe(self, commit: Commit) -> None:
        for r, step in enumerate(commit.batch):
            if step.emitted:
                state = commit.states.last_of(r, (self.tap,))
                self.last_states[step.row] = LastState(step.row.computed, state)

    def forget(self, row: Row, reason: str) -> None:
        super().forget(row, reason)
        self.last_states.pop(row, None)
