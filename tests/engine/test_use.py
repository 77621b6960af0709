"""Replacing the drafter of a loaded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.testing import tiny_checkpoint

INSTALLED = ("drafter", "rule", "cache", "proposer", "controller", "adaptive", "runner", "scheduler")


def test_a_refused_configuration_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path / "llama"), speculative_config="ngram")
    before = [getattr(llm.engine, name) for name in INSTALLED]
    with pytest.raises(ConfigError, match="control_module"):
        llm.use({"method": "auto", "control_module": str(tmp_path / "missing.safetensors")})
    changed = [name for name, old in zip(INSTALLED, before) if getattr(llm.engine, name) is not old]
    assert not changed
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)
    assert len(output.outputs[0].token_ids) == 4
