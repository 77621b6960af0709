"""scripts/gpu_pair.py: figures of every method, and errors of those that fail, after every cell."""

from __future__ import annotations

import copy
from typing import Any

import gpu_pair
import pytest
import torch
from gpu_pair import Options

CPU = torch.device("cpu")


@pytest.mark.parametrize("target", ["wide", "grown"])
def test_every_method_of_a_cell_has_figures(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pair, "GROWN", (9, 1056))
    saved: list[Any] = []
    options = Options([target], [1], ["draft", "eagle3", "auto"], rounds=1, tokens=12, tiny=True)
    found = gpu_pair.pair(options, CPU, lambda found: saved.append(copy.deepcopy(found)))
    assert [[*each[target]] for each in saved] == [["load"], ["load", "batch 1, T = 0.0"]]
    assert saved[-1] == found
    methods = found[target]["batch 1, T = 0.0"]["methods"]
    assert [*methods] == ["plain", "draft", "eagle3", "auto"]
    for method in methods.values():
        assert method["same_texts"] == method["texts"] == 1 and method["tokens"] == 12
    assert methods["draft"]["tokens_per_step"] > 2 and methods["plain"]["gain"] == 1
    assert {*methods["auto"]["chosen"]["outlook"]} >= {"draft_model", "eagle3"}


def test_a_method_that_fails_has_its_error_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = gpu_pair.configs

    def broken(eagle3: str) -> gpu_pair.Configs:
        return configs(eagle3) | {"draft": {"model": "no-such-folder"}}

    once = gpu_pair.once

    def failing(llm: Any, *rest: Any) -> Any:
        if type(llm.engine.drafter).__module__.endswith("ngram"):
            raise RuntimeError("out of memory")
        return once(llm, *rest)

    monkeypatch.setattr(gpu_pair, "configs", broken)
    monkeypatch.setattr(gpu_pair, "once", failing)
    options = Options(["wide"], [1], ["draft", "ngram", "eagle3"], rounds=1, tokens=4, tiny=True)
    methods = gpu_pair.pair(options, CPU, lambda found: None)["wide"]["batch 1, T = 0.0"]["methods"]
    assert "no-such-folder" in methods["draft"]["error"] and "out of memory" in methods["ngram"]["error"]
    assert methods["eagle3"]["tokens_per_second"] > 0
