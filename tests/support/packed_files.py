"""AWQ, GPTQ and compressed-tensors layers, packed by rules written a second time, naively."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: the i-th four bits of a word are output 8 * word + ORDER[i]

Layer = dict[str, Tensor]
Pack = Callable[
    [int, int, random.Random], tuple[Layer, Tensor]
]  # (outputs, inputs) -> tensors of a layer, its weight


def word(numbers: list[int], bits: int) -> int:
    """An int32 with the first number in its lowest bits."""
    whole = 0
    for i, number in enumerate(numbers):
        whole |= number << (bits * i)
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def draw(
    outputs: int, inputs: int, groups: int, bits: int, rng: random.Random
) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """values[o][k] and zeros[o][group], unsigned; scales float16 [outputs, groups]."""
    values = [[rng.randrange(1 << bits) for _ in range(inputs)] for _ in range(outputs)]
    zeros = [[rng.randrange(1 << bits) for _ in range(groups)] for _ in range(outputs)]
    scales = torch.tensor(
        [[rng.uniform(0.5, 1.5) * 2 / (1 << bits) / 2 for _ in range(groups)] for _ in range(outputs)]
    ).half()
    return values, zeros, scales


def meaning(values: list[list[int]], zeros: list[list[int]], scales: Tensor, index: list[int]) -> Tensor:
    weight = torch.empty(len(values), len(index))
    table = scales.tolist()
    for o, row in enumerate(values):
        for k, value in enumerate(row):
            weight[o, k] = table[o][index[k]] * (value - zeros[o][index[k]])
    return weight


def awq(group: int, zero_point: bool = True) -> Pack:
    def pack(outputs: int, inputs: int, rng: random.Random) -> tuple[Layer, Tensor]:
        size = group if group > 0 else inputs
        groups = inputs // size
        values, zeros, scales = draw(outputs, inputs, groups, 4, rng)
        zeros = zeros if zero_point else [[8] * groups for _ in zeros]

        def words(table: list[list[int]], rows: int) -> Tensor:
            return torch.tensor(
                [
                    [word([table[8 * c + ORDER[i]][r] for i in range(8)], 4) for c in range(outputs // 8)]
                    for r in range(rows)
                ]
            ).int()

        layer = {"qweight": words(values, inputs), "scales": scales.T.contiguous()}
        if zero_point:
            layer["qzeros"] = words(zeros, groups)
        return layer, meaning(values, zeros, scales, [k // size for k in range(inputs)])

    return pack


def gptq(
    bits: int, group: int, sym: bool = True, v2: bool = False, act_order: bool = False, index: bool = True
) -> Pack:
    def pack(outputs: int, inputs: int, rng: random.Random) -> tuple[Layer, Tensor]:
        size, per = group if group > 0 else inputs, 32 // bits
        groups = inputs // size
        values, zeros, scales = draw(outputs, inputs, groups, bits, rng)
        if sym:
            zeros = [[1 << (bits - 1)] * groups for _ in zeros]
        where = [k // size for k in range(inputs)]
        if act_order:
            rng.shuffle(where)
        stored = [[z if v2 else (z - 1) % (1 << bits) for z in row] for row in zeros]
        layer = {
            "qweight": torch.tensor(
                [
                    [word([values[o][r * per + i] for i in range(per)], bits) for o in range(outputs)]
                    for r in range(inputs // per)
                ]
            ).int(),
            "qzeros": torch.tensor(
                [
                    [word([stored[c * per + i][g] for i in range(per)], bits) for c in range(outputs // per)]
                    for g in range(groups)
                ]
            ).int(),
            "scales": scales.T.contiguous(),
        }
        if index:
            layer["g_idx"] = torch.tensor(where).int()
        return layer, meaning(values, zeros, scales, where)

    return pack


def compressed(bits: int, group: int, symmetric: bool = True, act_order: bool = False) -> Pack:
    def pack(outputs: int, inputs: int, rng: random.Random) -> tuple[Layer, Tensor]:
        size, per = group if group > 0 else inputs, 32 // bits
        groups = inputs // size
        values, zeros, scales = draw(outputs, inputs, groups, bits, rng)
        zeros = [[1 << (bits - 1)] * groups for _ in zeros] if symmetric else zeros
        where = [k // size for k in range(inputs)]
        layer = {
            "weight_packed": torch.tensor(
                [[word(values[o][c : c + per], bits) for c in range(0, inputs, per)] for o in range(outputs)]
            ).int(),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if act_order:
            rng.shuffle(where)
            layer["weight_g_idx"] = torch.tensor(where).int()
        if not symmetric:
            layer["weight_zero_point"] = torch.tensor(
                [
                    [
                        word([zeros[c + i][g] for i in range(min(per, outputs - c))], bits)
                        for g in range(groups)
                    ]
                    for c in range(0, outputs, per)
                ]
            ).int()
        return layer, meaning(values, zeros, layer["weight_scale"], where)

    return pack


def scaled(
    kind: torch.dtype, scales: tuple[int, int], name: str = "weight_scale", zeros: bool = False
) -> Pack:
    """Weights under their own names.  scales: outputs and inputs that share one; 0: all."""

    def pack(outputs: int, inputs: int, rng: random.Random) -> tuple[Layer, Tensor]:
        height, width = scales[0] or outputs, scales[1] or inputs
        table = [
            [rng.uniform(0.5, 1.5) / 256 for _ in range(-(-inputs // width))]
            for _ in range(-(-outputs // height))
        ]
        numbers = [[rng.uniform(-100, 100) for _ in range(inputs)] for _ in range(outputs)]
        values = torch.tensor(numbers).to(kind)
        shift = [rng.randrange(-5, 6) if zeros else 0 for _ in range(outputs)]
        weight = torch.empty(outputs, inputs)
        for o in range(outputs):
            for k in range(inputs):
                weight[o, k] = table[o // height][k // width] * (float(values[o, k]) - shift[o])
        found = torch.tensor(table)
        layer = {"weight": values, name: found.reshape(()) if scales == (0, 0) else found}
        if zeros:
            layer["weight_zero_point"] = torch.tensor(shift, dtype=torch.int8)[:, None]
        return layer, weight

    return pack


def groups_of(bits: int, group: int, **weights: Any) -> dict[str, Any]:
    size = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **size, **weights}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": groups_of(4, 32),
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
E4M3 = torch.float8_e4m3fn


def floats(**weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors in fp8, whose inputs are quantized while running."""
    groups = groups_of(8, -1, type="float", **weights)
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    return COMPRESSED | {"format": "float-quantized", "config_groups": groups}


