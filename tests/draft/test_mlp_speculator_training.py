"""The networks of MLP speculators as published: names, sizes, export and training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlp_speculator_files import lstm
from torch import Tensor, nn
from toys import HIDDEN, V, acceptance, read, samples, save_head, teach

from outrider import LLM, ConfigError, SamplingParams
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.tree import ROOT
from outrider.draft.mlp_speculator import MlpSpeculator, Network
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.trees import RankTree
from outrider.testing import EngineDriver
from outrider.train.methods.mlp_speculator import MlpSpeculator as Trained

INNER = 64
NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: Network(HIDDEN, INNER, V),
    "mlp, tied, scaled": lambda: Network(HIDDEN, INNER, V, 4, tie_weights=True, scale_input=True),
    "one step": lambda: Network(HIDDEN, INNER, V, 1),
}


@pytest.fixture(scope="module")
def lessons(llm: LLM) -> tuple[list[Sample], TargetWeights]:
    return samples(llm, (FINAL,)), TargetWeights.of(llm.engine.decoder)


def loaded(llm: LLM, config: dict[str, Any], tensors: dict[str, Tensor]) -> MlpSpeculator:
    return MlpSpeculator(MlpSpeculator.Options(), llm.engine.target, Head.of("made", config, tensors))


@pytest.mark.parametrize("name", NETWORKS)
def test_trained_network_equals_the_drafter(name: str, llm: LLM) -> None:
    """Its logits equal the drafter over the saved file and over every export."""
    torch.manual_seed(1)
    network = NETWORKS[name]()
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    states, tokens, steps = (
        torch.randn(6, HIDDEN),
        torch.randint(V, (5 + network.n_predict,)),
        network.n_predict,
    )
    with torch.no_grad():
        expected = [head(s) for head, s in zip(network.head, network.outputs(states, tokens))]
    layouts = ("reference", "arctic", "vllm")
    files = [Trained.export(network.config(), network.state_dict(), layout) for layout in layouts]
    files.append((network.config(), network.state_dict()))
    for config, tensors in files:
        drafter = loaded(llm, config, tensors)
        assert drafter.depth == steps
        state = drafter.begin(states)
        for i in range(steps):
            state, logits = drafter.advance(i, state, tokens[i : i + 6].tolist())
            assert torch.allclose(logits, expected[i], atol=1e-4)


def test_export_has_the_published_names() -> None:
    ibm = {f"{kind}.{i}.weight" for kind in ("emb", "proj", "ln", "head") for i in range(4)} | {
        f"ln.{i}.bias" for i in range(4)
    }
    for tied in (False, True):
        network = Network(8, 8, 10, 4, tie_weights=tied)
        assert set(network.state_dict()) == ibm
        config, tensors = Trained.export(network.config(), network.state_dict(), "vllm")
        assert set(tensors) == {f"speculator.{name}" for name in ibm}
        assert (
            config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
            and config["model_type"] == "mlp_speculator"
        )
        assert {
            "emb_dim": 8,
            "inner_dim": 8,
            "vocab_size": 10,
            "n_predict": 4,
            "tie_weights": tied,
        }.items() <= config.items()
        assert len(config["top_k_tokens_per_head"]) == 4
        assert Trained.export(network.config(), network.state_dict(), "arctic")[0]["architectures"] == [
            "ArcticMLPSpeculatorPreTrainedModel"
        ]


def test_exports_keep_the_architecture_of_arctics_methods() -> None:
    case = lstm(False)
    config = {**case.config, "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}
    assert Trained.export(config, case.stored, "arctic")[0] == config


def test_unsupported_exports_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown layout 'vlm'\. Did you mean 'vllm'"):
        Trained.export({}, {}, "vlm")


@pytest.mark.parametrize(
    ("sizes", "settings", "millions"),
    [
        ((4096, 3072, 128256, 4), {}, 6390 / 2),  # llama3-8b-accelerator: 6.39 GB
        ((5120, 4096, 32000, 3), {}, 1680 / 2),  # llama-13b-accelerator: 1.68 GB
        ((6144, 4096, 49152, 4), {}, 1686),  # "gpt_bigcode.ibm.20b.1_7b"
        ((8192, 3584, 128256, 4), {"tie_weights": True, "scale_input": True}, 961),  # "llama.llama3.70b.961m"
        ((8192, 8192, 32000, 5), {"tie_weights": True, "scale_input": True}, 658),  # "llama.34b.code.658m"
        (
            (6144, 6144, 49152, 5),
            {"tie_weights": True, "scale_input": True},
            680,
        ),  # "gpt_bigcode.ibm.34b.680m"
    ],
)
def test_sizes_of_published_files(
    sizes: tuple[int, int, int, int], settings: dict[str, bool], millions: float
) -> None:
    with torch.device("meta"):
        network = Network(*sizes, **settings)
    hidden, inner, vocabulary, steps = sizes
    copies, links = (1, 1) if settings else (steps, steps - 1)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == copies * (2 * vocabulary * inner + 2 * inner) + inner * (hidden + links * inner)
    assert count / 1e6 == pytest.approx(millions, rel=2e-3)


def test_trained_speculator_is_accepted(
    target: str,
    llm: LLM,
    lessons: tuple[list[Sample], TargetWeights],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chance is 1/512.  With the token before the pending one, what was learnt is of little use."""
    torch.manual_seed(2)
    network = NETWORKS["mlp"]()
    for embedding, lm_head in zip(network.emb, network.head):
        embedding.get_parameter("weight").data.copy_(lessons[1].embedding)
        lm_head.get_parameter("weight").data.copy_(lessons[1].lm_head)
    teach(network, network.loss, *lessons, steps=60, rate=1e-2)
    speculation = {"model": save_head(tmp_path, network.config(), network.state_dict())}
    learnt = acceptance(target, {**speculation, "num_speculative_tokens": 1})
    assert learnt > 0.2
    assert acceptance(target, speculation) > learnt / 3, "the later steps are right at times, too"
    with monkeypatch.context() as shifted:
        shifted.setattr(
            RankTree, "token", lambda tree, node: tree.row.tokens[-2] if node == ROOT else tree.tokens[node]
        )
        assert acceptance(target, {**speculation, "num_speculative_tokens": 1}) < learnt / 3
    states_are_of_the_last_computed_token(llm, speculation)


