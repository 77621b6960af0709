"""The fallback equals transformers for every family, and speculation equals plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_cases import LENGTHS, fallback, needs_c, prompts
from families import FAMILIES, write
from helpers import answer, transformers_tokens
from torch import nn
from toys import read

from outrider import LLM, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.errors import ConfigError, ModelError
from outrider.models.fallback import attention
from outrider.models.fallback import model as fallback_model
from outrider.models.fallback.model import Fallback
from outrider.models.load import needs_fallback
from outrider.testing import KnownTexts, Scripts, check_idle, run_staggered, visible_parts

NEW, TIE = 20, 2e-3
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@dataclass
class Case:
    name: str
    model: Any
    llm: LLM


# The lean decoder runs gpt-oss, and other tests load it here on purpose: its attention has sinks.
@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "gpt-oss"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("family")
    model = write(request.param, folder)
    yield Case(
        request.param,
        model,
        LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=48, max_model_len=120, seed=0),
    )


def generated(model: Any, length: int) -> list[list[int]]:
    return transformers_tokens(model, [prompt for prompt in prompts() if len(prompt) == length], NEW)


@torch.inference_mode()
def is_tie(model: Any, ids: list[int], a: int, b: int) -> bool:
    logits = model(torch.tensor([ids])).logits[0, -1]
    return bool((logits[a] - logits[b]).abs() < TIE)


def test_greedy_text_is_that_of_transformers(case: Case) -> None:
    """Ragged, in chunks, three at a time."""
    assert isinstance(case.llm.engine.decoder, Fallback)
    expected = [text for length in sorted(set(LENGTHS)) for text in generated(case.model, length)]
    assert sum(len(set(text)) for text in expected) > 4 * len(expected), (
        "texts that repeat a token are not worth comparing"
    )
    got = [output.outputs[0].token_ids for output in run_staggered(case.llm, prompts(), GREEDY)]
    parted = 0
    for prompt, a, b in zip(prompts(), expected, got):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is not None:
            parted += 1
            assert is_tie(case.model, prompt + a[:at], a[at], b[at]), (
                f"token {at} is {b[at]}, expected {a[at]}"
            )
    assert parted <= 1, "ties are rare"


@needs_c
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.full)])
def test_speculation_changes_nothing(case: Case, turn: int) -> None:
    """A chain or a tree around the true tokens, in ragged batches, against each prompt alone; by turns."""
    kind, temperature = (("right", 0.8), ("hidden", 0.0))[([*FAMILIES].index(case.name) + turn) % 2]
    llm, truth, expected = case.llm, KnownTexts(), []
    assert llm.engine.exact
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]
    llm.use(None)
    for prompt, p in zip(prompts(), params):
        outputs = answer(llm, prompt, p).outputs
        truth.learn(prompt, p.seed or 0, outputs)
        expected.append(visible_parts(outputs))
    script = getattr(Scripts(truth), kind)
    llm.use({"method": "scripted", "script": script, "nodes": 40, "num_speculative_tokens": 6})
    outputs = run_staggered(llm, prompts(), params)
    assert [visible_parts(output.outputs) for output in outputs] == expected
    assert sum(output.speculation.accepted for output in outputs) > 50
    check_idle(llm)


@torch.inference_mode()
def test_states_between_the_layers_are_those_of_transformers(case: Case) -> None:
    """As heads read them: what enters every layer."""
    tokens, layers = prompts()[-1], case.llm.engine.decoder.spec.layers
    expected = case.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    states = read(case.llm.engine.decoder, tokens, range(layers + 1)).states
    for layer in range(layers):
        assert torch.allclose(states[layer], expected[layer][0].float(), rtol=1e-3, atol=2e-3)
    assert not torch.allclose(states[layers], states[layers - 1], atol=0.1)


def test_other_lists_are_not_taken_for_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many towers, experts and norms as layers, in front of them and in them."""
    theirs, tokens, load = write("gpt-neox", tmp_path), prompts()[-1], fallback_model.load_model

    def crowded(checkpoint: Checkpoint) -> Any:
        model = load(checkpoint)
        layers = model.gpt_neox._modules.pop("layers")
        model.gpt_neox.towers = nn.ModuleList(nn.ModuleDict({"attention": nn.Identity()}) for _ in layers)
        model.gpt_neox.attentions = nn.ModuleList(layer.attention for layer in layers)
        model.gpt_neox.reversed = nn.ModuleList(reversed(layers))
        model.gpt_neox.layers = layers
        for layer in layers:
            layer.experts = nn.ModuleList(nn.Identity() for _ in layers)
        return model

    monkeypatch.setattr(fallback_model, "load_model", crowded)
    model = fallback(tmp_path, torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states[1][0]
        assert torch.allclose(read(model, tokens, (1,)).states[1], expected, atol=2e-3)


@needs_c
@pytest.mark.parametrize("siblings", [1, 2])
def test_a_draft_model_may_be_of_any_family(siblings: int, tmp_path: Path) -> None:
    write("gpt2", tmp_path / "target")
    write("opt", tmp_path / "draft")
    plain, params = (
        LLM(str(tmp_path / "target"), seed=0),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True),
    )
    config = {"num_speculative_tokens": 3, "siblings": siblings}
    for draft in ("target", "draft"):
        llm = LLM(
            str(tmp_path / "target"), seed=0, speculative_config={"model": str(tmp_path / draft), **config}
        )
        outputs = run_staggered(llm, prompts(), params)
        assert [visible_parts(output.outputs) for output in outputs] == [
            visible_parts(answer(plain, prompt, params).outputs) for prompt in prompts()
        ]
        assert draft == "draft" or sum(output.speculation.accepted for output in outputs) > 50


