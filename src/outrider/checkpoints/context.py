"""Context length of a model from its config: its positions, extended by RoPE scaling as in vLLM.

Two scalings depend on the length of a text.  When a growing text changes the factors, transformers keeps K/V
of the old factors in its cache.  Here K/V is shared between requests, so an engine has one set of factors.
It is chosen by max_model_len:

    scaling     max_model_len up to `unscaled`      beyond it, up to `tokens`
    longrope    short factors, as transformers      long factors, as transformers for a text beyond `unscaled`
    dynamic     not scaled, as transformers         as transformers for a text of max_model_len tokens

The default of max_model_len is `unscaled`.  So output differs from transformers' only if a longer context is
requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# names of the context length
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
PRESCALED = ("gemma3",)  # model types whose max_position_embeddings includes the scaling
ALREADY = ("su", "longrope", "llama3")  # scalings for which max_position_embeddings always includes it


@dataclass(frozen=True)
class Context:
    """Context length of a model.

    tokens:   maximum tokens of a request
    unscaled: the same, or fewer where the scaling depends on the length of a text
    """

    tokens: int
    unscaled: int

    @staticmethod
    def of(config: Any) -> Context:
        """Context length from a transformers config."""
        length = next((found for name in LENGTHS if (found := getattr(config, name, None))), 2048)
        tokens = unscaled = length
        for rope in _ropes(config):
            kind, factor = rope.get("rope_type", "default"), rope.get("factor")
            original = rope.get("original_max_position_embeddings")
            if kind == "longrope":
                unscaled = min(unscaled, original or length)
            elif kind not in ALREADY and factor and not config.model_type.startswith(PRESCALED):
                tokens = int((original or length if kind == "yarn" else length) * factor)
                unscaled = length if kind == "dynamic" else tokens
        return Context(tokens, min(unscaled, tokens))


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """RoPE parameters: one set, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in given.values() if isinstance(rope, Mapping)]
    return nested or [given]
