"""Interface of the recurrent layers of hybrid models: their memory is a state per request, not K/V.

A *slot* holds the states of one request.  The rows of a forward form a forest: each row follows the row of
the token before it, or the state in the slot of its request.  Draft trees and the accepted nodes that a step
replays in front of its known tokens are such rows.

        slot 5 ─── 0 ── 1 ── 2 ─┬─ 3 ── 4         rows 0 … 2 are known tokens, row 2 is saved
                                └─ 5              parent = -1 0 1 2 3 2

The state after a row is a function of the inputs on its path, computed token after token by one fixed
sequence of float32 operations.  On a backend with `exact`, a row's result is therefore the same, bit for bit,
for a chunk, for one token and for a node of a tree, beside any other rows and on any number of threads.

Shapes: N rows, S slots, C channels, K taps of a convolution, H heads, P dimensions of a head, n of a state.
Inputs are float32 or bfloat16, and the result has the dtype of the first one.  Rows may lie apart (views of
columns of a wider tensor), the elements of a row are contiguous.  States are float32 and contiguous.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
NO_COPIES: Mapping[int, int] = {}
Activation = Literal["silu", "sigmoid"]


class Path:
    """The rows of a recurrent forward, in an order in which a row comes after its parent.

    parent: int32 [N], row of the token before; -1: the row follows the state in its slot
    slot:   int32 [N], slot of the row's request, the same along a path
    save:   int32 [N], 1 if the state after this row is written to its slot; at most one row of a slot
    fresh:  slots without a state yet, which are read as zeros
    copy:   int32 [N], another slot that the state after this row is written to, or -1: a slot of no row of
            the path, and of one copy only

    Every function reads all stored states before it writes one.  The same path serves all layers of a step.
    Raises ValueError if a parent is not an earlier row of the same slot, or if a slot is saved twice.
    copies: row -> slot
    """

    __slots__ = ("_derived", "copy", "fresh", "num_slots", "parent", "save", "slot")

    def __init__(
        self,
        parent: Iterable[int],
        slot: Iterable[int],
        save: Iterable[int],
        fresh: Collection[int] = (),
        copies: Mapping[int, int] = NO_COPIES,
    ) -> None:
        self.parent, self.slot, self.save = array("i", parent), array("i", slot), array("i", save)
        self.fresh = frozenset(fresh)
        self.copy = array("i", [-1]) * len(self.parent)
        # that the states must have at least
        self.num_slots = max(max(self.slot, default=-1), max(copies.values(), default=-1)) + 1
        self._derived: dict[object, Any] = {}
        if not len(self.parent) == len(self.slot) == len(self.save):
            raise ValueError("parent, slot and save must have one entry per row.")
        saved = set()
        for row, (before, own, is_saved) in enumerate(zip(self.parent, self.slot, self.save)):
            if not -1 <= before < row or own < 0 or (before >= 0 and self.slot[before] != own):
                raise ValueError(f"row {row} of slot {own} cannot follow row {before}.")
            if is_saved and own in saved:
                raise ValueError(f"slot {own} is saved twice.")
            if is_saved:
                saved.add(own)
        written = set(self.slot)
        for row, copied in copies.items():
            if copied in written or copied < 0:
                raise ValueError(f"slot {copied} of a copy is that of a row, or of another copy.")
            written.add(copied)
            self.copy[row] = copied

    def __len__(self) -> int:
        return len(self.parent)

    def derived(self, key: object, make: Callable[[Path], T]) -> T:
        """What `make` derives from this path, made once for each key."""
        if key not in self._derived:
            self._derived[key] = make(self)
        return cast(T, self._derived[key])


class Recurrence(Protocol):
    """The recurrences of hybrid models, and the small functions around them."""

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Literal["silu"] | None,
        path: Path,
        tails: Tensor,
    ) -> Tensor:
        """Causal depthwise convolution [N, C] of x [N, C] along the path.

        weight: float32 [K, C], the oldest tap first: a checkpoint's [C, 1, K], transposed and contiguous
        bias:   float32 [C]
        tails:  float32 [S, K-1, C], the inputs before the path, the oldest first.  Updated for saved rows.
        Computed: bias, or 0, plus the products of the taps, the oldest first; then the activation.
        """

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        """Gated delta rule [N, Hv, Dv] of q, k [N, Hk, Dk], v [N, Hv, Dv] (DeltaNet, arXiv:2412.06464).

        Value head h reads head h // (Hv / Hk) of q and k.
        g:      float32 [N, Hv], logarithm of the decay, or [N, Hv, Dk]: one of every dimension (Kimi Linear)
        beta:   float32 [N, Hv], rate at which the state learns
        states: float32 [S, Hv, Dv, Dk], the transpose of transformers'.  Updated for saved rows.
        Computed, with k / |k|, and q / |q| / sqrt(Dk), |x|² = sum x² + 1e-6:

            S ← exp(g) S;    S ← S + beta (v - S k) kᵀ;    out = S q
        """

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        """State space model [N, H, P] of x [N, H, P] (Mamba2, arXiv:2405.21060).

        Head h reads group h // (H / G) of b and c [N, G, n].
        dt:     float32 [N, H], step sizes, after the softplus
        a:      float32 [H], negative, or [H, n]: one of every dimension (Mamba, arXiv:2312.00752, which has
                a head of P = 1 for each channel)
        d:      float32 [H], factor of the inputs that are added to the output
        states: float32 [S, H, P, n].  Updated for saved rows.
        Computed:

            S ← exp(dt a) S + (dt x) bᵀ;    out = S c + d x
        """

    # ---- functions of rows, here because torch's own have other bits at the end of a tensor

    def sigmoid(self, x: Tensor) -> Tensor:
        """Sigmoid of x [N, W], float32."""

    def softplus(self, x: Tensor, bias: Tensor, low: float = 0.0, high: float = float("inf")) -> Tensor:
        """log(1 + exp(x + bias)) of x [N, W] and bias float32 [W], clamped to [low, high]; float32."""

    def gate(self, x: Tensor, z: Tensor, activation: Activation) -> Tensor:
        """x · activation(z), [N, W]."""

    def gated_norm(
        self,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        activation: Activation = "silu",
        group: int = 0,
        gate_first: bool = False,
    ) -> Tensor:
        """norm(x) · activation(z), or norm(x · activation(z)) with `gate_first`, of x and z [..., W].

        weight: float32 [W].  RMS norm of each `group` elements, by default of all W.
        """
