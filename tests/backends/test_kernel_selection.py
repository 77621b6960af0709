"""Which kernels run: by compiler, environment, dtype and self-test."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from kernel_cases import CPU

from outrider.backends.cpu import backend as cpu
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.checkpoints.hub import Checkpoint
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.models.selftest import bit_exact


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")
def test_the_c_kernels_build_where_a_compiler_is() -> None:
    """Without this, C kernels that no longer compile would only show as skipped tests."""
    assert cpu.library() is not None


def test_environment_variable_selects_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    assert isinstance(backend_for(CPU, torch.float32), TorchBackend)


def test_float16_runs_on_torch() -> None:
    assert isinstance(backend_for(CPU, torch.float16), TorchBackend)


@pytest.mark.parametrize("compiler", [None, "/no/such/compiler", "false"])
def test_without_a_working_compiler_the_torch_kernels_run(
    compiler: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None on the path, one in CC that is not there, one that fails: a warning each, never a crash."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    if compiler is None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", compiler)
    cpu.library.cache_clear()
    try:
        assert isinstance(backend_for(CPU, torch.float32), TorchBackend)
        assert "torch kernels are used" in caplog.text
    finally:
        cpu.library.cache_clear()


@pytest.mark.parametrize("backend", ["", "torch"])
def test_the_self_test_passes_here_and_fails_where_rows_depend_on_each_other(
    backend: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    decoder = Decoder(Checkpoint.open(str(checkpoint())), Precision(torch.float32), CPU, 64)
    assert bit_exact(decoder)
    honest = decoder.forward_step
    monkeypatch.setattr(
        decoder,
        "forward_step",
        lambda step_input, *given: honest(step_input, *given) * (1 + 1e-6 * (step_input.length > 1)),
    )
    assert not bit_exact(decoder)
