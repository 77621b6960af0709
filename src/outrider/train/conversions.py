"""Common parts of the conversions of heads between published layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, unknown
from outrider.heads.layouts import NESTED, flat

OF_A_LAYOUT = (  # keys of configs
    *NESTED, "quantization_config", "speculators_config", "speculators_model_type", "speculators_version",
    "transformer_layer_architecture", "fusion_bias", "layernorms",
)  # fmt: skip


def check_layout(layout: str, known: Collection[str]) -> None:
    """Raise ConfigError for an unknown layout."""
    if layout not in known:
        raise ConfigError(unknown("layout", layout, known))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config without what belongs to one layout, or to quantized weights."""
    return {key: value for key, value in flat(config).items() if key not in OF_A_LAYOUT}


def dense(head: Head) -> dict[str, Tensor]:
    """The tensors of a head, quantized ones in float32."""
    return {name: head.raw(name) for name in head}


def refuse(layout: str, what: list[str]) -> None:
    """Raise ConfigError if there is anything that a layout cannot hold."""
    if what:
        raise ConfigError(f"the layout {layout!r} cannot hold {', '.join(what)}, which this head has.")
