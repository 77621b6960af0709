"""The built-in target in the shape of a larger model, with the same texts and acceptance, for benchmarks.

    part                     dimensions of the built-in target       added
    residual stream          as in the checkpoint                    stay 0
    norms                    weights x sqrt(old / new width)         1
    q, k, gate               as in the checkpoint                    random
    v, up                    as in the checkpoint                    0 for the old inputs: outputs are 0
    o, down                  as in the checkpoint                    0 for the old inputs, else random
    layers behind the last   random, but for v and up, so that attention and MLP give 0

RMSNorm divides by the mean over the new width, so the factor and a smaller epsilon restore its output.
Nearly all added weights are random, and the zeros compute as well: a forward costs what the larger model
costs.  Sums of more terms may be rounded otherwise, so logits differ by some units in the last place.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from outrider.checkpoints.grown import LAYER, SPREAD
from outrider.checkpoints.heads import Head
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import Facts, Spec
from outrider.checkpoints.weights import Source, write_tensors
from outrider.core.quantized import QuantizedWeight
from outrider.heads.base import FINGERPRINT

# Keys of a config.  The built-in target has heads of 64; in number of weights this is Llama 3's 8 B.
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 64, "num_key_value_heads": 16}  # fmt: skip
# What the outputs and the inputs of a linear are.
SIDES = {
    "q_proj": ("heads", "residual"), "k_proj": ("kv_heads", "residual"), "v_proj": ("kv_heads", "residual"),
    "o_proj": ("residual", "heads"), "gate_proj": ("inner", "residual"), "up_proj": ("inner", "residual"),
    "down_proj": ("residual", "inner"),
}  # fmt: skip
SILENT, INTO_RESIDUAL = ("v_proj", "up_proj"), ("o_proj", "down_proj")


@dataclass(frozen=True)
class WideCheckpoint(Checkpoint):
    """original: the checkpoint whose weights it contains.  device: where the added ones are drawn."""

    original: Checkpoint | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def tensors(self) -> Source:
        assert self.original is not None and isinstance(self.spec, Spec)
        return WideTensors(self.original, self.spec, self.device)


def widened(name: str, sizes: Mapping[str, int], device: torch.device) -> WideCheckpoint:
    """The Llama `name` with these sizes, none of them smaller, under the name `name`-wide."""
    original = Checkpoint.open(name)
    config = copy.deepcopy(original.config)
    vars(config).update(sizes)
    config.rms_norm_eps *= original.spec.hidden / sizes["hidden_size"]
    given = {each.name: getattr(original, each.name) for each in fields(Checkpoint)}
    changed = {"name": f"{name}-wide", "config": config, "spec": Facts.of(config), "scheme": None}
    return WideCheckpoint(**{**given, **changed}, original=original, device=device)


class WideTensors:
    """The tensors of a widened checkpoint (`Source`), dense: bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, original: Checkpoint, spec: Spec, device: torch.device) -> None:
        assert isinstance(original.spec, Spec) and original.spec.tied and not original.spec.qk_norm
        self.small, self.narrow, self.spec, self.device = original.tensors(), original.spec, spec, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.old = {part: index.to(device) for part, index in old_dimensions(original.spec, spec).items()}

    def __contains__(self, name: str) -> bool:
        return not self._added(name) and name in self.small

    def get(self, name: str, *shape: int) -> Tensor:
        norm = torch.ones(shape)
        if not self._added(name):
            width = self.narrow.hidden
            norm[:width] = self.small.get(name, width).float() * (width / self.spec.hidden) ** 0.5
        return norm

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor:
        kind = name.rpartition(".")[2]
        if kind == "embed_tokens":
            weight = torch.zeros(outputs, inputs, dtype=self.dtype, device=self.device)
            weight[:, : self.narrow.hidden] = self._original(name, outputs, self.narrow.hidden)
            return weight
        generator = torch.Generator(self.device).manual_seed(sum(name.encode()))
        weight = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        weight.normal_(std=SPREAD, generator=generator)
        rows, columns = (self.old[side] for side in SIDES[kind])
        added = self._added(name)
        if kind in SILENT or (kind in INTO_RESIDUAL and not added):
            weight[:, columns] = 0
        if kind == "o_proj" and not added:  # added heads on an old K/V head have values, too
            weight[:, : inputs // self.spec.kv_heads * self.narrow.kv_heads] = 0
        if not added:
            weight[rows[:, None], columns] = self._original(name, len(rows), len(columns))
        return weight

    def _original(self, name: str, outputs: int, inputs: int) -> Tensor:
        return dense(self.small.linear(name, outputs, inputs)).to(self.device, self.dtype)

    def _added(self, name: str) -> bool:
        found = LAYER.match(name)
        return found is not None and int(found[1]) >= self.narrow.layers


def old_dimensions(narrow: Spec, wide: Spec) -> dict[str, Tensor]:
    """int64 [n] of every side of a linear: where the dimensions of the narrow model are in the wide one.

    A head stays with its K/V head, whose group may become larger.
    """
    group, more = narrow.heads // narrow.kv_heads, wide.heads // wide.kv_heads
    assert narrow.head_dim == wide.head_dim and group <= more
    heads = torch.arange(narrow.heads)
    heads = heads // group * more + heads % group
    within = torch.arange(narrow.head_dim)
    return {
        "residual": torch.arange(narrow.hidden),
        "inner": torch.arange(narrow.inner),
        "heads": (heads[:, None] * narrow.head_dim + within).flatten(),
        "kv_heads": torch.arange(narrow.kv_heads * narrow.head_dim),
    }


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def widened_eagle3(name: str, target: WideCheckpoint, folder: Path) -> str:
    """The EAGLE-3 head `name` of a target for the widened one, in a folder, whose path is returned.

    The head keeps its width.  Its fc ignores the added dimensions of the states, and it gets an embedding.
    """
    head, original = Head.open(name), target.original
    assert original is not None
    tensors = {stored: dense(head.tensors.weight(stored)) for stored in head}
    fc, width = tensors["fc.weight"], original.spec.hidden
    states = fc.view(len(fc), -1, width)
    padded = fc.new_zeros(len(fc), states.shape[1], target.spec.hidden)
    padded[:, :, :width] = states
    tensors["fc.weight"] = padded.flatten(1)
    embedding = original.tensors().linear("model.embed_tokens", original.spec.vocabulary, width)
    tensors["embed_tokens.weight"] = dense(embedding)
    config = {**head.config, "target_hidden_size": target.spec.hidden}
    config.pop("quantization_config", None)
    config.pop(FINGERPRINT, None)
    write_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@contextmanager
def opened_as(name: str, checkpoint: Checkpoint) -> Iterator[str]:
    """Makes `checkpoint` the one that is opened by this name."""
    open_other = Checkpoint.open

    def open_any(given: str, *options: Any) -> Checkpoint:
        return replace(checkpoint, name=name) if given == name else open_other(given, *options)

    with mock.patch.object(Checkpoint, "open", staticmethod(open_any)):
        yield name
