"""With weights and K/V in few bits every method emits plain decoding's tokens, close to the full model's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from covering import pairwise
from helpers import answer, token_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import quantize
from outrider.core.quantized import QuantizedWeight
from outrider.core.step_input import StepInput
from outrider.models.export import write
from outrider.testing import KnownTexts, Scripts, check_idle, random_prompts, visible_parts

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "K/V": {"kv_cache_dtype": "int8"},
    "int4, K/V": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
PROMPTS = random_prompts(5, seed=2)
TEMPERATURES = [0.0, 0.8]


def params_of(number: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=number, max_tokens=24, ignore_eos=True)


@pairwise(backend={"c": "", "torch": "torch"}, temperature=TEMPERATURES, form=list(FORMS))
def test_speculation_emits_the_same_tokens_with_few_bits(
    backend: str,
    temperature: float,
    form: str,
    llama: str,
    random_draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt alone against all at once, with n-gram, draft model and tree drafts."""
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    llm = LLM(llama, max_num_seqs=4, **FORMS[form])
    if not llm.engine.exact:
        pytest.skip("not promised on this processor")
    params, truth = [params_of(i, temperature) for i in range(len(PROMPTS))], KnownTexts()
    expected = [answer(llm, prompt, p) for prompt, p in zip(PROMPTS, params)]
    for i, (prompt, output) in enumerate(zip(PROMPTS, expected)):
        truth.learn(prompt, i, output.outputs)
    configs: list[dict[str, Any]] = [
        {"method": "ngram", "prompt_lookup_min": 1},
        {
            "method": "draft_model",
            "model": llama,
            "num_speculative_tokens": 3,
            "siblings": 2,
            "quantization": "int4",
        },
        {"method": "draft_model", "model": random_draft, "num_speculative_tokens": 3},
        {"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6},
    ]
    for config in configs if not backend else configs[-1:]:
        llm.use(config)
        got = llm.generate(token_prompts(PROMPTS), params)
        assert [visible_parts(output.outputs) for output in got] == [
            visible_parts(output.outputs) for output in expected
        ], config
        check_idle(llm)
    assert sum(output.speculation.accepted for output in got) > 20


@pytest.mark.parametrize("form", ["int8", "int4, K/V"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_tokens_of_the_built_in_pair(temperature: float, form: str) -> None:
    llm = LLM("builtin", max_num_seqs=4, **FORMS[form])
    prompts, params = ["The old bridge", "Count from 3 to 12.", "def add("], params_of(3, temperature)
    expected = [llm.generate(prompt, params)[0] for prompt in prompts]
    llm.use({"model": "builtin-draft", "num_speculative_tokens": 4, "siblings": 2, "quantization": "int8"})
    got = llm.generate(prompts, params)
    assert [visible_parts(output.outputs) for output in got] == [
        visible_parts(output.outputs) for output in expected
    ]
    assert sum(output.speculation.accepted for output in got) > 5
    check_idle(llm)


def test_the_pools_of_target_and_draft_follow_the_option(llama: str) -> None:
    llm = LLM(llama, speculative_config={"model": llama}, kv_cache_dtype="int8")
    assert [pool.dtype for pool in llm.engine.cache.pools] == [torch.int8] * 2
    assert llm.engine.decoder.footprint.total() < 0.4 * LLM(llama).engine.decoder.footprint.total()


def test_more_tokens_fit_into_the_same_memory() -> None:
    pages = [
        LLM("builtin", kv_cache_memory_bytes=8 << 20, max_model_len=256, kv_cache_dtype=d).engine.cache.pages
        for d in ("auto", "int8")
    ]
    assert pages[1] > 1.8 * pages[0] or LLM("builtin").engine.decoder.dtype == torch.float32


def test_a_path_moved_without_its_scales(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison detects moved K/V values whose scales stayed in place."""
    llm, truth = LLM(llama, max_num_seqs=4, kv_cache_dtype="int8"), KnownTexts()
    expected = [answer(llm, prompt, params_of(i, 0)) for i, prompt in enumerate(PROMPTS)]
    for i, (prompt, output) in enumerate(zip(PROMPTS, expected)):
        truth.learn(prompt, i, output.outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})

    def move(self: Pool, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.data[:, :, list(targets), :, : self.width] = self.data[:, :, list(sources), :, : self.width]

    monkeypatch.setattr(Pool, "move", move)
    got = llm.generate(token_prompts(PROMPTS), [params_of(i, 0) for i in range(len(PROMPTS))])
    assert [visible_parts(output.outputs) for output in got] != [
        visible_parts(output.outputs) for output in expected
    ]


# ---- how near


def log_probs(llm: LLM, texts: Sequence[Sequence[int]]) -> Tensor:
    """float64 [tokens, V]: the log-probabilities after every token."""
    found, decoder = [], llm.engine.decoder
    for text in texts:
        step_input = StepInput()
        step_input.chain(array("i", range(len(text))), 0, text)
        x = decoder.forward(step_input.build(), decoder.pool(len(text)))
        found.append(decoder.logits(x, list(range(len(text)))).double().log_softmax(-1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def dithered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The built-in model in bfloat16, each weight moved by up to half a step of its 8 bits."""
    folder = tmp_path_factory.mktemp("dithered") / "model"
    write("builtin", folder, 16)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            steps = quantize(tensor, 8)
            assert isinstance(steps, QuantizedWeight)
            moved = torch.rand(tensor.shape, generator=generator) - 0.5
            tensors[name] = (tensor + moved * steps.scales.repeat_interleave(steps.group, 1)).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def whole(dithered: str) -> tuple[list[list[int]], Tensor]:
    """Texts of that model, and what it thinks of them with all its bits."""
    llm = LLM(dithered)
    outputs = llm.generate(
        [
            "The old bridge",
            "Count from 3 to 12.",
            "Who was she?",
            "def add(",
            "Once upon a time",
            "Dear Anna,",
        ],
        SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True),
    )
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return texts, log_probs(llm, texts)


@pytest.mark.parametrize(
    ("form", "most"), [("int8", 0.002), ("K/V", 0.0005), ("int4", 0.14), ("int4, K/V", 0.14)]
)
def test_quantization_diverges_little_from_the_full_model(
    form: str, most: float, dithered: str, whole: tuple[list[list[int]], Tensor]
) -> None:
    """Mean Kullback-Leibler divergence from the unquantized model; measured 0.0010, 0.0002, 0.069."""
    texts, before = whole
    after = log_probs(LLM(dithered, **FORMS[form]), texts)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    assert 1e-7 < divergence < most
