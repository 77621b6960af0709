"""DFlash 2: a block (heads/blocks.py) with convolutions along it, and a choice among the best candidates.

    u = norm(x);  c = kernel_projection u + base_kernel      coefficients of a sublayer's two convolutions
    x += conv(attention(conv(u)));  the same around the MLP

    conv     c_0 * v of the row + c_1 * v of the row before it in its block, each for groups of columns
    select   of the `selector_top_k` likeliest tokens at a place the one with the highest
             logit + (before[token before] * gate x) · after[token]

Published files are a block's in z-lab's format, with these tensors, and the sizes in dflash_config:

    layers.{i}.{attention,mlp}_conv.base_kernel [2, taps, h], .kernel_projection [2 · taps · groups, h]
    candidate_selector.hidden_projection [rank, h], .predecessor_codebook, .successor_codebook [V, rank]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.backends.base import LayerKV, Scores
from outrider.checkpoints.heads import Head
from outrider.core.device import to_device
from outrider.core.step_input import StepInput
from outrider.core.validate import whole
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.block_layouts import block_format
from outrider.heads.block_parts import BlockLayer, BlockNetwork
from outrider.heads.blocks import BlockDrafter, BlockOptions
from outrider.heads.corrections import Correction, CorrectionOutput
from outrider.heads.outer import embed
from outrider.heads.reader import Reader
from outrider.models.rowwise import by_rows

ARCHITECTURE, TYPE = "DFlash2DraftModel", "dflash2"
CONV, SELECTOR = r"(attention|mlp)_conv\.", r"candidate_selector\."  # in names of its tensors
GROUP, TOP_K = 16, 16  # columns with one coefficient, and candidates, of published files


def _refused(head: Head) -> str:
    if not head.config.get("rope_is_neox_style", True):
        return "it rotates its heads in neighbouring pairs (rope_is_neox_style false)"
    return "it has a vocabulary of its own (d2t)" if "d2t" in head else ""


FORMAT = block_format(
    f"{TYPE}|{ARCHITECTURE}",
    rows=(
        ("candidate_selector.hidden_projection.weight", "selector.gate.weight"),
        ("candidate_selector.predecessor_codebook", "selector.before.weight"),
        ("candidate_selector.successor_codebook", "selector.after.weight"),
    ),
    known=r"selector\.(gate|before|after)\.weight|"
    rf"layers\.\d+\.{CONV}(base_kernel|kernel_projection\.weight)",
    refused=_refused,
)


class DynamicConv(nn.Module):
    """The two convolutions of a sublayer, for training; at first the identity."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, u: Tensor) -> Tensor:
        """Coefficients [2, taps, n, hidden] of both sides, from the sublayer's input [n, hidden]."""
        return spread(self.kernel_projection(u), self.base_kernel, self.group)


