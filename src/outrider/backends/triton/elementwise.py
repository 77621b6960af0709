"""Norms, activations, caps, and rotary embedding that stores K and V.  One row, or a part, a program."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.launch import AttentionShape
from outrider.backends.triton.plan import Plan
from outrider.cache.pool import Pool


class Planes(NamedTuple):
    """K and V of a layer, and the same memory as float32 if they are int8.  Strides in numbers of `k`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
    head_stride: int
    slot_stride: int

    @staticmethod
    def of(pool: Pool, layer: int) -> Planes:
        keys, values = pool.data[layer, 0], pool.data[layer, 1]
        wide = torch.float32 if pool.dtype == torch.int8 else pool.dtype
        return Planes(keys, values, keys.view(wide), values.view(wide), keys.stride(1), keys.stride(0))


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap)."""
    return cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))


HEADS = 8  # of a row that one program of `_rope_store` computes
WIDTH = 1024  # numbers that one program of `_act_mul` and of `_soft_cap` computes


@triton.jit
def _rms_norm(x, weight, y, width, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """ADD: to what y holds, in place of being stored there."""
    at, i = tl.program_id(0).to(tl.int64) * width, tl.arange(0, WIDTH)
    mask = i < width
    wide = tl.load(x + at + i, mask=mask, other=0.0).to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(y.dtype.element_ty)
    factor = tl.load(weight + i, mask=mask, other=0.0).to(y.dtype.element_ty)
    normed = (scaled.to(tl.float32) * factor.to(tl.float32)).to(y.dtype.element_ty)
    if ADD:
        before = tl.load(y + at + i, mask=mask, other=0.0).to(tl.float32)
        normed = (before + normed.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + at + i, normed, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    _rms_norm[(x.numel() // width,)](x, weight, y, width, eps, ADD=False, WIDTH=triton.next_power_of_2(width))
    return y


def add_normed(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, h] plus the norm of y [n, h], in place."""
    assert x.is_contiguous()
    width = x.shape[1]
    _rms_norm[(len(x),)](y.contiguous(), weight, x, width, eps, ADD=True, WIDTH=triton.next_power_of_2(width))
    return x


