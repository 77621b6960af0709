"""Heads whose decoder layers are divided over the target's ranks."""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import LAYOUTS, check_tokens
from safetensors.torch import save_file

from outrider import LLM, ConfigError
from outrider.config import SpeculativeOptions
from outrider.core.step_input import StepInput
from outrider.heads.base import random_head
from outrider.online.networks import Trainable
from outrider.parallel.layout import Layout

Ranks = Callable[[Layout], LLM]
Plain = Callable[[str, float], list[tuple[object, ...]]]
METHODS: dict[str, dict[str, Any]] = {"eagle": {}, "eagle3": {}, "mtp": {"layers": 2}, "peagle": {}}
SEVERAL = ("tp2pp2", "tp4", "tp2")
QUICK = (("eagle3", "tp2pp2", 0.8), ("mtp", "tp2pp2", 0.8))


def written(folder: Path, llm: LLM, method: str) -> str:
    """The folder of a random head for this engine's target, with four attention heads and one K/V head."""
    target = llm.engine.target_for(SpeculativeOptions.of({"method": method, "model": "a head"}))
    network = import_module(f"outrider.draft.{method}").Network
    head = random_head(network.like, target, **METHODS[method])
    tensors = {name: head.raw(name).detach().clone() for name in head}
    if method == "eagle":  # as its authors do
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config))
    return str(folder)


def use(llm: LLM, method: str, folder: str, ranks: int) -> Any:
    """The network of the head, which so many ranks share."""
    llm.use({"method": method, "model": folder, "draft_tensor_parallel_size": ranks})
    drafter: Any = llm.engine.drafter
    return drafter.net


@pytest.mark.parametrize(
    ("method", "layout", "temperature"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in product(METHODS, SEVERAL, (0.0, 0.8))
    ],
)
def test_a_divided_head_keeps_every_token(
    ranks: Ranks, plain: Plain, crowded: None, tmp_path: Path, method: str, layout: str, temperature: float
) -> None:
    """Also with chunked prompts, preemption and cached prefixes."""
    llm, size = ranks(LAYOUTS[layout]), LAYOUTS[layout].tensor
    expected, folder = plain(layout, temperature), written(tmp_path, llm, method)
    group = llm.engine.decoder.group
    assert use(llm, method, folder, size).stack.divided.group is group
    outputs = check_tokens(llm, expected, temperature)
    assert sum(output.speculation.drafted for output in outputs) > 0
    group.dropped.clear()
    llm.use(None)
    gc.collect()
    assert [name for _, name, *_ in group.dropped].count("unload") == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_divided_head_computes_what_a_whole_one_does(ranks: Ranks, tmp_path: Path, method: str) -> None:
    """Up to the order of sums; each rank has its part of the K/V."""
    llm = ranks(LAYOUTS["tp2pp2"])
    folder, found = written(tmp_path, llm, method), []
    for size in (1, 2):
        net = use(llm, method, folder, size)
        pool, step = net.stack.pool(32), StepInput()
        step.chain(array("i", range(1, 17)), 0, range(5, 17))
        width = net.from_states(torch.zeros(1, len(net.taps) * 64)).shape[1]
        g = torch.randn(12, width, generator=torch.Generator().manual_seed(1))
        found.append(net.forward(step.build(), pool, g).clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert net.stack.divided.stage.share.spec.heads == 2 and not hasattr(net.stack, "layers")
    assert net.stack.divided.stage.blocks[0].layer.down.inputs == net.stack.sizes.inner // 2


def test_a_head_that_cannot_be_divided_so_is_refused(ranks: Ranks, model: str, tmp_path: Path) -> None:
    llm = ranks(LAYOUTS["tp2pp2"])
    folder = written(tmp_path, llm, "eagle")
    with pytest.raises(ConfigError, match="or the target's tensor_parallel_size, 2: got 4"):
        use(llm, "eagle", folder, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size, 1: got 2"):
        use(LLM(model), "eagle", folder, 2)


def test_a_divided_head_is_not_trained_while_serving(ranks: Ranks, tmp_path: Path) -> None:
    llm = ranks(LAYOUTS["tp2pp2"])
    use(llm, "eagle", written(tmp_path, llm, "eagle"), 2)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size 2 is not trained while serving"):
        Trainable.of(llm.engine.drafter)
