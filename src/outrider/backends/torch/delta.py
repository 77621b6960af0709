"""A gated delta rule of a decoder layer, in the operations of a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.base import Backend, LayerKV
from outrider.backends.layer import LayerDelta
from outrider.backends.recurrent_path import RecurrentPath, path_of


def outputs(backend: Backend, u: Tensor, layer: LayerDelta, kv: LayerKV) -> Tensor:
    """What enters `o`, [n, heads · dim], of the layer's input u [n, hidden].

    kv: with the layer's place among the recurrent ones.  Of a pool the states are those of the convolution
    and of the delta rule of each such layer.
    """
    pool, place = kv.pool.states, kv.layer
    assert pool is not None, "the pool of a model with recurrent layers"
    rows, ops = kv.step_input.derived(RecurrentPath, path_of), backend.recurrence
    mixed, channels, heads = backend.linear(u, layer.qkvz), layer.channels, layer.heads
    pool.grow(rows.path.num_slots)
    own = [mixed[:, :channels], backend.linear(u, layer.gates)]
    qkv, gates = rows.with_replays(own, pool, 2 * place)
    qkv = ops.short_conv(qkv, layer.taps, None, "silu", rows.path, pool.states[2 * place])
    keys = layer.key_heads * layer.key_dim
    q, k, v = torch.split(qkv, [keys, keys, heads * layer.dim], dim=1)
    q, k = (part.view(len(qkv), layer.key_heads, layer.key_dim) for part in (q, k))
    beta, decay = ops.sigmoid(gates[:, :heads]), ops.softplus(gates[:, heads:], layer.bias) * layer.rates
    v, states = v.view(len(qkv), heads, layer.dim), pool.states[2 * place + 1]
    found = ops.gated_delta(q, k, v, decay, beta, rows.path, states)[len(rows.replayed) :]
    return ops.gated_norm(found.flatten(1), mixed[:, channels:], layer.norm, layer.eps, group=layer.dim)