FORMATS: dict[
    str, tuple[Pack, dict[str, Any], int | None]
] = {  # the last: bits that must be kept, None for expanded layers
    "awq": (awq(32), AWQ, 4),
    "awq-whole-rows": (awq(-1), AWQ | {"group_size": -1}, 4),
    "awq-symmetric": (awq(32, zero_point=False), AWQ | {"zero_point": False}, 4),
    "gptq": (gptq(4, 32), GPTQ, 4),
    "gptq-whole-rows": (gptq(4, -1), GPTQ | {"group_size": -1}, 4),
    "gptq-asymmetric": (gptq(4, 16, sym=False), GPTQ | {"group_size": 16, "sym": False}, 4),
    "gptq-v2": (gptq(4, 32, sym=False, v2=True), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, 4),
    "gptq-8": (gptq(8, 32, sym=False), GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq"}, 8),
    "gptq-no-index": (gptq(4, 32, index=False), GPTQ, 4),
    "gptq-act-order": (gptq(4, 32, sym=False, act_order=True), GPTQ | {"sym": False, "desc_act": True}, None),
    "compressed": (compressed(4, 32), COMPRESSED, 4),
    "compressed-8-channel": (compressed(8, -1), COMPRESSED | {"config_groups": groups_of(8, -1)}, 8),
    "compressed-asymmetric": (
        compressed(4, 32, symmetric=False),
        COMPRESSED | {"config_groups": groups_of(4, 32, symmetric=False)},
        4,
    ),
    "compressed-act-order": (
        compressed(4, 32, act_order=True),
        COMPRESSED | {"config_groups": groups_of(4, 32, actorder="group")},
        None,
    ),
    "fp8-blocks": (scaled(E4M3, (48, 40), "weight_scale_inv"), FP8 | {"weight_block_size": [48, 40]}, None),
    "fp8": (scaled(E4M3, (0, 0)), FP8, None),
    "compressed-fp8": (scaled(E4M3, (1, 0)), floats(), None),
    "compressed-fp8-whole": (scaled(E4M3, (0, 0)), floats(strategy="tensor"), None),
    "compressed-fp8-blocks": (
        scaled(E4M3, (32, 48)),
        floats(strategy="block", block_structure=[32, 48]),
        None,
    ),
    "compressed-int8": (
        scaled(torch.int8, (1, 0)),
        COMPRESSED | {"format": "int-quantized", "config_groups": groups_of(8, -1)},
        8,
    ),
    "compressed-int8-zeros": (
        scaled(torch.int8, (1, 0), zeros=True),
        COMPRESSED | {"format": "int-quantized", "config_groups": groups_of(8, -1, symmetric=False)},
        8,
    ),
}
