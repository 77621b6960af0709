"""Gated delta rules in GGUF files: their sizes in the metadata, and the order of their value heads.

A head of keys serves `per` heads of values.  A checkpoint has those of the first head of keys first, then
those of the second.  Files of Qwen3.5 have the first value head of every head of keys, then the second ones:

    head of keys   checkpoint: 0 0 0 1 1 1    file: 0 1 0 1 0 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.delta_rule import RECURRENT, DeltaRule
from outrider.checkpoints.fields import LAYER_COUNT
from outrider.checkpoints.gguf.file import GgufFile
from outrider.core.quantized import QuantizedWeight
from outrider.core.validate import whole
from outrider.errors import ModelError

INTERVAL = 4  # llama.cpp's default: every fourth layer has attention
AT = "linear_attn."
GATED_NORM = f"{AT}norm.weight"  # multiplies with its weight in every family
BEHIND_KEYS = ("in_proj_qkv.weight", "conv1d.weight")  # outputs: queries, keys, then heads of values
BY_VALUE = ("in_proj_z.weight",)  # outputs: heads of values
BY_HEAD = ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A")  # outputs: one a head


def delta_settings(file: GgufFile, layers: int) -> dict[str, Any]:
    """Arguments of the config's class.  layers: of the model."""
    LAYER_COUNT.check(layers, f"{file.path}: layers (block_count)", ModelError)
    heads, values = file.integer("ssm.time_step_rank"), file.integer("ssm.inner_size")
    if not heads or values % heads:
        raise ModelError(
            f"{file.path} is corrupt: ssm.inner_size {values} is no multiple of ssm.time_step_rank {heads}."
        )
    return {
        "linear_num_key_heads": file.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.integer("ssm.state_size"),
        "linear_value_head_dim": values // heads,
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "layer_types": [
            RECURRENT if recurrent else "full_attention" for recurrent in _recurrent(file, layers)
        ],
    }


def _recurrent(file: GgufFile, layers: int) -> list[bool]:
    """Whether a layer has a delta rule, for every layer."""
    key = "attention.recurrent_layers"
    listed = file.metadata.get(f"{file.architecture}.{key}")
    if listed is None:
        interval = file.integer("full_attention_interval", INTERVAL)
        whole(1, 1 << 16).check(interval, f"{file.path}: full_attention_interval", ModelError)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(type(one) is not bool for one in listed):
        raise ModelError(f"{file.path} is corrupt: {key} is no list of a flag for each of {layers} layers.")
    return listed[:layers]  # those behind are of prediction layers


def in_order(name: str, weight: Tensor | QuantizedWeight, rule: DeltaRule) -> Tensor | QuantizedWeight:
    """A tensor of a file of Qwen3.5 with the value heads in the order of a checkpoint."""
    _, at, part = name.partition(AT)
    if not at or rule.heads == rule.key_heads:
        return weight
    if part == "out_proj.weight":
        return _inputs(weight, _order(rule, rule.dim))
    if part in BEHIND_KEYS:
        queries_and_keys = torch.arange(2 * rule.key_heads * rule.key_dim)
        values = len(queries_and_keys) + _order(rule, rule.dim)
        return outputs(weight, torch.cat([queries_and_keys, values]))
    if part in BY_VALUE:
        return outputs(weight, _order(rule, rule.dim))
    return outputs(weight, _order(rule, 1)) if part in BY_HEAD else weight


def _order(rule: DeltaRule, size: int) -> Tensor:
    """Where the file has the numbers of value heads, `size` a head."""
    stored = torch.arange(rule.heads * size).view(rule.heads // rule.key_heads, rule.key_heads, size)
    return stored.transpose(0, 1).flatten()


def outputs(weight: Tensor | QuantizedWeight, order: Tensor) -> Tensor | QuantizedWeight:
    """The weight with other outputs first."""
    if isinstance(weight, QuantizedWeight):
        return weight.mapped(lambda part: part[order])
    return weight[order]


def _inputs(weight: Tensor | QuantizedWeight, order: Tensor) -> Tensor | QuantizedWeight:
    """The weight with other inputs first; dense if that divides groups with a scale."""
    if not isinstance(weight, QuantizedWeight):
        return weight[:, order]
    groups = order.view(-1, weight.group)
    first = groups[:, :1]
    if not torch.equal(groups, first + torch.arange(weight.group)) or (first % weight.group).any():
        return weight.dense()[:, order]
    whole_groups = first.flatten() // weight.group
    columns = {weight.values.shape[1]: order, weight.scales.shape[1]: whole_groups}
    return weight.mapped(lambda part: part[:, columns[part.shape[1]]])
