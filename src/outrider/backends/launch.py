"""Methods that compute on a device alone, so that a backend may record what they launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.device import Numbers
from outrider.core.step_input import StepInput

RECORDED_ROWS = 512  # most rows of a step with a record


class AttentionShape(Protocol):
    """Heads of a layer, and the norms of its queries and keys, if any."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class ForwardShape(NamedTuple):
    """Forwards that `Backend.launch` is for: their steps, their pool, and the attention of their layers.

    steps: built, without adapters.  Ids, and paths, of all but the first may come from the device, by
        `StepInput.put`.
    room, level_room: rows of the first step, and of each other one, that a record has at least, so that few
        records serve steps of many lengths
    """

    steps: Sequence[StepInput]
    pool: Pool
    attention: AttentionShape
    room: int = 0
    level_room: int = 0


# A method of (steps, pool, rows, numbers, *fixed) that computes on the device alone; see `Backend.launch`.
Launched = Callable[..., Tensor]


class Call(NamedTuple):
    """Arguments of a `Launched` method.

    rows:    [n, …] on the device, one for each row of the first step
    numbers: `Numbers`, which the method gets on the device, or what `TopNext.asked` returns
    fixed:   values of any kind; others are another computation
    """

    shape: ForwardShape
    rows: Tensor
    numbers: Sequence[Any] = ()
    fixed: tuple[Any, ...] = ()


def launched(method: Launched, call: Call) -> Tensor:
    """`Backend.launch` without a record."""
    numbers = [on_device(part, call.rows.device) for part in call.numbers]
    return method(call.shape.steps, call.shape.pool, call.rows, numbers, *call.fixed)


def on_device(numbers: Any, device: torch.device) -> Any:
    """`Numbers` on a device; other words of `TopNext.asked` as they are."""
    return numbers.on(device) if isinstance(numbers, Numbers) else numbers
