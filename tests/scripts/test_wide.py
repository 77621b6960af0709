"""scripts/wide.py: the widened target emits the texts of the small one, with the same acceptance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import wide

from outrider import LLM, SamplingParams
from outrider.bench.prompts import TASKS, rendered
from outrider.checkpoints.hub import Checkpoint
from outrider.outputs import RequestOutput

CPU = torch.device("cpu")
SIZES = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 10, "num_attention_heads": 16,
         "num_key_value_heads": 4}  # fmt: skip
OPTIONS = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
DRAFT, CHAIN = {"model": "builtin-draft"}, {"tree": "chain", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint() -> wide.WideCheckpoint:
    return wide.widened("builtin", SIZES, CPU)


@pytest.fixture(scope="module")
def engines(checkpoint: wide.WideCheckpoint) -> tuple[LLM, LLM]:
    """The built-in target, and the widened one."""
    with wide.opened_as("wide", checkpoint) as model:
        large = LLM(model, speculative_config=None, **OPTIONS)
    return LLM("builtin", speculative_config=None, **OPTIONS), large


def answers(llm: LLM) -> list[RequestOutput]:
    prompts = [rendered(prompt, llm.tokenizer) for prompt in TASKS[:3]]
    return llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0, detokenize=False))


def assert_same_texts_and_steps(small: LLM, large: LLM) -> None:
    """Steps may differ by one: a token that is as likely as another may be drafted in its place."""
    for mine, other in zip(answers(large), answers(small)):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert abs(mine.speculation.steps - other.speculation.steps) <= 1


def test_greedy_texts_are_those_of_the_small_target(engines: tuple[LLM, LLM]) -> None:
    small, large = engines
    assert large.engine.decoder.spec.hidden == 512 and large.engine.decoder.spec.layers == 10
    small.use(None)
    large.use(None)
    assert_same_texts_and_steps(small, large)


def test_the_draft_model_is_accepted_as_often(engines: tuple[LLM, LLM]) -> None:
    small, large = engines
    small.use(DRAFT)
    large.use(DRAFT)
    assert_same_texts_and_steps(small, large)
    assert sum(output.speculation.accepted for output in answers(large)) > 40


def test_a_widened_head_is_accepted_as_often(
    engines: tuple[LLM, LLM],
    checkpoint: wide.WideCheckpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small, large = engines
    small.use({"model": "builtin-eagle3", **CHAIN})
    large.use({"model": wide.widened_eagle3("builtin-eagle3", checkpoint, tmp_path), **CHAIN})
    assert not caplog.records, "no warning of another target"
    assert_same_texts_and_steps(small, large)
    assert sum(output.speculation.accepted for output in answers(large)) > 40


def test_added_weights_are_random_and_add_nothing(checkpoint: wide.WideCheckpoint) -> None:
    source, hidden = checkpoint.tensors(), 512
    k = source.linear("model.layers.0.self_attn.k_proj", 256, hidden)
    assert k[128:].std() > 0.01 and k[:128, 384:].std() > 0.01
    v = source.linear("model.layers.0.self_attn.v_proj", 256, hidden)
    assert (v[128:, :384] == 0).all() and v[:, 384:].std() > 0.01
    o = source.linear("model.layers.0.self_attn.o_proj", hidden, 1024)
    assert (o[:, 192:256] == 0).all() and o[:, 512:].std() > 0.01, "a fourth head reads the old values"
    down = source.linear("model.layers.0.mlp.down_proj", hidden, 1280)
    assert (down[384:, :1024] == 0).all() and down[384:, 1024:].std() > 0.01
    up = source.linear("model.layers.9.mlp.up_proj", 1280, hidden)
    assert (up[:, :384] == 0).all() and up[:, 384:].std() > 0.01
    assert source.linear("model.layers.9.mlp.down_proj", hidden, 1280).std() > 0.01


def test_a_name_is_given_for_the_length_of_a_block(checkpoint: wide.WideCheckpoint) -> None:
    with wide.opened_as("another", checkpoint) as name:
        assert Checkpoint.open(name).spec == checkpoint.spec and Checkpoint.open(name).name == name
        assert Checkpoint.open("builtin").spec.hidden == 384
    with pytest.raises(Exception, match="another"):
        Checkpoint.open("another")
