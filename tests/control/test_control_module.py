"""The control module corrects the bins where it predicts better, and leaves them alone elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider.control import module as modules
from outrider.control.acceptance import BINS, DEEP, Calibration, bin_of, key_of
from outrider.control.module import (
    NODE_INPUTS,
    PLACES,
    REQUEST_INPUTS,
    Corrected,
    Module,
    Network,
    Request,
    load,
    module_for,
    node_inputs,
)
from outrider.errors import ConfigError
from outrider.testing import make_row

METHODS = ["suffix", "draft_model+suffix"]
NAMES = ["suffix", "draft_model"]


def network(bias: float = 0.0, **parts: Any) -> Network:
    """Corrects every node by `bias`, in log-odds, unless told otherwise."""
    made = {
        "node": np.zeros((NODE_INPUTS, 1)),
        "request": np.zeros((REQUEST_INPUTS + len(METHODS), 1)),
        "bias": np.array([1.0]),
        "output": np.array([bias]),
        **parts,
    }
    return Network(
        **{name: part.astype(np.float32) for name, part in made.items()}, methods=METHODS, about={}
    )


def corrected(module: Module, tokens: list[int] | None = None) -> Corrected:
    return Corrected(Calibration(), module, make_row(tokens or [1, 2, 3]))


def odds(probability: float) -> float:
    return probability / (1 - probability)


@pytest.mark.parametrize("confidence", [0.0, 0.004, 0.124, 0.125, 0.5, 0.874, 0.875, 0.96, 0.999, 1.0])
def test_a_cell_is_a_part_of_the_bin_of_its_confidence(confidence: float) -> None:
    for source, depth in ((1, 1), (5, DEEP), (2, DEEP + 9)):
        level = min(depth, DEEP)
        assert bin_of(key_of(source, depth, confidence)) == (
            (source * (DEEP + 1) + level) * (BINS + 1) + int(confidence * BINS)
        )
    assert key_of(1, 1, 1.0000001) == key_of(1, 1, 1.0) != key_of(1, 1, 0.999)
    assert key_of(1, 1, 0.96) != key_of(1, 1, 0.995), "one bin, two cells"


def test_odds_are_multiplied_for_the_methods_that_it_knows() -> None:
    own = corrected(Module(network(0.7), NAMES, trusted=True))
    plain, key = Calibration(Calibration()), key_of(1, 2, 0.6)
    assert odds(own.probability(key)) == pytest.approx(np.exp(0.7) * odds(plain.probability(key)), rel=1e-5)
    both, alone = key_of(3, 2, 0.6), key_of(2, 2, 0.6)
    assert own.probability(both) > plain.probability(both)
    assert own.probability(alone) == plain.probability(alone), "draft_model alone is none of its methods"


def test_one_that_is_not_trusted_changes_nothing_until_it_has_predicted_better() -> None:
    module = Module(network(1.0), NAMES, trusted=False)
    own, plain, key = corrected(module), Calibration(Calibration()), key_of(1, 1, 0.2)
    assert own.probability(key) == plain.probability(key)
    for _ in range(40):
        corrected(module).learn(key, True)  # always accepted, each in a request that has seen nothing
    assert module.used and module.report()["by"] == "module"
    losses = module.report()["log_loss"]
    assert losses["module"] < losses["bins"]
    own.refresh()
    assert own.probability(key) > plain.probability(key)


def test_it_gives_way_to_bins_that_predict_better_and_logs_it(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    network(1.5).save(tmp_path / "module.safetensors")
    with caplog.at_level("DEBUG", "outrider"):
        module = module_for(str(tmp_path / "module.safetensors"), NAMES, trusted=True)
        assert module is not None and "predicted by the control module" in caplog.messages[-1]
        for _ in range(40):
            corrected(module).learn(key_of(1, 1, 0.2), False)
    assert not module.used and module.report()["by"] == "bins"
    assert len(caplog.messages) == 2 and "predicted by calibrated bins" in caplog.messages[-1]


def test_a_request_is_told_apart_by_what_it_repeats_and_how_its_drafts_went() -> None:
    module = Module(network(), NAMES, trusted=True)
    module.pairs = []
    fresh, loop = corrected(module, [*range(64)]), corrected(module, [1, 2] * 40)
    for own, accepted in ((fresh, False), (loop, True)):
        for _ in range(9):
            own.learn(key_of(1, 1, 0.5), accepted)
            own.refresh()
    first, last = module.pairs[8].request, module.pairs[-1].request
    assert first == Request(0, 10, 0, first.luck, 0) and first.luck < 0 < last.luck
    assert last.repetition == 8 and last.streak == 4 and module.pairs[0].request.streak == 0
    assert [node.place for node in module.pairs] == [key_of(0, 1, 0.5)] * 18


def test_tables_agree_with_the_network_at_every_place() -> None:
    random = np.random.default_rng(0)
    shapes = {"node": (NODE_INPUTS, 5), "request": (REQUEST_INPUTS + 2, 5), "bias": (5,), "output": (5,)}
    made = network(**{name: random.normal(0, 0.5, shape) for name, shape in shapes.items()})
    asked = Request(1, 8, 3, -2, 2)
    found = Module(made, NAMES, trusted=True).table(asked)
    assert len(found) == PLACES
    for place in random.integers(PLACES, size=20):
        inner = node_inputs()[place] @ made.node + np.array(asked.inputs(2)) @ made.request + made.bias
        assert np.log(found[place]) == pytest.approx(float(np.maximum(inner, 0) @ made.output), abs=1e-5)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "module.safetensors"
    network(0.25).save(file)
    found = load(file)
    assert found.methods == METHODS and found.output.tolist() == [0.25]
    made = module_for(str(file), ["suffix"], trusted=False)
    assert made is not None and made.used, "a file that was asked for is trusted"
    assert module_for(str(file), ["medusa"], trusted=True) is None and module_for("bins", NAMES, True) is None


WRONG = [
    {"node": np.zeros((3, 1))},
    {"bias": np.array([np.nan])},
    {"output": np.array([3e38])},
    {"output": np.array([-np.inf])},
]


@pytest.mark.parametrize("change", WRONG)
def test_a_file_of_something_else_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "module.safetensors"
    network(**change).save(file)
    with pytest.raises(ConfigError, match="no such network"):
        load(file)
    file.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="outrider tune control"):
        load(file)


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_a_file_with_numbers_of_another_type_or_size_is_refused(kind: str, tmp_path: Path) -> None:
    made, file = network(), tmp_path / "module.safetensors"
    parts = {name: torch.from_numpy(getattr(made, name)) for name in ("node", "request", "bias", "output")}
    many = 1e300 if kind == "float64" else 1.0  # beyond float32
    tensors = {name: (many * part.double()).to(getattr(torch, kind)) for name, part in parts.items()}
    save_file(tensors, file, {"methods": " ".join(METHODS)})
    with pytest.raises(ConfigError, match=r"module\.safetensors"):
        load(file)


def test_a_confidence_that_is_no_number_counts_as_none() -> None:
    assert key_of(1, 1, math.nan) == key_of(1, 1, -math.inf) == key_of(1, 1, 0.0)
    assert key_of(1, 1, math.inf) == key_of(1, 1, 1.0)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "MOST_TABLES", 3)
    module = Module(network(), NAMES, trusted=True)
    for luck in range(8):
        module.table(Request(0, 0, 0, luck, 0))
    assert len(module.tables) <= 3
