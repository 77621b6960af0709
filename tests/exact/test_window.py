"""A draft with a K/V budget, and the target as its own draft: drafts, and no trace in the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer, token_prompts, write_adapter

from outrider import LLM, LoRARequest, RequestOutput, SamplingParams
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.draft.draft_model import DraftModel
from outrider.models.decoder import Decoder
from outrider.testing import (
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    tiny_checkpoint,
    visible_parts,
)

PROMPTS = [random_prompts(1, seed=i, longest=40)[0] * 3 + random_prompts(1, seed=9 + i)[0] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 7},
]
MIXED = [
    SamplingParams(max_tokens=16 + 4 * i, seed=i, ignore_eos=True, **sampling)
    for i, sampling in enumerate(SAMPLING)
]


def heard(
    llm: LLM,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    prompts: Any = PROMPTS,
    params: Any = MIXED,
    one_call: bool = True,
) -> list[Any]:
    """Draft tokens of every step while the prompts are answered."""
    draft_tree: list[Any] = []
    propose = DraftModel.propose

    def listening(self: DraftModel, batch: Batch) -> Draft:
        draft = propose(self, batch)
        draft_tree.append([(tree.tokens, tree.parents) for tree in draft.trees])
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "propose", listening)
        if not one_call:
            patch.setattr(Decoder, "fuses_chains", False)
        llm.use({"method": "draft_model", "num_speculative_tokens": 4, **config})
        llm.generate(token_prompts(prompts), params)
    check_idle(llm)
    return draft_tree


# ---- draft tokens


def by_definition(
    folder: str, tokens: list[int], sink: int, recent: int, depth: int, itself: bool
) -> list[int]:
    """The best tokens of transformers' own model under the mask of the window."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    near = getattr(model.config, "sliding_window", None) or 1000
    end, text = len(tokens), list(tokens)
    while len(text) < end + depth:
        n = len(text)
        sees = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - near)
        for p in range(end - 1 if itself else 0, n):
            first = end - 1 if itself else min(p, end - 1) // recent * recent
            sees[p, sink : max(sink, first + 1 - recent)] = False
        mask = torch.zeros(1, 1, n, n).masked_fill(~sees, float("-inf"))
        with torch.no_grad():
            logits = model(
                torch.tensor([text]), attention_mask=mask, position_ids=torch.arange(n)[None]
            ).logits
        text.append(int(logits[0, -1].argmax()))
    return text[end:]


