"""Experts of Qwen3.5, which its files may have as one tensor of all experts of a layer.

    files                                             an expert e
    mlp.experts.gate_up_proj  [E, 2 I, K]             mlp.experts.e.gate_proj.weight  [I, K], then up_proj
    mlp.experts.down_proj     [E, K, I]               mlp.experts.e.down_proj.weight  [K, I]

gpt-oss has the same names, another layout, and routers of another name (joined_experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from outrider.checkpoints.weights import Weights
from outrider.errors import ModelError

STACKED = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj")
ROUTER = re.compile(r".*\.mlp\.gate\.weight")
OF_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether files have experts in this layout."""
    known = [*names]
    return any(map(STACKED.fullmatch, known)) and any(map(ROUTER.fullmatch, known))


class StackedExperts:
    """The tensors of such a checkpoint (`Source`), every expert by itself."""

    def __init__(self, files: Weights) -> None:
        self.files = files

    def __contains__(self, name: str) -> bool:
        expert = OF_EXPERT.fullmatch(name.removesuffix(".weight"))
        return name in self.files if expert is None else _stacked(expert) in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def get(self, name: str, *shape: int) -> Tensor:
        if OF_EXPERT.fullmatch(layer := name.removesuffix(".weight")) is None:
            return self.files.get(name, *shape)
        return self.linear(layer, *shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Raises ModelError if a tensor is missing, or of another shape or type."""
        if (expert := OF_EXPERT.fullmatch(name)) is None:
            return self.files.linear(name, outputs, inputs)
        stacked, number, part = _stacked(expert), int(expert[2]), expert[3]
        if stacked not in self.files:
            self.files.raw(stacked)  # raises
        stored, rows = self.files.shape(stacked), outputs if part == "down" else 2 * outputs
        if len(stored) != 3 or stored[1:] != (rows, inputs) or number >= stored[0]:
            raise ModelError(
                f"{stacked} has shape {stored}, the config asks for (more than {number}, {rows}, {inputs})."
            )
        entry = self.files.entry(stacked, number)
        if not entry.is_floating_point() or entry.dtype.itemsize < 2:
            raise ModelError(f"{stacked} is {entry.dtype}; only floating-point weights are supported there.")
        return entry[outputs:] if part == "up" else entry[:outputs]


def _stacked(expert: re.Match[str]) -> str:
    return f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj"
