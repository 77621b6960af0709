"""The fallback equals transformers for every family, and speculation equals plain decoding."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, write
from helpers import answer
from torch import nn

from outrider import LLM, SamplingParams
from outrider.backends.cpu import backend as cpu
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.errors import ConfigError, ModelError
from outrider.heads.sample import read
from outrider.models.fallback import attention, row_invariant
from outrider.models.fallback import model as fallback_model
from outrider.models.fallback.model import Fallback
from outrider.testing import KnownTexts, Scripts, check_idle, run_staggered, visible_parts

NEW, TIE = 32, 2e-3
LENGTHS = (1, 9, 9, 30, 30)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
needs_c = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(300) for _ in range(length)] for length in LENGTHS]


@dataclass
class Case:
    name: str
    model: Any
    llm: LLM


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("family")
    model = write(request.param, folder)
    yield Case(
        request.param,
        model,
        LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=48, max_model_len=120, seed=0),
    )


@torch.inference_mode()
def generated(model: Any, length: int) -> list[list[int]]:
    ids = torch.tensor([prompt for prompt in prompts() if len(prompt) == length])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
    )
    return out[:, length:].tolist()


@torch.inference_mode()
def is_tie(model: Any, ids: list[int], a: int, b: int) -> bool:
    logits = model(torch.tensor([ids])).logits[0, -1]
    return bool((logits[a] - logits[b]).abs() < TIE)


def test_greedy_text_is_that_of_transformers(case: Case) -> None:
    """Ragged, in chunks, three at a time."""
    assert isinstance(case.llm.engine.decoder, Fallback)
    expected = [text for length in sorted(set(LENGTHS)) for text in generated(case.model, length)]
    assert sum(len(set(text)) for text in expected) > 5 * len(expected), (
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
@pytest.mark.parametrize(("kind", "temperature"), [("right", 0.8), ("hidden", 0.0)])
def test_speculation_changes_nothing(case: Case, kind: str, temperature: float) -> None:
    """A chain and a tree around the true tokens, in ragged batches, against each prompt alone."""
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
    llm.use(
        {
            "method": "scripted",
            "script": getattr(Scripts(truth), kind),
            "nodes": 40,
            "num_speculative_tokens": 6,
        }
    )
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


def fallback(folder: Path, dtype: torch.dtype) -> Fallback:
    return Fallback(Checkpoint.open(str(folder)), dtype, torch.device("cpu"), 200)


def chain(model: Fallback, pool: Any, start: int, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V]."""
    step_input = StepInput()
    step_input.chain(array("i", range(256)), start, tokens)
    return model.logits(model.forward(step_input.build(), pool), list(range(len(tokens))))


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gemma2",
        "gemma3",
        "qwen2-moe",
        "gpt-oss",
        "deepseek-v3",
        "llama-gelu",
        "llama4",
        "llama4-two-experts",
        "stablelm-parallel",
        "falcon-alibi",
    ],
)
def test_logits_are_bit_identical_in_any_batch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """One hundred tokens at once, one by one, and in uneven chunks, on three threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        write(
            name,
            tmp_path,
            dtype,
            **({} if name in ("gpt2", "deepseek-v3", "falcon-alibi") else {"intermediate_size": 500}),
        )  # no whole vectors
        model, tokens = fallback(tmp_path, dtype), [i * 7 % 300 for i in range(100)]
        whole = chain(model, model.pool(256), 0, tokens)
        for cuts in ([0, 7, 8, 41, 43, 100], list(range(101))):
            pool = model.pool(256)
            parts = [chain(model, pool, a, tokens[a:b]) for a, b in itertools.pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(threads)


@needs_c
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "falcon-new", "bloom-six-heads"])
def test_bfloat16_logits_are_near_those_of_transformers_in_float32(name: str, tmp_path: Path) -> None:
    """bfloat16 weights and K/V, float32 activations and sums: far nearer than stock bfloat16."""
    theirs, tokens = write(name, tmp_path, torch.bfloat16), prompts()[-1]
    model = fallback(tmp_path, torch.bfloat16)
    got = chain(model, model.pool(256), 0, tokens)
    with torch.inference_mode():
        stock = theirs(torch.tensor([tokens])).logits[0].float()
        expected = theirs.float()(torch.tensor([tokens])).logits[0]
    error, stock_error = ((x - expected).pow(2).mean().sqrt().item() for x in (got, stock))
    assert error < 0.03 * expected.std() and error < stock_error


@needs_c
@pytest.mark.parametrize("name", ["gemma2", "bloom-six-heads", "gpt-oss"])
def test_keys_and_values_in_eight_bits(name: str, tmp_path: Path) -> None:
    """Capped, leaning and sinking scores over int8: near the same in float32, and exact in any company."""
    write(name, tmp_path)
    tokens, full = prompts()[-1], fallback(tmp_path, torch.float32)
    llm = LLM(str(tmp_path), kv_cache_dtype="int8")
    few: Any = llm.engine.decoder
    assert llm.engine.exact
    expected, got = (chain(model, model.pool(256), 0, tokens) for model in (full, few))
    close = (got - expected).pow(2).mean(-1).sqrt() < 0.1 * expected.std()
    assert close.float().mean() > 0.8, "a token that goes to other experts may be far off, but most are not"


@pytest.mark.parametrize("name", ["falcon-alibi", "falcon-alibi-six-heads-multi-query"])
def test_falcons_biases_are_rounded_as_in_transformers(name: str, tmp_path: Path) -> None:
    """From position 257 on bfloat16 has no longer every position; slopes by distance would be off there."""
    theirs, tokens = (
        write(name, tmp_path, max_position_embeddings=1024),
        [i * i * 7 % 300 for i in range(700)],
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    model = Fallback(Checkpoint.open(str(tmp_path)), torch.float32, torch.device("cpu"), 1024)
    pool, plans = model.pool(700), []
    for a, b in ((0, 300), (300, 700)):
        step_input = StepInput()
        step_input.chain(array("i", range(700)), a, tokens[a:b])
        plans.append(model.logits(model.forward(step_input.build(), pool), list(range(b - a))).clone())
    torch.testing.assert_close(torch.cat(plans), expected, rtol=1e-3, atol=2e-3)


def test_falcons_biases_do_not_fit_into_eight_bits(tmp_path: Path) -> None:
    write("falcon-alibi", tmp_path)
    with pytest.raises(ConfigError, match=r"int8.*ALiBi"):
        LLM(str(tmp_path), kv_cache_dtype="int8")


def test_a_rope_by_length_is_taken_for_the_longest_text(tmp_path: Path) -> None:
    """Phi-3's long factors hold for short texts, too, so that no K/V changes as a text grows."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    theirs, tokens = (
        write("phi3-window", tmp_path, rope_parameters=rope, original_max_position_embeddings=32),
        list(range(60)),
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    model = fallback(tmp_path, torch.float32)
    pool = model.pool(256)
    got = torch.cat([chain(model, pool, 0, tokens[:20]), chain(model, pool, 20, tokens[20:])])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_torch_kernels_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    tokens = prompts()[-1]
    for name in ("gpt2", "gemma2", "gpt-oss", "mpt", "llama4", "falcon-alibi"):
        theirs = write(name, tmp_path / name)
        model = fallback(tmp_path / name, torch.float32)
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(chain(model, model.pool(256), 0, tokens), expected, rtol=1e-3, atol=1e-3)