def states_are_of_the_last_computed_token(llm: LLM, speculation: dict[str, Any]) -> None:
    """Alignment of states, which this target would hardly show: its text depends on the last token."""
    llm.use(speculation)
    drafter = llm.engine.drafter
    assert isinstance(drafter, MlpSpeculator)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    driver = EngineDriver(llm)
    requests = [driver.add_request(list(range(i, i + 9)), params) for i in range(4)]
    for _ in range(14):
        driver.step()
        for row, (computed, state) in drafter.last_states.items():
            assert computed == row.computed == len(row.tokens) - 1
            assert torch.equal(
                state[0], read(llm.engine.decoder, row.tokens, (FINAL,)).states[FINAL][computed - 1]
            )
    assert sum(driver.finish(request).outputs[0].speculation.accepted for request in requests) > 0
    assert not drafter.last_states


def test_loss_sums_the_cross_entropy_of_every_step(lessons: tuple[list[Sample], TargetWeights]) -> None:
    """Summed over the steps, each a mean over the places that have its token; by hand for one text."""
    network, sample, outer = NETWORKS["mlp, tied, scaled"](), lessons[0][0], lessons[1]
    tokens, total = sample.tokens.tolist(), 0.0
    padded = torch.nn.functional.pad(sample.tokens, (0, network.n_predict))
    with torch.no_grad():
        for i in range(network.n_predict):
            places = range(len(tokens) - i - 2)
            each = [
                network.head[i](
                    network.outputs(
                        sample.states[FINAL][t : t + 1], padded[t + 1 : t + 1 + network.n_predict]
                    )[i][0]
                )
                for t in places
            ]
            total -= sum(
                float(logits.log_softmax(-1)[tokens[t + i + 2]]) for t, logits in zip(places, each)
            ) / len(places)
        assert float(network.loss(sample, outer)) == pytest.approx(total, rel=1e-4)
    assert isinstance(network, nn.Module) and network.loss(sample, outer).requires_grad
