"""Gemma and mixtures of experts through the whole engine, on the Triton kernels: no token is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import answer
from interpreted import DEVICE, Rerun, needs_triton
from syncs import Syncs

from outrider import LLM, SamplingParams
from outrider.models.decoder import Decoder
from outrider.models.selftest import bit_exact
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
    tiny_checkpoint,
    visible_parts,
)

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of masked lanes
]
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
KINDS = ["sliding_attention", "full_attention"]
GEMMA = {**SMALL, "head_dim": 16, "intermediate_size": 32, "sliding_window": 5, "query_pre_attn_scalar": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": KINDS}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SMALL, **EXPERTS, "head_dim": 16, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **SMALL,
            **EXPERTS,
            "head_dim": 16,
            "intermediate_size": 16,
            "sliding_window": 5,
            "rope_parameters": YARN,
            "swiglu_limit": 1.5,
        },
    ),
}
PROMPTS = random_prompts(2, seed=3, longest=7)
PARAMS = [
    SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature, top_k=40, seed=7)
    for temperature in (0.0, 1.0)
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, config = FAMILIES[request.param]
    return tiny_checkpoint(tmp_path_factory.mktemp("variant") / "model", family, **config)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    from outrider.backends.triton import attention, jobs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "triton")
        if DEVICE.type == "cpu":
            patch.setattr(attention, "BLOCK", 16)
            patch.setattr(attention, "SPLIT", 16)
            patch.setattr(jobs, "ROWS", (16,))
            patch.setattr(jobs, "LEAST_KEYS", 32)
            patch.setattr("outrider.engine.engine.bit_exact", lambda decoder: True)  # takes half a minute
        made = LLM(model, device=DEVICE.type, dtype="float32", enable_prefix_caching=False)
        assert made.engine.exact and made.engine.decoder.backend.name.startswith("Triton")
        assert isinstance(made.engine.decoder, Decoder)
        yield made


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    """Outputs of each prompt alone, without speculation and without graphs on a CPU."""
    return [answer(llm, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]


@pytest.fixture
def own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs of the target and of a draft model, each recorded at once."""
    from outrider.backends.triton import graphs

    made = graphs.graphs_for(DEVICE) or graphs.Graphs(Rerun())
    monkeypatch.setattr(graphs, "WORTH", 0.0)
    monkeypatch.setattr(graphs, "graphs_for", lambda device: made)
    monkeypatch.setattr(llm.engine.decoder.backend, "graphs", made)
    return made


def test_the_kernels_give_the_tokens_of_the_reference(
    plain: list[Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    reference = LLM(model, device="cpu", dtype="float32")
    expected = [answer(reference, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]
    assert [visible_parts(o) for o in plain] == [visible_parts(o) for o in expected]


def test_trees_in_graphs_leave_the_tokens_unchanged_with_one_read_a_step(
    llm: LLM, plain: list[Any], own: Any
) -> None:
    """Prefill beside decoding, greedy beside sampled, right tokens inside random trees."""
    truth, seen = KnownTexts(), Syncs()
    for prompt, p, outputs in zip(PROMPTS, PARAMS, plain):
        truth.learn(prompt, p.seed or 0, outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 6, "num_speculative_tokens": 3})
    steps = llm.engine.steps
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.accepted for o in outputs) > 0
    assert seen.seen == ["tolist"] * (llm.engine.steps - steps)
    assert own.counts.replayed
    check_idle(llm)


def test_chains_of_a_draft_model_leave_the_tokens_unchanged(
    llm: LLM, model: str, plain: list[Any], own: Any
) -> None:
    llm.use({"model": model, "num_speculative_tokens": 3})
    steps, seen = llm.engine.steps, Syncs()
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.accepted for o in outputs) > 0
    assert set(seen.seen) == {"tolist"} and len(seen.seen) <= 2 * (llm.engine.steps - steps)
    assert own.counts.replayed
    check_idle(llm)


@pytest.mark.full
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_a_tree(llm: LLM) -> None:
    assert bit_exact(llm.engine.decoder)
