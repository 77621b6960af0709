"""A draft model on the CPU, with a target on a device whose kernels compare p with q."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import needs_c

from outrider import LLM, SamplingParams
from outrider.backends.base import Chain, Chains
from outrider.backends.cpu import fused
from outrider.core.params import DistributionParams
from outrider.testing import FakeTarget, tiny_checkpoint

DEVICE, CPU = torch.device("meta"), torch.device("cpu")


def decoder_with(*rules: str) -> Any:
    """A model on `DEVICE` with kernels of these rules."""
    return SimpleNamespace(device=DEVICE, backend=SimpleNamespace(verifier=SimpleNamespace(rules=rules)))


def on_device(kernel: str) -> FakeTarget:
    """A target on `DEVICE` under a rule whose kernel has this name."""
    return FakeTarget(decoder=decoder_with("match", "rejection"), kernel=kernel)


def test_distributions_stay_on_the_device_of_draft_and_target() -> None:
    target = on_device("rejection")
    assert target.probs_device(DEVICE) == DEVICE
    assert target.probs_device(CPU) == CPU


def test_distributions_go_to_the_host_if_the_rule_has_no_kernel() -> None:
    for kernel in ("", "block"):  # "": as of spectr
        assert on_device(kernel).probs_device(DEVICE) == CPU


def test_the_target_of_a_drafter_names_the_kernel_of_the_rule(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    for rule, kernel in {"rejection": "rejection", "spectr": "", "block": "block"}.items():
        config: dict[str, Any] = {"model": folder, "verification": rule}
        if rule == "spectr":
            config.update(siblings=2, sibling_draws="independent")
        assert LLM(folder, speculative_config=config, device="cpu").engine.drafter.target.kernel == kernel


@needs_c
def test_a_fused_chain_writes_to_the_memory_of_the_host_only() -> None:
    model, kinds = fused.CpuFusedModel(None), (CPU, DEVICE)  # type: ignore[arg-type]
    host, device = (torch.empty(3, 9, dtype=torch.float64, device=kind) for kind in kinds)
    chains = [Chain(0, 3, DistributionParams(0.8), 1, probs=probs) for probs in (None, host, device)]
    assert model.extends(Chains(chains[:2], 9))
    assert not model.extends(Chains(chains, 9))


@needs_c
def test_a_draft_on_the_cpu_keeps_its_distributions_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the target, which has no device here, had kernels on one."""
    folder, given, packed = tiny_checkpoint(tmp_path), list[torch.device](), fused._chains
    config = {"model": folder, "verification": "rejection", "num_speculative_tokens": 3}
    llm = LLM(folder, speculative_config=config, device="cpu", dtype="float32")
    drafter: Any = llm.engine.drafter
    drafter.target = replace(drafter.target, decoder=decoder_with("match", "rejection"))

    def seen(chains: Any) -> bytes:
        given.extend(chain.probs.device for chain in chains if chain.probs is not None)
        return packed(chains)

    monkeypatch.setattr(fused, "_chains", seen)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    assert given and set(given) == {CPU}
