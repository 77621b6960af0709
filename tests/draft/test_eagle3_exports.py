"""EAGLE-3 heads for other engines: exports are read back, and the network in torch is the packed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle3_heads import (
    HEADS,
    INNER,
    KV,
    PAIRS,
    TEXT,
    D,
    H,
    packed,
    random_network,
)
from toys import HIDDEN, V, save_head, toy_target

from outrider import LLM, ConfigError, draft
from outrider.draft.eagle3 import Network
from outrider.heads.layer import Sizes
from outrider.heads.tapped import TAPS
from outrider.train.methods.eagle3 import Eagle3 as Trained

SIZES = Sizes(H, INNER, HEADS, KV, D)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", speculative_config=None)


def test_exports_are_read_back(llm: LLM, tmp_path: Path) -> None:
    """Both layouts have the names of the format and are read back as the same network."""
    network = random_network(SIZES, V, (1, 4, 5), tuple(range(0, V, 4)))
    ours, tensors = {**network.config(), "rope_theta": 5e5}, network.state_dict()
    states, message = torch.randn(PAIRS, 3 * HIDDEN), []
    for layout in ("vllm", "sglang"):
        config, theirs = Trained.export(ours, tensors, layout)
        folder = save_head(tmp_path / layout, config, theirs)
        net, logits = packed(llm, folder, states)
        assert draft.detect(folder) == "eagle3" and net.taps == (1, 4, 5)
        message.append(logits)
    assert torch.equal(*message)
    common = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    vllm, sglang = (Trained.export(ours, tensors, layout) for layout in ("vllm", "sglang"))
    assert common < vllm[1].keys() and common < sglang[1].keys()
    assert {name.split(".")[0] for name in vllm[1].keys() - common} == {"layers"}
    assert {name.split(".")[0] for name in sglang[1].keys() - common} == {"midlayer"}
    assert (
        vllm[0]["speculators_model_type"] == "eagle3"
        and vllm[0][TAPS] == [1, 4, 5]
        and vllm[0]["norm_before_residual"] is False
    )
    assert vllm[0]["transformer_layer_config"]["rope_theta"] == 5e5 and "draft_vocab_size" in vllm[0]
    assert sglang[0]["eagle_config"][TAPS] == [0, 3, 4] and sglang[0]["architectures"] == [
        "LlamaForCausalLMEagle3"
    ]


def test_unsupported_exports_are_refused() -> None:
    plain = random_network(SIZES, V, (0, 4, 5))
    with pytest.raises(ConfigError, match="layer 0"):
        Trained.export(plain.config(), plain.state_dict(), "sglang")
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        Trained.export(plain.config(), plain.state_dict(), "vlm")


def test_the_size_of_a_published_file() -> None:
    """The head of Llama-3.1-8B: 850 MB in half precision."""
    with torch.device("meta"):
        network = Network(Sizes(4096, 14336, 32, 8, 128), 128256, (2, 16, 29), range(32000))
    weights = sum(p.numel() for p in network.parameters() if p.dim() > 1)
    attention = 4096 * 8192 + 2 * 1024 * 8192 + 4096**2
    assert weights == 4096 * 12288 + attention + 3 * 4096 * 14336 + 32000 * 4096
    assert round(2 * weights / 1e6, -1) == 850


def test_the_network_in_torch_is_the_packed_one(llm: LLM, tmp_path: Path) -> None:
    """Its first step is a pass over certain pairs; step s goes on as a chain of draft tokens."""
    network = random_network(SIZES, V, (2, 4, 5))
    folder = save_head(tmp_path, network.config(), network.state_dict())
    states = torch.randn(len(TEXT), 3 * HIDDEN)
    _, message = packed(llm, folder, states[:PAIRS])
    steps = len(TEXT) - PAIRS
    with torch.no_grad():
        embedding = llm.engine.decoder.embed(range(V))
        outputs = network.outputs(states, torch.tensor(TEXT), embedding, steps)
        unrolled = [network.logits(o) for o in outputs]
    assert len(unrolled) == steps and all(len(logits) == PAIRS for logits in unrolled)
    torch.testing.assert_close(
        torch.stack([logits[-1] for logits in unrolled]), message, rtol=1e-3, atol=1e-3
    )