@pytest.mark.parametrize(
    ("backend", "target", "draft", "recent"),
    [
        ("", "llama", "random_draft", 10),
        ("", "llama", "self", 10),
        ("", "mistral", "self", 5),
        ("torch", "mistral", "self", 5),
    ],
)
def test_drafts_equal_the_masked_model(
    backend: str,
    target: str,
    draft: str,
    recent: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt in one chunk, three times as long as the budget and more, and a chain of four."""
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    itself, llm = draft == "self", LLM(request.getfixturevalue(target))
    folder = request.getfixturevalue(target if itself else draft)
    config = {"model": draft if itself else folder, "draft_kv_budget": 3 + recent, "draft_kv_sink": 3}
    different = 0
    for prompt in PROMPTS:
        first = (
            answer(llm, prompt, SamplingParams(temperature=0, max_tokens=1)).outputs[0].token_ids
            if itself
            else []
        )
        steps = heard(llm, config, monkeypatch, [prompt], GREEDY)
        got = next(tokens for ((tokens, _),) in steps if tokens)
        asked = folder, [*prompt, *first]
        assert got == by_definition(*asked, 3, recent, 4, itself)
        different += got != by_definition(*asked, 3, 1000, 4, itself)
    assert different, "the budget should have mattered"


@pytest.mark.parametrize(
    "config", [{}, {"siblings": 3}, {"draft_dtype": "bfloat16"}], ids=["chain", "tree", "bfloat16"]
)
def test_kv_budget_of_the_whole_context_changes_no_draft(
    config: dict[str, Any], fast: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": random_draft, **config}
    everything = heard(fast, config, monkeypatch)
    fast.engine.forget_prefixes()
    assert heard(fast, {**config, "draft_kv_budget": 256}, monkeypatch) == everything
    assert heard(fast, {**config, "draft_kv_budget": 9}, monkeypatch) != everything


@pytest.mark.parametrize("model", ["random_draft", "self"])
def test_fused_chain_equals_level_by_level_chain(
    model: str, fast: LLM, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different distributions and lengths, all longer than the budget."""
    config = {"model": model if model == "self" else request.getfixturevalue(model), "draft_kv_budget": 20}
    steps = [heard(fast, config, monkeypatch, one_call=one_call) for one_call in (True, False)]
    assert steps[0] == steps[1]
    assert sum(len(tokens) for step in steps[0] for tokens, _ in step) > 40


# ---- the target as its own draft


@pytest.fixture(scope="module")
def gemma2(checkpoints: Path) -> str:
    """Every other layer sees eight tokens."""
    return tiny_checkpoint(checkpoints / "gemma2", "Gemma2", sliding_window=8)


@pytest.fixture(scope="module")
def vaultgemma(checkpoints: Path) -> str:
    """The same in a family that transformers' own code runs."""
    return tiny_checkpoint(checkpoints / "vaultgemma", "VaultGemma", sliding_window=8)


def always_right(output: RequestOutput) -> bool:
    """The first token comes with the prompt, or with draft tokens after a cached prompt; then four a step."""
    return output.speculation.steps <= 1 + -(-(output.speculation.emitted - 1) // 4)


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2", "vaultgemma"])
def test_itself_is_right_as_far_as_it_sees(model: str, siblings: int, request: pytest.FixtureRequest) -> None:
    """With everything in view it drafts its own text, also sampled, and where layers have windows."""
    folder = request.getfixturevalue(model)
    budget = {"mistral": 14}.get(model, 256)
    llm = LLM(folder, max_num_seqs=4, speculative_config={
        "method": "draft_model", "model": "self", "draft_kv_budget": budget, "num_speculative_tokens": 3,
        "siblings": siblings,
    })  # fmt: skip
    outputs = run_staggered(llm, PROMPTS, MIXED)
    assert [visible_parts(o.outputs) for o in outputs] == [
        visible_parts(answer(LLM(folder), p, params).outputs) for p, params in zip(PROMPTS, MIXED)
    ]
    check_statistics([sample for o in outputs for sample in o.outputs])
    assert all(always_right(o) for o in outputs[siblings > 1 :]), (
        "a greedy tree keeps what is likely, not only what is best"
    )
    check_idle(llm)


def test_self_drafting_allocates_no_memory(llama: str) -> None:
    config = {"method": "draft_model", "model": "self", "draft_kv_budget": 16}
    plain, drafting = LLM(llama), LLM(llama, speculative_config=config)
    assert drafting.engine.drafter.footprint(drafting.engine.device).total() == 0
    assert len(drafting.engine.cache.pools) == 1
    assert drafting.engine.drafter.decoder is drafting.engine.decoder  # type: ignore[attr-defined]
    assert drafting.engine.cache.pages >= plain.engine.cache.pages


@pytest.mark.parametrize("siblings", [1, 3])
def test_what_itself_wrote_does_not_stay(siblings: int, llama: str) -> None:
    """Bit for bit the K/V of plain decoding, after every step, for all committed tokens of all rows."""
    plain, llm = LLM(llama, max_num_seqs=4), LLM(llama, max_num_seqs=4)
    llm.use(
        {
            "method": "draft_model",
            "model": "self",
            "draft_kv_budget": 8,
            "num_speculative_tokens": 3,
            "siblings": siblings,
        }
    )

    def held(engine: Any) -> dict[tuple[str, int], torch.Tensor]:
        pool = engine.cache.pools[0].data
        rows = [row for row in engine.scheduler.running if row.table is not None]
        return {
            (row.id, p): pool[:, :, row.table.slots[p]].clone() for row in rows for p in range(row.computed)
        }

    expected: dict[tuple[str, int], torch.Tensor] = {}
    run_staggered(plain, PROMPTS, MIXED, on_step=lambda: expected.update(held(plain.engine)))
    compared = 0

    def compare() -> None:
        nonlocal compared
        for key, kv in held(llm.engine).items():
            assert torch.equal(kv, expected[key]), key
            compared += 1

    outputs = run_staggered(llm, PROMPTS, MIXED, on_step=compare)
    assert compared > 500
    assert any(0 < o.speculation.accepted < o.speculation.drafted for o in outputs), (
        "some drafts should be right and some wrong"
    )


@pytest.mark.parametrize("siblings", [1, 2])
def test_self_drafting_applies_the_requests_adapter(siblings: int, llama: str, tmp_path: Path) -> None:
    """A request's adapter drafts as well: with everything in view all draft tokens are right."""
    llm = LLM(llama, max_num_seqs=4, enable_lora=True, max_loras=2)
    for i in (1, 2):
        write_adapter(tmp_path / str(i), llama, i)
    one, other = (LoRARequest(str(i), i, str(tmp_path / str(i))) for i in (1, 2))
    chosen = [one, None, other, None]
    expected = [
        visible_parts(o.outputs) for o in llm.generate(token_prompts(PROMPTS), MIXED, lora_request=chosen)
    ]
    llm.use(
        {
            "method": "draft_model",
            "model": "self",
            "draft_kv_budget": 256,
            "num_speculative_tokens": 3,
            "siblings": siblings,
        }
    )
    outputs = llm.generate(token_prompts(PROMPTS), MIXED, lora_request=chosen)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert all(always_right(o) for o in outputs[siblings > 1 :])
    check_idle(llm)


@pytest.mark.parametrize("model", ["random_draft", "self"])
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_drafts_are_sampled_if_the_rule_needs_probs(
    rule: str, model: str, fast: LLM, request: pytest.FixtureRequest
) -> None:
    """Every node keeps the q it was sampled from, which allows its token.

    The target with everything in sight is never rejected.
    """
    folder, budget = (model, 256) if model == "self" else (request.getfixturevalue(model), 12)
    siblings = 2 if rule == "traversal" else 1
    fast.use({
        "method": "draft_model", "model": folder, "draft_kv_budget": budget, "verification": rule,
        "num_speculative_tokens": 3,
        "siblings": siblings,
    })  # fmt: skip
    propose, drawn = fast.engine.drafter.propose, 0

    def listening(batch: Batch) -> Draft:
        nonlocal drawn
        draft = propose(batch)
        for row, tree in zip(batch.rows, draft.trees):
            for node, token in enumerate(tree.tokens):
                distribution = tree.distribution(node)
                assert (distribution is not None) == (row.distribution.temperature > 0)
                drawn += distribution is not None and bool(distribution[token] > 0)
        return draft

    fast.engine.drafter.propose = listening  # type: ignore[method-assign]
    outputs = run_staggered(fast, PROMPTS, MIXED)
    assert drawn > 50
    if model == "self" and siblings == 1:
        assert all(map(always_right, outputs))
    check_idle(fast)