# ---- what makes rows independent


def test_unsteady_functions_go_row_by_row() -> None:
    """On any number of threads, at widths of whole vectors and others; without it, the same trial fails."""
    threads, plain = torch.get_num_threads(), 0
    for count in (1, 3):
        torch.set_num_threads(count)
        for width in (1, 40, 96, 2048, 20000):
            x = torch.randn(24, width)
            for f in (F.silu, torch.sigmoid, lambda x: F.gelu(x, approximate="tanh")):
                together = row_invariant.by_rows(f, x)
                assert torch.equal(together, torch.cat([f(row) for row in x.split(1)]))
                plain += not torch.equal(f(x), together)
    torch.set_num_threads(threads)
    assert plain > 0


def test_a_matrix_is_right_however_it_is_used() -> None:
    from outrider.backends.select import backend_for

    backend = backend_for(torch.device("cpu"), torch.float32)
    weight, x, bias = torch.randn(24, 40), torch.randn(2, 3, 40), torch.randn(24)
    near = {"rtol": 1e-4, "atol": 1e-4}
    matrix: Any = row_invariant.Matrix(weight, bias, backend)
    torch.testing.assert_close(F.linear(x, matrix, bias), F.linear(x, weight, bias), **near)
    torch.testing.assert_close(F.linear(x, matrix), F.linear(x, weight), **near)
    torch.testing.assert_close(F.linear(x, matrix, bias * 2), F.linear(x, weight, bias * 2), **near)
    torch.testing.assert_close(x @ matrix.T, x @ weight.T, **near)
    torch.testing.assert_close(x[..., :24] @ matrix, x[..., :24] @ weight, **near)
    torch.testing.assert_close(
        torch.addmm(bias[:1], x[0, :, :24], matrix), torch.addmm(bias[:1], x[0, :, :24], weight), **near
    )
    torch.testing.assert_close(F.embedding(torch.tensor([[3, 1]]), matrix), weight[[3, 1]][None])
    torch.testing.assert_close(
        torch.einsum("abk,ok->abo", x, matrix), torch.einsum("abk,ok->abo", x, weight), **near
    )
    experts: Any = row_invariant.Matrix(torch.stack([weight, weight * 2]), None, backend)
    torch.testing.assert_close(F.linear(x, experts[torch.tensor(1)]), F.linear(x, weight * 2), **near)
    torch.testing.assert_close(
        torch.bmm(x, experts.transpose(1, 2)),
        torch.bmm(x, torch.stack([weight, weight * 2]).transpose(1, 2)),
        **near,
    )


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
    write("gemma2", tmp_path)
    right = attention._layer_of

    def wrong(*args: Any, **given: Any) -> Any:
        layer = right(*args, **given)
        layer.scale *= 3
        return layer

    monkeypatch.setattr(attention, "_layer_of", wrong)
    assert "not those of transformers" in refused(tmp_path)


def test_quantised_checkpoints_are_for_the_lean_decoder(tmp_path: Path) -> None:
    import json

    write("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        LLM(str(tmp_path), quantization="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "GPT2LMHeadModel" in refused(tmp_path) and "unquantised" in refused(tmp_path)


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
