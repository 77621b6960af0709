"""The torch backend, as devices without kernels of their own run it.

`OUTRIDER_KERNELS=torch pytest tests/exact` runs every test of this folder on it; `-m full` here does so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import answer
from syncs import Syncs

from outrider import LLM, SamplingParams
from outrider.backends.torch import sampling
from outrider.backends.torch.verifier import TreeVerifier
from outrider.testing import KnownTexts, Scripts, check_idle, random_prompts, run_staggered, visible_parts

PROMPTS = random_prompts(4, seed=3, longest=9)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.02},
]
PARAMS = [SamplingParams(max_tokens=10, ignore_eos=True, seed=7, **sampling) for sampling in SAMPLING]


@pytest.mark.parametrize("method", ["off", "scripted", "ngram"])
def test_a_device_reads_once_a_step(method: str, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill beside decoding, right tokens inside random trees, greedy and sampled, as on a device.

    The only read of a step returns the picked tokens, which are those that a CPU picks one by one.
    """
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    llm, truth, seen = LLM(llama, max_num_seqs=4, enable_prefix_caching=False), KnownTexts(), Syncs()
    expected = [answer(llm, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]
    for prompt, p, outputs in zip(PROMPTS, PARAMS, expected):
        truth.learn(prompt, p.seed or 0, outputs)
    monkeypatch.setattr(llm.engine.decoder.backend, "verifier", TreeVerifier())
    monkeypatch.setattr(sampling, "FIRST_LOOKS", {})
    script = {"script": Scripts(truth).hidden, "nodes": 7} if method == "scripted" else {}
    llm.use({"method": method, "num_speculative_tokens": 0 if method == "off" else 3, **script})
    with seen:
        found = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in found] == [visible_parts(o) for o in expected]
    assert method != "scripted" or sum(o.speculation.accepted for o in found) > 0
    assert llm.engine.steps and seen.seen == ["tolist"] * llm.engine.steps
    check_idle(llm)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_exactness_on_the_torch_kernels() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "OUTRIDER_KERNELS": "torch"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