@triton.jit
def _act_mul(
    x, y, inner, slope, limit, GELU: tl.constexpr, CLAMPED: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """SiLU is gate times the sigmoid of gate; GELU by tanh, times that of another polynomial of it.

    CLAMPED: as `LayerExperts.gate_limit` says
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = i < inner
    gate = tl.load(x + row * 2 * inner + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + i, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        through = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    elif CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        through = gate * slope
    else:
        through = gate
    act = (gate / (1.0 + tl.exp(-through))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * inner + i, (act * up).to(y.dtype.element_ty), mask=mask)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) · up [n, I] of x [n, 2I]."""
    return _activated(x)


def gelu_mul(x: Tensor) -> Tensor:
    """gelu(gate) · up [n, I] of x [n, 2I], GELU by tanh."""
    return _activated(x, gelu=True)


def clamped_mul(x: Tensor, slope: float, limit: float) -> Tensor:
    """What enters `down` [n, I] of an expert with a `gate_limit`, of x [n, 2I]."""
    return _activated(x, slope=slope, limit=limit)


def _activated(x: Tensor, gelu: bool = False, slope: float = 1.0, limit: float = 0.0) -> Tensor:
    x, inner = x.contiguous(), x.shape[1] // 2
    y = x.new_empty(x.shape[0], inner)
    _act_mul[(x.shape[0], triton.cdiv(inner, WIDTH))](
        x, y, inner, slope, limit, GELU=gelu, CLAMPED=limit != 0.0, WIDTH=WIDTH
    )
    return y


@triton.jit
def _soft_cap(x, width, cap, WIDTH: tl.constexpr):
    at, i = tl.program_id(0).to(tl.int64) * width, tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wide = tl.load(x + at + i, mask=i < width, other=0.0)
    tl.store(x + at + i, capped(wide, cap), mask=i < width)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`Backend.soft_cap`, in place."""
    x = x.contiguous()
    _soft_cap[(x.shape[0], triton.cdiv(x.shape[1], WIDTH))](x, x.shape[1], cap, WIDTH=WIDTH)
    return x


@triton.jit
def _normed(x, weight, scale, i, mask, like):
    """Entries i of heads x, times `scale` [TILE], times a weight, each rounded to the dtype of `like`."""
    dtype = like.dtype.element_ty
    factor = tl.load(weight + i, mask=mask, other=0.0).to(dtype).to(tl.float32)
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * factor[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _store(planes, scales, at, x, d, mask, D: tl.constexpr, INT8: tl.constexpr):
    """Store heads x [TILE, WIDTH] at `at` [TILE], in int8 with the scale behind each as `Pool.write` does."""
    if INT8:
        step = tl.max(tl.abs(x), 1) / 127
        x = (x / tl.maximum(step, 1e-30)[:, None] + 12582912.0) - 12582912.0  # to the nearest even number
        tl.store(scales + (at + (D + 31) // 32 * 32) // 4, step, mask=mask)
    to = planes + at[:, None] + d[None, :]
    tl.store(to, x.to(planes.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def _rope_store(
    qkv, q, kv, q_norm, k_norm, rotations, positions, slots, eps, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    INT8: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row, TILE of its heads: queries, then keys, then values."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    rotated, lower = d < 2 * HALF, d < HALF
    other = tl.where(rotated, tl.where(lower, d + HALF, d - HALF), d)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * D
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < D)[None, :]
    raw = tl.load(source + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x, partner = raw, tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale, in_d = tl.rsqrt(tl.sum(x * x, 1) / D + eps), d < D
        q_x, k_x = _normed(x, q_norm, scale, d, in_d, qkv), _normed(x, k_norm, scale, d, in_d, qkv)
        q_partner = _normed(partner, q_norm, scale, other, in_d, qkv)
        k_partner = _normed(partner, k_norm, scale, other, in_d, qkv)
        x, partner = tl.where(is_q[:, None], q_x, k_x), tl.where(is_q[:, None], q_partner, k_partner)
    if HALF > 0:
        table = rotations + tl.load(positions + row).to(tl.int64) * (2 * HALF) + tl.where(lower, d, d - HALF)
        cos = tl.load(table, mask=rotated, other=1.0)[None, :]
        sin = tl.load(table + HALF, mask=rotated, other=0.0)[None, :]
        x = x * cos + partner * tl.where(lower, -sin, sin)
    to_q = q + (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(to_q, x.to(q.dtype.element_ty), mask=is_q[:, None] & (d < D)[None, :])
    slot = tl.load(slots + row).to(tl.int64) + head * 0
    k_at = slot * kv.slot_stride + (head - HEADS).to(tl.int64) * kv.head_stride
    v_at = slot * kv.slot_stride + (head - HEADS - KV_HEADS).to(tl.int64) * kv.head_stride
    _store(kv.k, kv.k_scales, k_at, x, d, is_k & (slot >= 0), D, INT8)
    _store(kv.v, kv.v_scales, v_at, raw, d, is_v & (slot >= 0), D, INT8)


def rope_store(
    qkv: Tensor, spec: AttentionShape, rotations: Tensor, plan: Plan, pool: Pool, layer: int
) -> Tensor:
    """`Backend.rope_store`; returns q [N, H, D]."""
    n, d, heads, kv_heads = qkv.shape[0], spec.head_dim, spec.heads, spec.kv_heads
    q = qkv.new_empty(n, heads, d)
    norms = [qkv if norm is None else norm for norm in (spec.q_norm, spec.k_norm)]
    _rope_store[(n, triton.cdiv(heads + 2 * kv_heads, HEADS))](
        qkv.contiguous(), q, Planes.of(pool, layer), *norms, rotations.to(qkv.device), plan.positions,
        plan.slots, spec.eps, HEADS=heads, KV_HEADS=kv_heads, D=d, WIDTH=triton.next_power_of_2(d),
        HALF=rotations.shape[1] // 2, NORM=spec.q_norm is not None, INT8=pool.dtype == torch.int8, TILE=HEADS,
    )  # fmt: skip
    return q
