"""Rows of the fallback are independent, in every dtype, with every kind of score, and in torch's kernels."""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import parametrized
from fallback_cases import chain, fallback, needs_c, prompts
from families import write

from outrider import LLM
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.errors import ConfigError
from outrider.models.fallback import row_invariant
from outrider.models.fallback.model import Fallback
from outrider.models.placement import Precision

NAMES = [
    "gpt2",
    "vaultgemma",
    "gemma4-shared-kv",
    "qwen2-moe",
    "gpt-oss",
    "deepseek-v3",
    "llama-gelu",
    "llama4",
    "llama4-two-experts",
    "stablelm-parallel",
    "falcon-alibi",
]
DTYPES = [torch.float32, torch.bfloat16]


@needs_c
@parametrized({"name": NAMES, "dtype": DTYPES}, {(name, DTYPES[i % 2]) for i, name in enumerate(NAMES)})
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
@pytest.mark.parametrize("name", ["gpt2", "vaultgemma", "falcon-new", "bloom-six-heads"])
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
@pytest.mark.parametrize("name", ["vaultgemma", "bloom-six-heads", "gpt-oss"])
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
    model = Fallback(Checkpoint.open(str(tmp_path)), Precision(torch.float32), torch.device("cpu"), 1024)
    pool, plans = model.pool(700), []
    for a, b in ((0, 300), (300, 700)):
        step_input = StepInput.of_chain(array("i", range(700)), a, tokens[a:b])
        plans.append(model.logits(model.forward(step_input, pool), list(range(b - a))).clone())
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
    for name in ("gpt2", "vaultgemma", "gpt-oss", "mpt", "llama4", "falcon-alibi"):
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