# ---- what is refused


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        LLM(str(folder))
    return str(caught.value)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write("opt", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bad = dict(tensors)
    bad["model.decoder.layers.1.fc1.weight"] = torch.zeros(7, 7)
    save_file(bad, file, {"format": "pt"})
    message = refused(tmp_path)
    assert "model.decoder.layers.1.fc1.weight" in message and "(7, 7)" in message and "(96, 64)" in message
    del tensors["model.decoder.layers.0.self_attn.k_proj.bias"]
    save_file(tensors, file, {"format": "pt"})
    assert "model.decoder.layers.0.self_attn.k_proj.bias" in refused(tmp_path)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        (
            "XGLM",
            {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
            "attention interface",
        ),
        (
            "Doge",
            {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
            "mask of its own",
        ),
    ],
)
def test_what_our_attention_cannot_do_is_refused_with_the_reason(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    from families import IDS

    from outrider.testing import random_model

    random_model(family, IDS | config).save_pretrained(tmp_path)
    message = refused(tmp_path)
    assert family in message and reason in message


def test_a_model_that_we_would_get_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the attention did not do what transformers' does, loading would find out."""
    write("vaultgemma", tmp_path)
    right = attention._layer_of

    def wrong(*args: Any, **given: Any) -> Any:
        layer = right(*args, **given)
        layer.scores = layer.scores._replace(scale=3 * layer.scores.scale)
        return layer

    monkeypatch.setattr(attention, "_layer_of", wrong)
    assert "not those of transformers" in refused(tmp_path)


def test_few_bits_are_for_the_lean_decoder(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        LLM(str(tmp_path), quantization="int8")
    checkpoint = replace(Checkpoint.open(str(tmp_path)), gguf=object())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="GPT2LMHeadModel cannot be run from a GGUF file"):
        needs_fallback(checkpoint)


# ---- a family that the checkpoint brings along

REMOTE = """
import torch
from transformers import {base}Config, {base}ForCausalLM


class {name}Config({base}Config):
    model_type = "{kind}"


class {name}ForCausalLM({base}ForCausalLM):
    config_class = {name}Config
"""


def test_code_of_the_checkpoint_runs_if_it_is_trusted(tmp_path: Path) -> None:
    import json

    theirs = write("olmo2", tmp_path)
    (tmp_path / "own.py").write_text(REMOTE.format(base="Olmo2", name="Own", kind="own-olmo"))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own-olmo", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "trust_remote_code=True" in refused(tmp_path)
    llm, prompt = LLM(str(tmp_path), trust_remote_code=True), prompts()[1]
    expected = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()
    got = (
        answer(llm, prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        .outputs[0]
        .token_ids
    )
    assert got == expected
