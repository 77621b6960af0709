"""EAGLE-3 in the engine: alignment of states and tokens, a trained head, and a head of another target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import naive, official
from families import write
from torch import Tensor
from toys import HIDDEN, LAYERS, V, acceptance, read, samples, save_head, teach

from outrider import LLM, SamplingParams
from outrider.core.step_input import StepInput
from outrider.draft.eagle3 import Eagle3, Network
from outrider.heads import recurrent
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights
from outrider.testing import use_example

TAPS = (2, LAYERS // 2, LAYERS - 3)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def head(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head trained on the target's texts, with a vocabulary of their 256 most frequent tokens."""
    llm = LLM(target, dtype="float32", speculative_config=None)
    data, outer = samples(llm, TAPS), TargetWeights.of(llm.engine.decoder)
    common = Counter(token for sample in data for token in sample.tokens[6:].tolist())
    drafted = tuple(sorted(token for token, _ in common.most_common(256)))
    torch.manual_seed(0)
    network = Network(Sizes(HIDDEN, 2 * HIDDEN, 4, 2, 16), V, TAPS, drafted)
    network.lm_head.weight.data.copy_(outer.lm_head[list(drafted)])  # as trainers begin
    network.steps = 2
    teach(network, network.loss, data, outer, steps=40, rate=1e-2)
    return save_head(tmp_path_factory.mktemp("head"), network.config(), network.state_dict())


def test_drafts_of_a_trained_head_are_accepted(target: str, head: str) -> None:
    """Chance is 1/512 a draft token; in a tree most nodes cannot be right."""
    config = {"method": "eagle3", "model": head}
    assert acceptance(target, {**config, "tree": "chain", "num_speculative_tokens": 1}) > 0.5
    for tree in ("dynamic", "mc_sim_7b_63"):
        assert acceptance(target, {**config, "tree": tree, "num_speculative_tokens": 3, "nodes": 9}) > 0.1


@pytest.mark.parametrize(
    ("keys", "depth", "nodes"),
    [({}, 7, 7), ({"nodes": 4}, 4, 4), ({"tree": "chain"}, 5, 5), ({"tree": "mc_sim_7b_63"}, 5, 7)],
)
def test_trees_on_a_cpu_are_deep_by_default(
    target: str, head: str, keys: dict[str, Any], depth: int, nodes: int
) -> None:
    """Two siblings a level in a tree of 5 levels cost as much as 7 levels of one."""
    llm = LLM(target, dtype="float32", speculative_config={"method": "eagle3", "model": head, **keys})
    drafter = llm.engine.drafter
    assert (drafter.depth, drafter.size(drafter.depth)) == (depth, nodes)


def test_a_shift_of_states_against_tokens_is_caught(
    target: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of the state at t and the token x_t, not the one that followed."""

    class Shifted(StepInput):
        def chain(self, table: Any, start: int, tokens: Any, shift: int = 0) -> None:
            super().chain(table, start, [7, *tokens[:-1]], shift)

    monkeypatch.setattr(recurrent, "StepInput", Shifted)
    config = {"method": "eagle3", "model": head, "tree": "chain", "num_speculative_tokens": 1}
    assert acceptance(target, config) < 0.25


# ---- which state meets which token


def listened(llm: LLM) -> list[Tensor]:
    """Gets the logits of every level that the head is asked for."""
    net: Any = llm.engine.drafter.net
    heard, say = [], net.logits

    def logits(o: Tensor) -> Tensor:
        heard.append(say(o).clone())
        return heard[-1]

    net.logits = logits
    return heard


def test_pairs_of_states_and_tokens(target: str, tmp_path: Path) -> None:
    """Two levels of some steps equal the naive forward over the whole text, also after a prefix hit."""
    config, tensors = official()
    folder = save_head(tmp_path, config, tensors)
    plain = LLM(target, dtype="float32", speculative_config=None)
    speculation = {"method": "eagle3", "model": folder, "tree": "chain", "num_speculative_tokens": 2}
    llm = LLM(
        target, dtype="float32", speculative_config=speculation, max_num_batched_tokens=24
    )  # the prompt comes in two chunks
    prompt = [(37 * i) % V for i in range(40)]
    output = plain.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
    heard, ids = listened(llm), tensors["d2t"] + torch.arange(128)
    assert llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids == output
    for step in range(2):
        levels, text = torch.cat(heard[2 * step : 2 * step + 2]), prompt + list(output[: step + 1])
        sample = read(plain.engine.decoder, text[:-1], TAPS)
        states = torch.cat([sample.states[tap] for tap in TAPS], dim=-1)
        text.append(int(ids[levels[0].argmax()]))
        expected = naive(config, tensors, states, plain.engine.decoder.embed(range(V)), text, len(text) - 2)
        torch.testing.assert_close(levels.double(), expected, rtol=1e-3, atol=1e-3)
    before = [*heard]
    heard.clear()
    again = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0]
    assert again.num_cached_tokens and again.outputs[0].token_ids == output
    torch.testing.assert_close(torch.cat(heard), torch.cat(before), rtol=1e-4, atol=1e-4)


# ---- a target that transformers runs


@pytest.fixture(scope="module", params=["vaultgemma", "qwen2-moe", "opt-post-norm-projected"])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write(request.param, folder)
    yield LLM(str(folder), dtype="float32", max_model_len=128, speculative_config=None), model


def test_the_states_of_a_fallback_target(other: tuple[LLM, Any]) -> None:
    """Inputs of its layers equal transformers' hidden states; the embedding has no family scale."""
    llm, model = other
    drafter = Eagle3.example(llm.engine.target)
    taps, tokens = drafter.needs.states, [5, 9, 200, 31, 7, 7, 120]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    sample = read(llm.engine.decoder, tokens, taps)
    for tap in taps:
        if tap < llm.engine.decoder.spec.layers:  # the last one of transformers went through the norm
            torch.testing.assert_close(sample.states[tap], theirs[tap][0], rtol=1e-3, atol=1e-4)
    stored = model.get_input_embeddings().weight[tokens].detach()
    torch.testing.assert_close(llm.engine.decoder.embed(tokens).float(), stored)


def test_the_text_of_a_fallback_target(other: tuple[LLM, Any]) -> None:
    llm, _ = other
    prompts = [{"prompt_token_ids": [(i * n) % 290 for i in range(1, n)]} for n in (5, 9, 23)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(3)
    ]
    llm.use(None)
    plain = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    use_example(llm, "eagle3")
    fast = llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in fast] == plain
    assert sum(out.speculation.drafted for out in fast) > 0
