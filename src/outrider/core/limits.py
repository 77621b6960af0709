"""Limits of the kernels, checked before anything is allocated."""

from __future__ import annotations

from outrider.errors import ModelError

MAX_HEAD_DIM = 512  # dimensions of an attention head; the C kernels are compiled with it
MAX_EXPERTS = 1024  # of a layer, as in experts.h
# Of the last dimension of a recurrent state.  The kernels' scratch memory grows with it, by a few KB for
# each, and they abort the process if they get none.
MAX_STATE_DIM = 512
MAX_TAPS = 64  # of a short convolution


def check_attention(where: str, heads: int, kv_heads: int, head_dim: int, rotated: int = 0) -> None:
    """Check the shape of an attention layer.  Raises ModelError if the kernels do not support it.

    rotated: number of rotated dimensions of a head.
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(
            f"{where} has {heads} attention heads (num_attention_heads) and {kv_heads} K/V heads "
            "(num_key_value_heads): the first must be a multiple of the second."
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ModelError(
            f"{where} has heads of {head_dim} dimensions (head_dim); the kernels take 1 to {MAX_HEAD_DIM}."
        )
    if rotated > head_dim or rotated % 2:
        raise ModelError(
            f"{where} has heads of {head_dim} dimensions (head_dim), of which {rotated} would be rotated: "
            "an even number of at most all of them is needed."
        )
