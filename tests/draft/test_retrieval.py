"""The target as its own draft through chosen pages: which ones, what a draft sees, and the text stays."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer, token_prompts

from outrider import LLM, ConfigError, SamplingParams
from outrider.core.row import Row
from outrider.draft.draft_model.retrieval import RetrievalDrafter
from outrider.drafting.view import Window
from outrider.testing import check_idle, random_prompts, tiny_checkpoint, visible_parts

CONFIG: dict[str, Any] = {
    "model": "self",
    "draft_kv_policy": "retrieval",
    "draft_kv_budget": 3 + 4 * 16,
    "draft_kv_sink": 3,
    "draft_kv_refresh": 2,
    "num_speculative_tokens": 4,
}
PROMPTS = [random_prompts(1, seed=i, longest=40)[0] * 5 for i in range(3)]
PROMPTS[0] = [5 + 7 * i % 250 for i in range(180)]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8, 1.2)]


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_the_text_stays_and_the_pages_change(
    family: str, dtype: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    llm = LLM(tiny_checkpoint(tmp_path, family), kv_cache_dtype=dtype)
    chosen = list[tuple[range, ...]]()
    choose = RetrievalDrafter._choose

    def listening(self: RetrievalDrafter, row: Row, states: torch.Tensor, position: int) -> None:
        before = self.pool.data.clone()
        choose(self, row, states, position)
        assert torch.equal(before, self.pool.data), "the target's K/V was written"
        if row in self.windows:
            chosen.append(self.windows[row].parts)

    monkeypatch.setattr(RetrievalDrafter, "_choose", listening)
    plain = llm.generate(token_prompts(PROMPTS), PARAMS, use_tqdm=False)
    llm.use(CONFIG)
    found = llm.generate(token_prompts(PROMPTS), PARAMS, use_tqdm=False)
    check_idle(llm)
    assert [visible_parts(one.outputs) for one in found] == [visible_parts(one.outputs) for one in plain]
    assert sum(one.speculation.accepted for one in found) > 0
    assert len(set(chosen)) > 3
    drafter = llm.engine.drafter
    assert isinstance(drafter, RetrievalDrafter)
    assert not drafter.windows and not drafter.means and not drafter.steps


def test_pages_are_those_that_the_queries_prefer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own projections and rotation, at the position whose states are known."""
    import transformers
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    folder = tiny_checkpoint(tmp_path)
    llm = LLM(folder, dtype="float32", speculative_config=CONFIG)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = list[tuple[list[int], int, tuple[range, ...]]]()
    choose = RetrievalDrafter._choose

    def listening(self: RetrievalDrafter, row: Row, states: torch.Tensor, position: int) -> None:
        choose(self, row, states, position)
        seen.append((list(row.tokens), position, self.windows[row].parts))

    monkeypatch.setattr(RetrievalDrafter, "_choose", listening)
    answer(llm, PROMPTS[0], PARAMS[0])
    drafter = llm.engine.drafter
    assert isinstance(drafter, RetrievalDrafter) and len(seen) > 3
    for tokens, position, parts in seen:
        ids = torch.tensor([tokens[: position + 1]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
            rope = model.model.rotary_emb(states[0], torch.arange(position + 1)[None])
            total = torch.zeros(())
            first, end = 1, (position + 1 - 32) // 16  # behind are 2 pages of recent tokens
            for layer in drafter.layers:
                block = model.model.layers[layer.number]
                u = block.input_layernorm(states[layer.number])
                shape = (1, position + 1, -1, block.self_attn.head_dim)
                q, k = (
                    linear(u).view(shape).transpose(1, 2)
                    for linear in (block.self_attn.q_proj, block.self_attn.k_proj)
                )
                q, k = apply_rotary_pos_emb(q, k, *rope)
                k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[0, :, first * 16 : end * 16]
                means = k.view(len(k), end - first, 16, -1).mean(2)
                scores = (means @ q[0, :, -1, :, None])[..., 0] * block.self_attn.scaling
                total = total + scores.softmax(-1).sum(0)
        best = sorted((total.topk(2).indices + first).tolist())
        assert parts == (range(3), *(range(16 * page, 16 * page + 16) for page in best))


def test_a_view_has_the_chosen_positions_in_place_of_the_first() -> None:
    slots = array("i", range(100, 200))
    window = Window(sink=5, recent=4, parts=(range(1), range(16, 20)))
    view = window.view(slots, 50, 53)
    assert view.slots.tolist() == [100, 116, 117, 118, 119, *range(147, 153)]
    assert view.slots[50 - view.shift] == slots[50]
    assert window.view(slots, 8, 9).shift == 0, "what fits is seen as it is"


def test_it_is_for_the_target_as_its_own_draft(tmp_path: Path) -> None:
    llama = tiny_checkpoint(tmp_path / "llama")
    for wrong, message in (
        ({"model": llama}, 'is for model "self"'),
        ({"draft_kv_budget": 34}, "at least draft_kv_sink"),
        ({"draft_kv_budget": None}, "has no effect without draft_kv_budget"),
        ({"draft_kv_policy": "recent"}, "draft_kv_refresh = 2 has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(llama, speculative_config={**CONFIG, **wrong})
    with pytest.raises(ConfigError, match="transformers' own code"):
        LLM(tiny_checkpoint(tmp_path, "GPTNeoX"), speculative_config=CONFIG)
