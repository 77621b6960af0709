"""Medusa-2: heads and target are trained together, and what changes of the target is a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, LoRARequest, SamplingParams
from outrider.draft.medusa import Network
from outrider.errors import ConfigError
from outrider.models.differentiable import text_logits
from outrider.train.joint import Joint
from outrider.train.report import Report
from outrider.train.run import train

PROMPTS: list[Any] = [{"prompt": text} for text in ("the cat", "ten men", "it is", "rain")]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.8) * 2]


@pytest.fixture(scope="module")
def llm(target: LLM) -> LLM:
    """The same target, for requests with adapters."""
    folder = str(target.engine.checkpoint.folder)
    return LLM(
        folder,
        dtype="float32",
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 24,
        enable_lora=True,
        speculative_config=None,
    )


def test_heads_and_target_learn_together(llm: LLM, run_options: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = {"joint": True, "own": False, "heads": 2, "steps": 50, "rate": 1e-2}
    first, last = train(llm, "medusa", run_options("medusa", out, **given), Report()).records
    assert last["held_loss"] < 0.95 * first["held_loss"]
    assert last["tokens_per_step"] > max(1.05, first["tokens_per_step"])
    assert llm.engine.adapters is not None and not llm.engine.adapters.known, "as it was, for new weights"
    adapter = LoRARequest("changed", 1, str(out / "adapter"))
    expected = llm.generate(PROMPTS, PARAMS, lora_request=adapter)
    found = llm.variant({"model": str(out), "num_speculative_tokens": 2}).generate(
        PROMPTS, PARAMS, lora_request=adapter
    )
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]
    assert sum(out.outputs[0].speculation.accepted for out in found) > 0
    again = {**given, "steps": 1, "init": str(out)}
    continued = train(llm, "medusa", run_options("medusa", tmp_path / "again", **again), Report()).records
    assert continued[0]["held_loss"] == pytest.approx(last["held_loss"], rel=0.02), "with its adapter"
    with pytest.raises(ConfigError, match="is no adapter of this rank and target"):
        train(llm, "medusa", run_options("medusa", tmp_path / "wide", rank=8, **again), Report())


def test_the_served_target_is_the_trained_one(llm: LLM, tmp_path: Path) -> None:
    target = llm.engine.target
    torch.manual_seed(1)
    heads = Network(target.decoder.spec.hidden, target.vocabulary, heads=1, own=False)
    joint = Joint(heads, target, rank=4)
    for update in joint.updates.values():
        torch.nn.init.normal_(update.lora_B.weight, std=0.5)  # type: ignore[union-attr, arg-type]
    joint.save_adapter(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    adapter = LoRARequest("random", 2, str(tmp_path))
    plain, changed = llm.generate([PROMPTS[0]] * 2, params, lora_request=[None, adapter])
    ids = torch.tensor([*changed.prompt_token_ids, *changed.outputs[0].token_ids])
    places = torch.arange(len(changed.prompt_token_ids) - 1, len(ids) - 1)
    with torch.no_grad():
        best = text_logits(joint.target[0], ids, places).argmax(-1)
    assert best.tolist() == list(changed.outputs[0].token_ids)
    assert changed.outputs[0].token_ids != plain.outputs[0].token_ids


def test_a_rank_without_joint_training_is_refused(run_options: Any, tmp_path: Path) -> None:
    assert run_options("medusa", tmp_path, joint=True, rank=4).engine["max_lora_rank"] == 4
    with pytest.raises(ConfigError, match=r'rank \(4\) is of the adapter that "joint": true trains'):
        run_options("medusa", tmp_path, rank=4)


def test_an_engine_without_adapters_is_refused(target: LLM, run_options: Any, tmp_path: Path) -> None:
    options = run_options("medusa", tmp_path, joint=True)
    with pytest.raises(ConfigError, match="needs enable_lora=True as an option of the engine"):
        train(target, "medusa", options, Report())
