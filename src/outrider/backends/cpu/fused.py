"""A whole model in one C call (fused.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain, Chains, LayerKV
from outrider.backends.cpu import lora, structs
from outrider.backends.cpu.bindings import STRUCTS
from outrider.backends.cpu.packing import KINDS, Packed
from outrider.backends.cpu.recurrent_rows import attach
from outrider.backends.cpu.rules import TreeQueries
from outrider.backends.cpu.structs import address
from outrider.core.lora import Runs
from outrider.core.stop_rule import NUM_FEATURES, Chained, NodeFeatures

KEPT_LOGITS = 1 << 24  # bytes
CHAIN = structs.packer("Chain")


@dataclass
class Stack:
    """Blocks as C structs, and the tensors that these point into."""

    layers: ctypes.Array[Any]  # Layer of kernels.h
    shape: Any  # ModelShape
    alive: object


@dataclass
class Ends:
    """Embedding, last norm and head as a C struct, and the tensors that it points into."""

    c: Any  # ModelEnds of kernels.h
    alive: object


class Logits(NamedTuple):
    """Memory for logits, and its address: to ask a tensor for it takes 10 µs right behind a forward."""

    tensor: Tensor
    shape: tuple[int, int]
    at: int

    @staticmethod
    def of(tensor: Tensor) -> Logits:
        return Logits(tensor, (tensor.shape[0], tensor.shape[1]), tensor.data_ptr())


class CpuFusedModel:
    """`FusedModel` by fused.c."""

    has_recurrent = True

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self._buffer = torch.empty(0, 0)  # for logits, used again
        self._logits = Logits.of(self._buffer)  # the part of the last call

    def pack_ends(
        self, embedding: Packed, norm: Tensor, head: Packed, scale: float = 1.0, cap: float = 0.0
    ) -> Ends:
        c = STRUCTS["ModelEnds"](embedding.c, head.c, norm.data_ptr(), head.outputs, scale, cap)
        return Ends(c, (embedding, norm, head))

    def forward(
        self, stack: Stack, ends: Ends, kv: LayerKV, states: dict[int, Tensor], queries: Any, runs: Runs = ()
    ) -> Tensor:
        rows, adapters = array("q", kv.step_input.logits_rows), lora.rows(runs) if runs else None
        num_rows = len(rows)
        taps = _taps(stack.shape, kv.step_input.length, states) if states else None
        logits = self._room(num_rows, ends.c.outputs)
        wanted = taps, rows.buffer_info()[0], num_rows, logits.at
        trees = TreeQueries() if queries is None else queries
        self.lib.read_model(*_model(stack, ends, kv, adapters), *wanted, *trees.prepare())
        return logits.tensor

    def _room(self, rows: int, outputs: int) -> Logits:
        """Buffer for logits, a part of that of earlier calls if possible.

        Allocating one takes 40 µs right after a forward, and its memory is written for the first time.
        """
        if self._logits.shape == (rows, outputs):
            return self._logits
        if len(self._buffer) < rows or self._buffer.shape[1] != outputs:
            buffer = torch.empty(rows, outputs)
            if buffer.nbytes > KEPT_LOGITS:
                return Logits.of(buffer)
            self._buffer = buffer
        self._logits = Logits.of(self._buffer[:rows])
        return self._logits

    def extends(self, chains: Chains) -> bool:
        """Not chains whose distributions are for a device: C writes to their addresses."""
        for chain in chains.chains:  # no generator: each item would be a call
            if chain.probs is not None and chain.probs.device.type != "cpu":
                return False
        return True

    def draft_chain(self, stack: Stack, ends: Ends, kv: LayerKV, chains: Chains) -> Chained:
        several, vocabulary, stop_rule, states, _ = chains
        levels = max([chain.levels for chain in several])
        tokens = array("i", bytes(4 * levels * len(several)))
        features = array("f", bytes(0 if stop_rule is None else 4 * NUM_FEATURES * len(tokens)))
        asked = _chains(several), len(several), levels, vocabulary, structs.stop_rule(stop_rule)
        found = tokens.buffer_info()[0], features.buffer_info()[0], address(states)
        self.lib.chain(*_model(stack, ends, kv), *asked, *found)
        return _chained(tokens, features, levels)


def _model(
    stack: Stack, ends: Ends, kv: LayerKV, adapters: ctypes.Array[Any] | None = None
) -> tuple[Any, ...]:
    """A model and a step, as the functions of fused.c take them first."""
    step_input, pool, _ = kv
    stack.shape.kv_kind, view = KINDS[pool.dtype], structs.view(step_input)
    rows, keys = view.with_adapters(adapters), structs.keys_of(pool)
    if pool.states is not None:
        attach(rows, step_input, pool.states)
    return stack.shape, stack.layers, ends.c, rows, view.input_ids, keys, pool.plane_bytes


def _chains(chains: Sequence[Chain]) -> bytes:
    packed = b""
    for chain in chains:
        at, levels, (temperature, min_p, top_k, top_p), stream, floor, probs, first_node, joint_floor = chain
        out, width = (0, 0) if probs is None else (probs.data_ptr(), probs.shape[1])
        sampling = top_k, min_p, top_p, joint_floor, stream, out, width, first_node, temperature
        packed += CHAIN.pack(at, levels, *sampling, floor)
    return packed


def _chained(tokens: array[int], features: array[float], levels: int) -> Chained:
    """Tokens [chains, levels], -1 after the end of a chain; features [chains, levels, NUM_FEATURES].

    The features may be empty.
    """
    chains: list[list[int]] = []
    found: list[list[NodeFeatures]] = []
    for first in range(0, len(tokens), levels):
        chain = tokens[first : first + levels].tolist()
        chains.append(chain[: chain.index(-1)] if chain[-1] < 0 else chain)
        if features:
            nodes = range(first, first + len(chains[-1]))
            found.append([features[n * NUM_FEATURES : (n + 1) * NUM_FEATURES].tolist() for n in nodes])
    return chains, found


def _taps(shape: Any, rows: int, states: dict[int, Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Allocate `states`, [rows, h] each; returns their addresses by layer.

    The address of the last norm (FINAL, -1) is at the end.
    """
    taps: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * (shape.layers + 2))()
    for layer in states:
        states[layer] = torch.empty(rows, shape.hidden)
        taps[layer] = states[layer].data_ptr()
    return taps
