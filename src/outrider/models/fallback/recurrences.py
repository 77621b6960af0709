"""transformers' functions for convolutions and recurrences, on the kernels of a backend.

Each takes the arguments of the function that it replaces, for one sequence: [1, …].  The rows of that
sequence are those of the step, whose parents are in the path of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

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
    scan = call.constant(lambda: _Scan.of(A, D, dt_bias))
    steps = call.kernels.softplus(dt[0], scan.bias, *dt_limit)
    shape = (len(scan.bias), hidden_states.shape[3], B.shape[3])
    return scan.run(call, [hidden_states[0], steps, B[0], C[0]], shape)[None]


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
    kernels, scan = call.kernels, call.constant(lambda: _Scan.of(A, D, delta_bias))
    x, b, c = hidden_states[0].T[:, :, None], B[0].T[:, None], C[0].T[:, None]
    parts = [part.contiguous() for part in (x, kernels.softplus(dt[0].T.contiguous(), scan.bias), b, c)]
    out = scan.run(call, parts, (len(scan.bias), 1, B.shape[1]))[:, :, 0]
    if z is not None:
        out = kernels.gate(out, z[0].T.contiguous(), "silu")
    return out.T[None]


class _Scan(NamedTuple):
    """Constants of a selective scan.  rates: A.  skip: D.  bias: of the step sizes."""

    rates: Tensor
    skip: Tensor
    bias: Tensor

    @staticmethod
    def of(a: Tensor, d: Tensor | None, bias: Tensor | None) -> _Scan:
        none = torch.zeros(len(a), device=a.device)
        return _Scan(*[_float(none if part is None else part) for part in (a, d, bias)])

    def run(self, call: RecurrentCall, inputs: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """inputs: x, step sizes, B and C, as the kernel takes them.  shape: of a state"""

        def scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, path: Path, states: Tensor) -> Tensor:
            return call.kernels.selective_scan(x, dt, self.rates, b, c, self.skip, path, states)

        return call.run(scan, inputs, shape)


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
