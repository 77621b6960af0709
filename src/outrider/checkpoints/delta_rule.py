"""Sizes of the gated delta rules that a hybrid has in place of attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.checkpoints.fields import HEAD_COUNT
from outrider.core.limits import MAX_STATE_DIM, MAX_TAPS
from outrider.core.validate import whole
from outrider.errors import ModelError

RECURRENT = "linear_attention"  # the kind of such layers in layer_types
SIZES = {
    "linear_num_key_heads": HEAD_COUNT,
    "linear_num_value_heads": HEAD_COUNT,
    "linear_key_head_dim": whole(1, MAX_STATE_DIM),
    "linear_value_head_dim": whole(1, 1 << 16),
    "linear_conv_kernel_dim": whole(2, MAX_TAPS),
}


@dataclass(frozen=True)
class DeltaRule:
    """Gated delta rules (`Recurrence.gated_delta`) behind a short convolution of queries, keys and values.

    key_dim, dim: dimensions of a head of queries and keys, and of one of values
    taps:         of the convolution
    layers[i]:    whether layer i has one in place of attention
    by_key_head:  the files have the outputs for q, k, v and z head of keys by head of keys (Qwen3-Next)
    """

    key_heads: int
    heads: int
    key_dim: int
    dim: int
    taps: int
    layers: tuple[bool, ...]
    by_key_head: bool = False

    @staticmethod
    def of(name: str, config: Any, kinds: Sequence[str]) -> DeltaRule | None:
        """None for a model without such layers.  Raises ModelError for one without others, or its sizes.

        name: of its class.  kinds: of every layer, as in layer_types.
        """
        layers = tuple(kind == RECURRENT for kind in kinds)
        if not any(layers):
            return None
        if all(layers):
            raise ModelError(
                f"{name} is not supported: all of its layers are recurrent, and Outrider needs at least one "
                "with attention."
            )
        sizes: dict[str, Any] = {key: getattr(config, key, None) for key in SIZES}
        for key, kind in SIZES.items():
            kind.check(sizes[key], f"{key} of {name}", ModelError)
        key_heads, heads, key_dim, dim, taps = sizes.values()
        if heads % key_heads:
            raise ModelError(
                f"{name} has {heads} heads of values (linear_num_value_heads) and {key_heads} of keys "
                "(linear_num_key_heads): the first must be a multiple of the second."
            )
        return DeltaRule(key_heads, heads, key_dim, dim, taps, layers, config.model_type == "qwen3_next")

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.dim

    @property
    def kept(self) -> int:
        """Numbers of one token that are kept until it is accepted: inputs of the convolution and of gates."""
        return self.channels + 2 * self.heads
