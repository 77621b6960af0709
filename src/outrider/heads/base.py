"""A drafter with a trained head: which file, and what the target's last state is.

Every head reads what the target computed, so it can only guess behind a token whose predecessor's state was seen in this engine:

    position       … e-2   e-1 │ e        e = step.end, known = 1
    the target said  f_e-2      │          its state after the last token that it computed
    x                      x_e-1│ guess    the pending token, which it said from that state
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantize import bits_of
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, Commit, Needs, RowStep
from outrider.drafting.base import Drafter, Target
from outrider.drafting.options import refuse_parallel
from outrider.errors import ConfigError, ModelError
from outrider.heads.choose import Chooser
from outrider.heads.reader import Reader
from outrider.heads.vocabulary import check_size

QUANTISED = re.compile(
    r"\.(weight_(scale(_inv)?|packed|zero_point)|qweight|scales)$"
)  # names of what stands beside, or for, such weights


@dataclass(frozen=True)
class HeadOptions:
    """model: the head's folder or hub id.  quantization: of its weights, int8 or int4."""

    model: str = ""
    revision: str | None = None
    quantization: str | None = None
    draft_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ConfigError(f"model must be the folder or hub id of a head, got {self.model!r}.")
        bits_of(self.quantization, "quantization of the head")
        refuse_parallel(self.draft_tensor_parallel_size)


class HeadDrafter(Drafter):
    """head: the opened file; `reader` packs its tensors, `choose` makes tokens of logits."""

    demo: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    needs = Needs(states=(FINAL,))
    slot_bytes: int = 0  # bytes of K/V for every slot of the target's cache

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target)
        if head is None and not options.model:
            raise ConfigError("the method needs 'model': the folder or hub id of a trained head.")
        self.backend, self.hidden = target.decoder.backend, target.decoder.spec.hidden
        self.head = head or self._opened(options)
        check_size(self.head, target.vocabulary)
        self.reader = Reader(self.head, self.backend, bits_of(options.quantization))
        self.choose = Chooser(target)

    @staticmethod
    def may_guess(step: RowStep) -> bool:
        """Whether a row has said something, and waits for the next token alone.  Not behind a prompt, although its last chunk may be one
        token, too: how prompts are cut into chunks depends on the clock, and what is guessed must not."""
        return step.budget.nodes > 0 and step.known == 1 and len(step.row.tokens) > step.row.prompt

    @classmethod
    def claims(cls, head: Head) -> int:
        """Whether a file is for this method: 2 by its tensors, 1 by its config, 0 no."""
        return 0

    def footprint(self, device: torch.device) -> Counter[torch.device]:
        return Counter({device: self.slot_bytes})

    @classmethod
    def check(cls, head: Head) -> None:
        """Raise ModelError for a file of this method that no target can use, by its config and tensor names."""
        few = next((name for name in head if QUANTISED.search(name)), None)
        if few and "model.norm.weight" not in head:  # the rest of a target may be what it likes
            raise ModelError(
                f"{head.name!r} is quantised ({few}): load the unquantised head, or one in compressed-tensors (pack-quantized); "
                "'quantization' quantises it while loading."
            )

    def _opened(self, options: Any) -> Head:
        """Raises ModelError for a file of another method, or one that cannot be used."""
        head = Head.open(options.model, options.revision)
        if not self.claims(head):
            for name in self.target.methods_of(head):
                raise ModelError(
                    f"{options.model!r} is a head for another method: say {name!r}, or leave method out."
                )
        self.check(head)
        return head


class StateDrafter(HeadDrafter):
    """For heads that guess from the last state alone, and keep nothing else of a row."""

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.last: dict[
            Row, tuple[int, Tensor]
        ] = {}  # how many tokens the target had computed, and its state [1, hidden] at the last

    def ready(self, batch: Batch) -> list[int]:
        """The rows of the batch to guess for."""
        return [r for r, step in enumerate(batch) if self.may_guess(step) and self._last_seen(step)]

    def _last_seen(self, step: RowStep) -> bool:
        return step.row in self.last and self.last[step.row][0] == step.start

    def states(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """[len(rows), hidden]: f_e-2 of each."""
        return torch.cat([self.last[batch[r].row][1] for r in rows]).to(self.backend.activations)

    def observe(self, commit: Commit) -> None:
        for r, step in enumerate(commit.batch):
            if step.emitted:
                self.last[step.row] = step.row.computed, commit.states.of(r, (FINAL,), last=True)

    def forget(self, row: Row, reason: str) -> None:
        self.last.pop(row, None)