def spread(projected: Tensor, base: Tensor, group: int) -> Tensor:
    """Coefficients [2, taps, n, h]: projected [n, 2 · taps · groups], one for a group, plus the base."""
    sides, taps, hidden = base.shape
    groups = projected.view(len(projected), sides, taps, hidden // group)
    return (groups.repeat_interleave(group, dim=-1) + base).permute(1, 2, 0, 3)


def convolve(x: Tensor, coefficients: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """x [n, h] mixed with earlier rows.  coefficients [taps, n, h].

    earlier: for each tap but the first int64 [n], the row to mix with, and n where the block has none
    """
    padded = F.pad(x, (0, 0, 0, 1))
    mixed = coefficients[0] * x
    for rows, own in zip(earlier, coefficients[1:]):
        mixed = mixed + own * padded[rows]
    return mixed.to(x.dtype)


def earlier_rows(lengths: Sequence[int], taps: int) -> list[Tensor]:
    """The rows that `convolve` mixes with, on the host.  lengths: rows of each block."""
    count, found = sum(lengths), list[Tensor]()
    within = torch.cat([torch.arange(length) for length in lengths])
    for distance in range(1, taps):
        found.append(torch.where(within >= distance, torch.arange(count) - distance, count))
    return found


class ConvLayer(BlockLayer):
    """A layer with convolutions around its sublayers.  block: rows of a block."""

    def __init__(self, sizes: Any, block: int, taps: int, group: int) -> None:
        super().__init__(sizes, qk_norm=True)
        self.block, self.taps = block, taps
        self.attention_conv = DynamicConv(sizes.hidden, taps, group)
        self.mlp_conv = DynamicConv(sizes.hidden, taps, group)

    def read(self, x: Tensor, context: Tensor, blocks: Any) -> Tensor:
        assert self.mlp is not None
        rows = earlier_rows([self.block] * (len(x) // self.block), self.taps)
        earlier = [to_device(part, x.device) for part in rows]
        u = self.input_layernorm(x)
        before, after = self.attention_conv(u)
        x = x + convolve(self.attend(convolve(u, before, earlier), context, blocks), after, earlier)
        u = self.post_attention_layernorm(x)
        before, after = self.mlp_conv(u)
        return x + convolve(self.mlp(convolve(u, before, earlier)), after, earlier)


class CandidateSelector(nn.Module):
    """Score of a token after another, by a place's state; at first 0."""

    def __init__(self, hidden: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        """[…, V] of the tokens before each place […], and the states […, h]."""
        gated: Tensor = self.predecessor_codebook[before] * self.hidden_projection(x)
        return gated @ self.successor_codebook.T


class Network(BlockNetwork):
    """Network for training, with the published names.  Its selector judges all tokens, not candidates."""

    def __init__(self, *block: Any, rank: int, top_k: int = TOP_K, kernel: int = 2, **options: Any) -> None:
        """block, options: as of `BlockNetwork`.  rank, top_k: of the selector.  kernel: taps of the
        convolutions."""
        super().__init__(*block, **options)
        hidden, count = self.sizes.hidden, len(self.layers)
        self.rank, self.top_k, self.kernel, self.group = rank, top_k, kernel, math.gcd(GROUP, hidden)
        layers = [ConvLayer(self.sizes, self.block, kernel, self.group) for _ in range(count)]
        self.layers = nn.ModuleList(layers)
        self.candidate_selector = CandidateSelector(hidden, self.vocabulary, rank)

    def config(self) -> dict[str, Any]:
        own = {
            "block_size": self.block,
            "mask_token_id": self.mask,
            "target_layer_ids": [tap - 1 for tap in self.taps],
            "conv_kernel_size": self.kernel,
            "conv_group_size": self.group,
            "selector_rank": self.rank,
            "selector_top_k": self.top_k,
        }
        outer = {"architectures": [ARCHITECTURE], "is_causal": False, "dflash_config": own}
        return {**self.layer_config(), **outer}

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return logits + self.candidate_selector(before, x), None


class Conv:
    """`DynamicConv` on the target's kernels."""

    def __init__(self, reader: Reader, name: str, hidden: int, group: int) -> None:
        head, self.backend, self.group = reader.head, reader.backend, group
        shape = head.shape(f"{name}.base_kernel")
        taps = max(1, shape[1]) if len(shape) == 3 else 1  # `get` refuses other shapes
        base = head.get(f"{name}.base_kernel", 2, taps, hidden)
        self.base, self.taps = base.float().to(reader.backend.device), taps
        outputs = 2 * taps * (hidden // group)
        self.projection = reader.linear(f"{name}.kernel_projection", outputs, hidden)

    def __call__(self, u: Tensor) -> Tensor:
        return spread(self.backend.linear(u, self.projection).float(), self.base, self.group)


class Selector(Correction):
    """The choice among candidates, as logits: others than the candidates have none."""

    def __init__(self, reader: Reader, target: Target, hidden: int, top_k: int) -> None:
        self.model, self.backend, self.top_k = target.decoder, reader.backend, top_k
        self.vocabulary = vocabulary = target.vocabulary
        rows, rank = reader.matrix_shape("selector.before.weight")
        if rows < vocabulary:
            raise reader.head.misfit(f"its selector has {rows} tokens, and the target has {vocabulary}")
        self.gate = reader.linear("selector.gate", rank, hidden)
        self.before = reader.outer.linear("selector.before", rows, rank)
        self.after = reader.outer.linear("selector.after", rows, rank)

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        return before.new_zeros(len(tokens), 0)

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor, logits: Tensor
    ) -> CorrectionOutput:
        known = logits[:, : self.vocabulary]  # an lm_head may be padded beyond the codebooks
        candidates = known.topk(min(self.top_k, known.shape[1]), dim=-1).indices
        gated = embed(self.model, tokens, self.before).float() * self.backend.linear(x, self.gate).float()
        after = (
            embed(self.model, candidates.flatten().tolist(), self.after).float().view(*candidates.shape, -1)
        )
        scores = (gated[:, None] * after).sum(-1)
        bias = torch.full_like(logits, float("-inf")).scatter_(1, candidates, scores)
        return CorrectionOutput(bias, state)


class DFlash2(BlockDrafter):
    FORMAT = FORMAT
    kind, tensors = TYPE, f"{CONV}|{SELECTOR}"
    Options = BlockOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        sizes = {"conv_group_size": GROUP, "selector_top_k": TOP_K}
        for key, usual in sizes.items():
            sizes[key] = self.head.config.get(key, usual)
            whole(1).check(sizes[key], f"{key} of {self.head.name!r}", ModelError)
        group = sizes["conv_group_size"]
        if self.width % group:
            raise self.head.misfit(
                f"its conv_group_size is {group}, which does not divide {self.width} columns"
            )
        self.convs = list[tuple[Conv, Conv]]()
        for i in range(len(self.layout.windows)):
            names = (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv")
            attention, mlp = (Conv(self.reader, name, self.width, group) for name in names)
            self.convs.append((attention, mlp))
        self.correction = Selector(self.reader, target, self.width, sizes["selector_top_k"])

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a tree of 8."""
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, block=5, rank=8))

    def through_layers(self, x: Tensor, inputs: dict[bool, StepInput], lengths: Sequence[int]) -> Tensor:
        taps = max(conv.taps for convs in self.convs for conv in convs)
        earlier = [to_device(rows, x.device) for rows in earlier_rows(lengths, taps)]
        for i, causal in enumerate(self.layout.causal):
            x = self._layer(i, x, inputs[causal], earlier)
        return x

    def _layer(self, i: int, x: Tensor, step_input: StepInput, earlier: Sequence[Tensor]) -> Tensor:
        """x [n, h] after layer i."""
        run, layer, kv = self.backend, self.stack.layers[i], LayerKV(step_input, self.pool, i)
        attention_conv, mlp_conv = self.convs[i]
        u = run.rms_norm(x, layer.norm_in, layer.eps)
        before, after = attention_conv(u)
        qkv = run.linear(convolve(u, before, earlier), layer.qkv)
        q = run.rope_store(qkv, layer, self.stack.rotations, kv)
        attended = run.attend(q, layer, kv, Scores(layer.scale, layer.window))
        x = x + convolve(run.linear(attended, layer.o), after, earlier)
        u = run.rms_norm(x, layer.norm_post, layer.eps)
        before, after = mlp_conv(u)
        gate, up = run.linear(convolve(u, before, earlier), layer.gate_up).chunk(2, dim=-1)
        inner = by_rows(F.silu, gate.contiguous()) * up
        return x + convolve(run.linear(inner, layer.down), after, earlier)
