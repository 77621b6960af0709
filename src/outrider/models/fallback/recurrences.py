"""transformers' functions for convolutions and recurrences, on the kernels of a backend.

Each takes the arguments of the function that it replaces, for one sequence: [1, …].  The rows of that
sequence are those of the step, whose parents are in the path of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from outrider.backends.recurrence import Path
from outrider.errors import ModelError
from outrider.models.fallback.recurrent import RecurrentCall

ACTIVATIONS: dict[str | None, Literal["silu"] | None] = {None: None, "silu": "silu", "swish": "silu"}


def short_conv(
    call: RecurrentCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """`causal_conv1d_fn`: x [1, C, n], weight [C, K], bias [C] -> [1, C, n]."""
    _refuse_tensors("causal_conv1d_fn", others)
    if activation not in ACTIVATIONS:
        raise ModelError(f"the activation {activation!r} of its convolutions is not supported.")
    chosen, kernels = ACTIVATIONS[activation], call.kernels
    taps, offset = call.constant(lambda: (weight.detach().float().T.contiguous(), _float(bias)))

    def run(x: Tensor, path: Path, tails: Tensor) -> Tensor:
        return kernels.short_conv(x, taps, offset, chosen, path, tails)

    out = call.run(run, [x[0].T], (len(taps) - 1, taps.shape[1]))
    return out.T[None]


def gated_delta(
    call: RecurrentCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: query, key, value [1, n, H, D]."""
    _refuse_tensors("the gated delta rule", others)
    if not use_qk_l2norm_in_kernel:
        raise ModelError("its gated delta rule does not normalize queries and keys, which is not supported.")
    inputs = [query[0], key[0], value[0], g[0].float(), beta[0].float()]
    shape = (value.shape[2], value.shape[3], key.shape[3])
    return call.run(call.kernels.gated_delta, inputs, shape)[None], None


def selective_scan(
    call: RecurrentCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """`mamba2_chunk_scan`: x [1, n, H, P], dt [1, n, H], A and D [H], B and C [1, n, G, states]."""
    _refuse_tensors("mamba2_chunk_scan", others)
    if not dt_softplus:
        raise ModelError("its step sizes have no softplus, which is not supported.")
    kernels, heads = call.kernels, hidden_states.shape[2]
    rates, skip, bias = call.constant(lambda: _scan_constants(A, D, dt_bias, heads))

    def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, path: Path, states: Tensor) -> Tensor:
        return kernels.selective_scan(x, dt, rates, b, c, skip, path, states)

    steps = kernels.softplus(dt[0], bias, *dt_limit)
    shape = (heads, hidden_states.shape[3], B.shape[3])
    return call.run(run, [hidden_states[0], steps, B[0], C[0]], shape)[None]


def mamba_scan(
    call: RecurrentCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> Tensor:
    """`mamba_selective_scan`: x, dt and z [1, C, n], A [C, states], B and C [1, states, n], D [C]."""
    _refuse_tensors("mamba_selective_scan", others)
    if not delta_softplus:
        raise ModelError("its step sizes have no softplus, which is not supported.")
    kernels, channels = call.kernels, hidden_states.shape[1]
    rates, skip, bias = call.constant(lambda: _scan_constants(A, D, delta_bias, channels))

    def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, path: Path, states: Tensor) -> Tensor:
        return kernels.selective_scan(x, dt, rates, b, c, skip, path, states)

    x, b, c = hidden_states[0].T[:, :, None], B[0].T[:, None], C[0].T[:, None]
    parts = [part.contiguous() for part in (x, kernels.softplus(dt[0].T.contiguous(), bias), b, c)]
    out = call.run(run, parts, (channels, 1, B.shape[1]))[:, :, 0]
    if z is not None:
        out = kernels.gate(out, z[0].T.contiguous(), "silu")
    return out.T[None]


def _scan_constants(
    a: Tensor, d: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(heads, device=a.device)
    return a.detach().float(), _float(none if d is None else d), _float(none if bias is None else bias)


def _float(x: Any) -> Any:
    return None if x is None else cast(Tensor, x).detach().float().contiguous()


def _refuse_tensors(name: str, others: dict[str, Any]) -> None:
    """Raise ModelError for tensors of unknown meaning: z, initial_states, seq_idx, …"""
    if unknown := sorted(key for key, value in others.items() if isinstance(value, Tensor)):
        raise ModelError(f"it gives {name} {', '.join(unknown)}, which Outrider does not know.")


# Names in transformers' modelling files -> functions of a call and of the same arguments.
RECURRENCES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": short_conv,
    "torch_chunk_gated_delta_rule": gated_delta,
    "chunk_kimi_delta_attention": gated_delta,
    "mamba2_chunk_scan": selective_scan,
    "mamba_selective_scan": mamba_scan,
}
