"""Sampling parameters that are not given: those of the model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.testing import tiny_checkpoint

CONFIG = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "do_sample": True}
EXPECTED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    (made / "generation_config.json").write_text(json.dumps({**CONFIG, "eos_token_id": [1]}))
    return made


def made(folder: Path, **more: Any) -> LLM:
    return LLM(folder, speculative_config="off", max_model_len=64, **more)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EXPECTED),
        ({"generation_config": "vllm"}, {}),
        ({"generation_config": "none"}, {}),
        ({"override_generation_config": {"top_k": 3, "min_p": 0.1}}, {**EXPECTED, "top_k": 3, "min_p": 0.1}),
        ({"override_generation_config": '{"temperature": 0}'}, {**EXPECTED, "temperature": 0}),
        ({"generation_config": "none", "override_generation_config": {"top_p": 0.5}}, {"top_p": 0.5}),
    ],
)
def test_defaults_are_those_of_the_model_unless_told_otherwise(
    options: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    assert made(folder, **options).get_default_sampling_params() == SamplingParams(**expected)


def test_a_folder_may_have_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    found = made(folder, generation_config=str(tmp_path)).get_default_sampling_params()
    assert found == SamplingParams(temperature=0.3)


def test_requests_without_parameters_have_them(folder: Path) -> None:
    llm = made(folder, seed=5)
    first, second = (llm.generate([5, 6, 7], params)[0] for params in (None, SamplingParams(ignore_eos=True)))
    assert len(first.outputs[0].token_ids) == 5 and len(second.outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"override_generation_config": {"temprature": 1}}, ConfigError, "Did you mean 'temperature'"),
        ({"override_generation_config": {"top_p": 2}}, ConfigError, "top_p must be in"),
        ({"override_generation_config": "{"}, ConfigError, "override_generation_config is no JSON"),
        ({"override_generation_config": [1]}, ConfigError, "override_generation_config must be a dict"),
        ({"generation_config": "/no/such"}, ConfigError, "has no generation_config.json"),
    ],
)
def test_faults_are_named(options: dict[str, Any], error: type[Exception], text: str, folder: Path) -> None:
    with pytest.raises(error, match=text):
        made(folder, **options)


@pytest.mark.parametrize("value", [-1, "0.6", float("nan"), [1]])
def test_a_file_with_a_bad_value_is_refused(value: Any, tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(ModelError, match="temperature"):
        made(folder)
