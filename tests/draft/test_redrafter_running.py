"""ReDrafter in the engine: what it learned is accepted, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import token_prompts
from torch import Tensor
from toys import HIDDEN, V, acceptance, read, samples, save_head, teach

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.core.step import FINAL
from outrider.core.tree import ROOT
from outrider.draft.redrafter import Beams, Network, ReDrafter
from outrider.heads.base import State
from outrider.heads.sample import TargetWeights
from outrider.testing import random_prompts


@pytest.fixture(scope="module")
def learned(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    net, outer = Network(HIDDEN, V, layers=1), TargetWeights.of(llm.engine.decoder)
    assert teach(net, net.loss, samples(llm, ReDrafter.needs.states), outer, steps=50) < 2.0
    return save_head(tmp_path_factory.mktemp("learned"), net.config(), dict(net.state_dict()))


def test_drafts_of_a_trained_head_are_accepted(
    target: str, learned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of 4 is far above chance (1/512), trees give more; shifted by one token nothing fits."""
    chain = {"model": learned, "beam_width": 1, "num_speculative_tokens": 4}
    right = acceptance(target, chain)
    assert right > 0.6
    tree = {"model": learned, "beam_width": 6, "nodes": 24, "num_speculative_tokens": 4}
    assert acceptance(target, tree) * 24 >= right * 4
    frontier_tokens = Beams.frontier_tokens.fget  # type: ignore[attr-defined]

    def early(self: Beams) -> list[int]:
        return [self.row.tokens[-2]] if self.frontier == [ROOT] else frontier_tokens(self)

    monkeypatch.setattr(Beams, "frontier_tokens", property(early))
    assert acceptance(target, chain) < 0.3 * right


def test_drafts_use_the_state_that_gave_the_pending_token(
    llm: LLM, learned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any acceptance and any chunks, states equal those of the target reading the text alone."""
    levels, seen = ReDrafter._grow, list[tuple[list[int], Tensor]]()

    def watched(self: ReDrafter, grown: list[Beams], state: State) -> None:
        seen.extend((list(beams.row.tokens), f.clone()) for beams, f in zip(grown, state[0]))
        levels(self, grown, state)

    monkeypatch.setattr(ReDrafter, "_grow", watched)
    llm.use({"model": learned})
    llm.generate(
        token_prompts(random_prompts(4)),
        SamplingParams(temperature=0.7, seed=1, max_tokens=12, ignore_eos=True),
        use_tqdm=False,
    )
    llm.use(None)
    assert len(seen) > 8
    for tokens, state in seen:
        expected = read(llm.engine.decoder, tokens, (FINAL,)).states[FINAL][len(tokens) - 2]
        assert torch.allclose(state, expected, atol=1e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be a whole number in 1 … 64, got 0"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_length": 1}, "beam_length must be a whole number in 2"),
        ({"nodes": True}, "nodes must be a whole number"),
        ({"quantization": "int3"}, "unknown quantization"),
        ({"beam_widht": 3}, "Did you mean 'beam_width'"),
        ({}, "needs 'model'"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.use({"method": "redrafter", **options})


def test_beam_length_counts_the_token_it_begins_with(llm: LLM, learned: str) -> None:
    """The reference's ten beams of four tokens, of which three are drafted."""
    llm.use({"method": "redrafter", "model": learned})
    assert llm.engine.controller.max_depth == 3 and llm.engine.drafter.options.beam_width == 10
    llm.use({"method": "redrafter", "model": learned, "beam_length": 3, "beam_width": 2})
    assert llm.engine.controller.max_depth == 2 and llm.engine.drafter.size(2) == 4
    llm.use({"model": learned, "beam_length": 3, "num_speculative_tokens": 6})
    assert llm.engine.controller.max_depth == 6 and llm.engine.drafter.size(6) == 7
    with pytest.raises(ConfigError, match="judges chains"):
        llm.use({"model": learned, "verification": "block"})
    llm.use({"model": learned, "verification": "block", "beam_width": 1})
    llm.use(None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("rnn_u.bias"), "no tensor 'rnn_u.bias'"),
        (lambda t: t.pop("rnn_u.weight"), "no tensor 'rnn_u.weight'"),
        (
            lambda t: (t.pop("rnn_u.weight"), t.pop("rnn_u.bias"), t.pop("rnn_w.weight")),
            "no tensor 'rnn_u.bias'",
        ),
        (lambda t: t.pop("lm_head.0.linear.bias"), "no tensor 'lm_head.0.linear.bias'"),
        (lambda t: t.pop("lm_head.1.linear.weight"), "no tensor 'lm_head.1.linear.weight'"),
        (lambda t: t.pop("lm_head.2.weight"), "no tensor 'lm_head.2.weight'"),
        (
            lambda t: t.update({"lm_head.2.weight": torch.zeros(V, 64)}),
            r"is \(512, 64\), and \(512, 128\) is needed",
        ),
        (lambda t: t.update({"rnn_w.weight": torch.zeros(64, 64, dtype=torch.int32)}), "torch.int32"),
    ],
)
def test_damaged_heads_are_refused(damage: Any, message: str, llm: LLM, tmp_path: Path) -> None:
    net = Network(HIDDEN, V)
    tensors = dict(net.state_dict())
    damage(tensors)
    folder = save_head(tmp_path / "head", net.config(), tensors)
    with pytest.raises(ModelError, match=message):
        llm.use({"method": "redrafter", "model": folder})


@pytest.mark.parametrize("given", [{"hidden": 32}, {"vocabulary": 500}, {"hidden": 32, "rnn": False}])
def test_a_head_for_another_target_is_refused(given: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    net = Network(**{"hidden": HIDDEN, "vocabulary": V, **given})
    folder = save_head(tmp_path / "head", net.config(), dict(net.state_dict()))
    with pytest.raises(ModelError, match=r"does not fit the target: its .* is \(.*\), and \(.*\) is needed"):
        llm.use({"model": folder})


def test_a_truncated_file_is_refused(llm: LLM, learned: str, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        whole = (Path(learned) / name).read_bytes()
        (folder / name).write_bytes(whole if name == "config.json" else whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt or truncated"):
        llm.use({"method": "redrafter", "model": str(folder)})
