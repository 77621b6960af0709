"""Choice of the backend for a device, from what this machine can run."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch

from outrider.backends.base import Backend
from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu import threads
from outrider.backends.cpu.run_index import CompiledIndex
from outrider.backends.run_index import Index, ReferenceIndex
from outrider.backends.torch import backend as reference
from outrider.errors import ConfigError

CPU = torch.device("cpu")


ACTIVATIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def backend_for(device: torch.device, dtype: torch.dtype, activations: str = "auto") -> Backend:
    """The fastest backend that runs here.

    OUTRIDER_KERNELS=torch asks for the reference, OUTRIDER_KERNELS=triton for the kernels of CUDA devices, on
    a CPU too.
    activations: what the inputs of linears are rounded to; auto: bfloat16, if the weights are in it and the C
    kernels have an instruction for that.  Raises ConfigError for bfloat16 without the C kernels or without
    bfloat16 weights.
    """
    if device.type == "cpu":
        threads.limit()
        reference.leave_out_amx()
    library = None if uses_triton(device) else _library(device)
    if library is not None:
        threads.adopt(library)
    if library is not None and dtype in (torch.float32, torch.bfloat16):
        if activations == "auto":
            fast = dtype == torch.bfloat16 and library.has_bfloat16_products()
            activations = "bfloat16" if fast else "float32"
        if activations == "bfloat16" and dtype != torch.bfloat16:
            raise ConfigError("activations='bfloat16' is for bfloat16 weights: set dtype='bfloat16'.")
        return cpu.CpuBackend(library, dtype, ACTIVATIONS[activations])
    if activations == "bfloat16":
        raise ConfigError(f"activations={activations!r} is for the C kernels of the CPU: leave it out.")
    return _triton_backend(device, dtype) if uses_triton(device) else reference.TorchBackend(device, dtype)


def adopt_threads() -> None:
    """Let all backends use as many threads as torch does now.  To be called where work arrives."""
    threads.adopt_in_all()


def uses_triton(device: torch.device) -> bool:
    """Whether the Triton kernels are used: if they are asked for, or on the current CUDA device.

    Triton launches on the current device.  Others get the reference.
    """
    asked = os.environ.get("OUTRIDER_KERNELS")
    if device.type != "cuda" or asked is not None:
        return asked == "triton"
    return find_spec("triton") is not None and device.index in (None, torch.cuda.current_device())


def _triton_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    if find_spec("triton") is None:
        raise ConfigError("OUTRIDER_KERNELS=triton needs Triton: pip install 'outrider[gpu]'.")
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from outrider.backends.triton.backend import TritonBackend
    from outrider.backends.triton.dot import INTERPRETED

    if (device.type == "cpu") != bool(INTERPRETED):
        raise ConfigError(
            f"OUTRIDER_KERNELS=triton on {device} needs TRITON_INTERPRET={int(device.type == 'cpu')} in the "
            "environment from the start: the kernels of a process are all interpreted or all compiled."
        )
    return TritonBackend(device, dtype)


def fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 weights are faster than float32.

    A GPU needs hardware for it.  The C kernels widen them in registers, and read half the bytes.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())  # type: ignore[no-untyped-call]
    hardware = bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # type: ignore[no-untyped-call]
    return device.type == "cpu" and (hardware or _library(device) is not None)


def _library(device: torch.device = CPU) -> cpu.Library | None:
    """The C kernels for a device; None if there are none, or if OUTRIDER_KERNELS=torch leaves them out."""
    if device.type != "cpu" or os.environ.get("OUTRIDER_KERNELS") == "torch":
        return None
    return cpu.library()


def run_index(capacity: int, longest: int = 1, depth: int = 0) -> Index:
    """An index of a text of at most `capacity` tokens: in C if the library is built."""
    if (library := _library()) is None:
        return ReferenceIndex(capacity, longest, depth)
    return CompiledIndex(library, capacity, longest, depth)
