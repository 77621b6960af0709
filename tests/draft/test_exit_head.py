"""A trained exit of layer skipping: its numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toys import save_head

from outrider import LLM, SamplingParams
from outrider.draft.layerskip.exit_head import ExitHead, Network
from outrider.errors import ConfigError, ModelError


def saved(folder: Path, llm: LLM, layer: int = 1) -> tuple[str, Network]:
    torch.manual_seed(4)
    hidden = llm.engine.decoder.spec.hidden
    network = Network(hidden, layer, 1 + 0.2 * torch.randn(hidden), 1e-5)
    torch.nn.init.normal_(network.block.linear.weight, std=0.1)
    return save_head(folder, network.config(), dict(network.state_dict())), network


def test_the_packed_exit_equals_a_naive_one_in_float64(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny))
    folder, network = saved(tmp_path / "exit", llm)
    exit_head, decoder = ExitHead(folder, llm.engine.target), llm.engine.decoder
    x = torch.randn(5, decoder.spec.hidden)
    w = {name: tensor.double() for name, tensor in network.state_dict().items()}
    u = x.double() @ w["block.linear.weight"].T + w["block.linear.bias"]
    z = x.double() + u * u.sigmoid()
    z = z / (z.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["norm.weight"]
    expected = z @ decoder.head_logits(torch.eye(decoder.spec.hidden)).double()
    torch.testing.assert_close(exit_head.logits(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert exit_head.layer == 1


def test_drafts_come_from_the_exit_and_leave_the_text(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny))
    folder, _ = saved(tmp_path / "exit", llm)
    rows = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 30}]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
    expected = llm.generate(rows, params)
    given = {"method": "layerskip", "num_speculative_tokens": 3, "exit_threshold": None}
    for rule in ("match", "rejection"):
        found = llm.variant({**given, "exit_head": folder, "verification": rule}).generate(rows, params)
        outputs = [out.outputs[0] for out in found]
        assert all(out.speculation.drafted for out in outputs)
        greedy = 1 if rule == "rejection" else 2
        assert [out.token_ids for out in outputs][:greedy] == [out.outputs[0].token_ids for out in expected][
            :greedy
        ]


def test_exits_of_other_targets_are_refused(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny))
    folder, _ = saved(tmp_path / "exit", llm, layer=2)
    with pytest.raises(ModelError, match=r"its early_exit is 2, and a number in 1 … 1 is needed"):
        llm.variant({"method": "layerskip", "exit_head": folder})
    with pytest.raises(ConfigError, match="early_exit / exit_head: give one of these"):
        llm.variant({"method": "layerskip", "exit_head": folder, "early_exit": 1})
    config = Path(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "early_exit": "one"}))
    with pytest.raises(ModelError):
        llm.variant({"method": "layerskip", "exit_head": folder})
