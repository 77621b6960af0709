"""Layers on two devices: the same tokens as on one, and with speculation the same as without.

There is one CPU here, so a second one is made up: PyTorch takes "cpu:1" for the CPU, and to the decoder it is
another device, with kernels and a pool of its own.  Where they are of another kind and type, nothing computes
that was not carried over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrized
from helpers import answer, token_prompts, write_adapter

from outrider import LLM, CapacityError, ConfigError, LoRARequest, SamplingParams, draft
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import SplitPool
from outrider.core.block_table import PAGE
from outrider.draft.draft_model import loading
from outrider.engine import engine as engines
from outrider.engine import memory
from outrider.models import decoder
from outrider.models.placement import Placement, place
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    tiny_checkpoint,
    use_example,
    visible_parts,
)

CPU, OTHER, GPU = torch.device("cpu"), torch.device("cpu:1"), torch.device("cuda:0")
PROMPTS = random_prompts(6, seed=9)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
SHORT = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

Split = Callable[..., LLM]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("four"), num_hidden_layers=4)


@pytest.fixture
def split(four: str, monkeypatch: pytest.MonkeyPatch) -> Split:
    """`split("aabb", "a")`: two layers and the outer parts on the CPU, two on the other device.

    other: the kernels of the other device.
    """

    def make(layers: str, outer: str, other: str = "same", model: str = four, **given: Any) -> LLM:
        at = {"a": CPU, "b": OTHER}

        def backend(device: torch.device, dtype: torch.dtype, *given: str) -> Any:
            made: Any = (
                TorchBackend(CPU, torch.bfloat16)
                if (device, other) == (OTHER, "bfloat16")
                else backend_for(CPU, dtype)
            )
            made.device = device
            return made

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "backend_for", backend)
            patch.setattr(
                engines, "place", lambda *given: Placement(tuple(at[name] for name in layers), at[outer])
            )
            llm = LLM(model, max_num_seqs=4, **given)
        assert llm.engine.decoder.device == at[outer]
        return llm

    return make


# ---- the decoder


@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize(
    ("layers", "outer", "parts"),
    [("aabb", "a", 2), ("abab", "a", 4), ("bbbb", "a", 1), ("aaab", "b", 2), ("bbbb", "b", 1)],
)
def test_split_models_emit_the_unsplit_text(
    layers: str,
    outer: str,
    parts: int,
    backend: str,
    split: Split,
    four: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same kernels on both sides: the same tokens, with and without an adapter, from a tree."""
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    write_adapter(tmp_path, four)
    loras = [None, LoRARequest("it", 1, str(tmp_path))] * 3
    whole = LLM(four, max_num_seqs=4, enable_lora=True).generate(
        token_prompts(PROMPTS), SAMPLED, lora_request=loras
    )
    llm = split(layers, outer, enable_lora=True)
    assert len(llm.engine.decoder.parts) == len(llm.engine.cache.pools[0].parts) == parts
    assert llm.engine.exact
    truth = KnownTexts()
    for prompt, output in zip(PROMPTS, whole):
        truth.learn(prompt, 5, output.outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED, lora_request=loras)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o.outputs) for o in whole]
    assert sum(o.speculation.accepted for o in outputs) > 0
    check_idle(llm)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Gemma2", {"query_pre_attn_scalar": 24, "sliding_window": 9, "final_logit_softcapping": 8.0}),
        ("Qwen3Moe", {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_models_that_differ_from_llama_are_split(
    family: str, config: dict[str, Any], split: Split, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path, family, num_hidden_layers=4, **config)
    single_output, truth = expected(LLM(model, max_num_seqs=4), SAMPLED)
    llm = split("aabb", "b", model=model)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED)
    assert [visible_parts(o.outputs) for o in outputs] == single_output
    assert sum(o.speculation.accepted for o in outputs) > 0


def expected(plain: LLM, params: SamplingParams) -> tuple[list[Any], KnownTexts]:
    truth, single_output = KnownTexts(), []
    for prompt in PROMPTS:
        outputs = answer(plain, prompt, params).outputs
        truth.learn(prompt, params.seed or 0, outputs)
        single_output.append(visible_parts(outputs))
    return single_output, truth


METHODS = [*draft.names(), "tree"]
BOTH = ("draft_model", "layerskip", "lookahead", "eagle3", "tree")
LAYERS = [
    (name, layers)
    for i, name in enumerate(METHODS)
    for layers in (("aabb", "abaa") if name in BOTH else ("aabb", "abaa")[i % 2 :][:1])
]


Placed = dict[str, tuple[LLM, list[Any], KnownTexts]]


@pytest.fixture(scope="module")
def placed() -> Placed:
    """The engine of each placement and its plain texts, when a test has asked for it."""
    return {}


@parametrized({"drafter": METHODS, "layers": ["aabb", "abaa"]}, LAYERS)
def test_speculation_on_two_kinds_of_kernels(layers: str, drafter: str, split: Split, placed: Placed) -> None:
    """float32 in C and bfloat16 in torch: speculation changes nothing, also from the prefix cache."""
    prompts = token_prompts(PROMPTS[:4])
    if layers not in placed:
        plain = split(layers, "a", "bfloat16", enable_prefix_caching=False)
        placed[layers] = split(layers, "a", "bfloat16"), *expected(plain, SHORT)
    llm, alone, truth = placed[layers]
    if drafter == "tree":
        llm.use(
            {"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6}
        )
    else:
        use_example(llm, drafter)
    for _ in range(2):
        assert [visible_parts(o.outputs) for o in llm.generate(prompts, SHORT)] == alone[:4]
        check_idle(llm)


def test_few_bits_on_two_devices(split: Split) -> None:
    """Weights in int8 and K/V in int8, in C here and in torch there."""
    bits = {"quantization": "int8", "kv_cache_dtype": "int8"}
    alone, truth = expected(split("aabb", "a", "bfloat16", enable_prefix_caching=False, **bits), SAMPLED)
    llm = split("aabb", "a", "bfloat16", **bits)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED)
    assert [visible_parts(o.outputs) for o in outputs] == alone
    assert sum(o.speculation.accepted for o in outputs) > 0


def test_samples_fork_in_every_pool(split: Split) -> None:
    params = SamplingParams(**{**vars(SAMPLED), "n": 3})
    alone, _ = expected(split("aabb", "a", enable_prefix_caching=False), params)
    assert [
        visible_parts(o.outputs) for o in split("aabb", "a").generate(token_prompts(PROMPTS), params)
    ] == alone


def test_a_path_moved_in_one_pool_only_is_detected(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, truth = expected(split("aabb", "a"), SAMPLED)
    llm = split("aabb", "a")
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})

    def careless(self: SplitPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.parts[0].move(sources, targets)

    monkeypatch.setattr(SplitPool, "move", careless)
    assert [visible_parts(o.outputs) for o in llm.generate(token_prompts(PROMPTS), SAMPLED)] != alone


# ---- memory


def test_the_tightest_device_decides(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers here, one there, and a draft of four layers here: 3 + 4 to 1."""
    llm = split("aaab", "a")
    one = llm.engine.decoder.footprint.total() // 4
    assert llm.engine.decoder.footprint == Counter({CPU: 3 * one, OTHER: one})
    free = {CPU: 7 * one * PAGE * 40, OTHER: one * PAGE * 20}
    monkeypatch.setattr(memory, "free_memory", lambda device, share: free[device])
    llm.use({"method": "draft_model", "model": llm.engine.checkpoint.name})
    assert llm.engine.cache.pages == 20
    free[CPU] = 7 * one * PAGE * 18
    llm.use({"method": "draft_model", "model": llm.engine.checkpoint.name})
    assert llm.engine.cache.pages == 18
    free[OTHER] = one * PAGE * 15
    with pytest.raises(CapacityError, match=f"K/V memory of {one * PAGE * 15:,} bytes holds 240 tokens"):
        llm.use(None)


# ---- a draft elsewhere


def test_a_draft_on_another_device(four: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft samples on its own kernels; its drafts are nearly always right, the tokens the target's."""

    def backend(device: torch.device, dtype: torch.dtype, *given: str) -> Any:
        return TorchBackend(OTHER, dtype) if device == OTHER else backend_for(device, dtype)

    monkeypatch.setattr(decoder, "backend_for", backend)
    monkeypatch.setattr(loading, "pick_device", lambda name, option: {"other": OTHER}[name])
    llm = LLM(four, max_num_seqs=4)
    alone, _ = expected(LLM(four, enable_prefix_caching=False), SAMPLED)
    for siblings in (1, 2):
        llm.use(
            {
                "method": "draft_model",
                "model": four,
                "draft_device": "other",
                "siblings": siblings,
                "num_speculative_tokens": 4,
            }
        )
        drafter: Any = llm.engine.drafter
        assert drafter.decoder.device == OTHER and isinstance(drafter.sampler.backend, TorchBackend)
        assert llm.engine.decoder.device == CPU and not isinstance(llm.engine.sampler.backend, TorchBackend)
        outputs = llm.generate(token_prompts(PROMPTS), SAMPLED)
        assert [visible_parts(o.outputs) for o in outputs] == alone
        assert sum(o.speculation.accepted for o in outputs) > sum(o.speculation.steps for o in outputs)
        check_idle(llm)


def test_a_draft_in_two_parts(four: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain goes level by level then, through both parts: the target's own draft is nearly always right."""
    monkeypatch.setattr(decoder, "backend_for", lambda device, dtype, *given: backend_for(CPU, dtype))
    monkeypatch.setattr(loading, "place", lambda layers, *given: Placement((CPU, CPU, OTHER, OTHER), CPU))
    llm = LLM(four, max_num_seqs=4, speculative_config={"model": four, "num_speculative_tokens": 4})
    drafter: Any = llm.engine.drafter
    assert len(drafter.decoder.parts) == len(drafter.pool.parts) == 2
    alone, _ = expected(LLM(four, enable_prefix_caching=False), SAMPLED)
    outputs = llm.generate(token_prompts(PROMPTS), SAMPLED)
    assert [visible_parts(o.outputs) for o in outputs] == alone
    assert sum(o.speculation.accepted for o in outputs) > sum(o.speculation.steps for o in outputs)


# ---- which layers go where


def test_the_last_layers_go_to_the_gpu() -> None:
    assert place(3, CPU, None) == place(3, CPU, 0) == Placement((CPU,) * 3, CPU)
    assert place(3, GPU, None) == place(3, GPU, 4) == place(3, GPU, 99) == Placement((GPU,) * 3, GPU)
    assert place(3, GPU, 0) == Placement((CPU,) * 3, CPU)
    assert place(3, GPU, 1) == Placement((CPU, CPU, GPU), CPU)
    assert place(3, GPU, 3) == Placement((GPU,) * 3, CPU)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_bad_number_of_layers(value: Any, four: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu_layers must be a whole number of at least 0.*got"):
        LLM(four, gpu_layers=value)
    with pytest.raises(ConfigError, match="draft_gpu_layers must be a whole number"):
        LLM(four, speculative_config={"model": four, "draft_gpu_layers": value})


@needs_none
def test_layers_on_a_gpu_that_is_not_there(four: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^gpu_layers = 2 needs a GPU, and this model's device is 'cpu'.*or leave it out"
    ):
        LLM(four, gpu_layers=2)
    with pytest.raises(ConfigError, match="draft_gpu_layers = 2 needs a GPU"):
        LLM(four, speculative_config={"model": four, "draft_gpu_layers": 2})
    assert LLM(four, gpu_layers=0).generate(token_prompts(PROMPTS[:1]), GREEDY)


@needs_none
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "nonsense", 5])
def test_a_device_that_is_not_there(name: Any, four: str) -> None:
    with pytest.raises(ConfigError, match=f"^device {name!r} cannot be used"):
        LLM(four, device=name)
    with pytest.raises(ConfigError, match=f"^draft_device {name!r} cannot be used"):
        LLM(four, speculative_config={"model": four, "draft_device": name})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layers", [0, 1, 3, 4, 5, None])
def test_a_gpu_that_is_there(layers: int | None, four: str) -> None:
    llm = LLM(
        four, device="cuda", gpu_layers=layers, speculative_config={"model": four, "draft_device": "cpu"}
    )
    whole = LLM(four, device="cpu").generate(token_prompts(PROMPTS), GREEDY)
    outputs = llm.generate(token_prompts(PROMPTS), GREEDY)
    assert (
        sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, whole))
        > len(PROMPTS) // 2
    )
    assert {part.backend.device.type for part in llm.engine.decoder.parts} == (
        {"cpu"} if layers == 0 else {"cpu", "cuda"} if layers in (1, 3) else {"cuda"}
    )
