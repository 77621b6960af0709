"""Unknown options and invalid values are refused by name, with the nearest valid one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outrider import ConfigError, ModelError, OutriderError, draft, verify
from outrider.config import EngineOptions, SpeculativeOptions, options
from outrider.control import fixed
from outrider.draft.draft_model import DraftModel
from outrider.draft.union import parse
from outrider.errors import unknown

NAMES = sorted(f.name for f in fields(EngineOptions))


def refused(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SpeculativeOptions.of(config)
    assert isinstance(caught.value, (OutriderError, ValueError))
    return str(caught.value)


def test_no_config_is_plain_decoding() -> None:
    assert (
        SpeculativeOptions.of(None).method
        is SpeculativeOptions.of({"method": "off"}).method
        is draft.method("off")
    )
    assert SpeculativeOptions.of({}).method is draft.method("off")


def test_model_without_method_selects_draft_model() -> None:
    taken = SpeculativeOptions.of({"model": "builtin-draft", "num_speculative_tokens": 3})
    assert taken.method is DraftModel and taken.options.model == "builtin-draft"
    assert taken.control.num_speculative_tokens == 3


def test_keys_go_to_their_owners() -> None:
    taken = SpeculativeOptions.of(
        {
            "method": "ngram",
            "prompt_lookup_max": 7,
            "num_speculative_tokens": 4,
            "disable_by_batch_size": 8,
            "verification": "match",
        }
    )
    assert taken.options.prompt_lookup_max == 7
    assert taken.control == fixed.Options(4, 8)
    assert type(taken.rule) is verify.rule("match")


@pytest.mark.parametrize(
    ("wrong", "right"), [("ngrams", "ngram"), ("draftmodel", "draft_model"), ("Off", "off")]
)
def test_an_unknown_method_is_refused_with_the_nearest(wrong: str, right: str) -> None:
    output = refused({"method": wrong})
    assert repr(wrong) in output and f"Did you mean {right!r}" in output
    assert all(name in output for name in draft.names())


@pytest.mark.parametrize("method", draft.names())
def test_an_unknown_key_of_every_method(method: str) -> None:
    output = refused({"method": method, "num_speculative_token": 3})
    assert (
        "'num_speculative_token'" in output
        and repr(method) in output
        and "Did you mean 'num_speculative_tokens'" in output
    )
    for field in fields(draft.method(method).Options):
        assert field.name in output, "the valid keys are listed"


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [
        ("ngram", "prompt_lookup_maximum", "prompt_lookup_max"),
        ("draft_model", "sibling", "siblings"),
        ("draft_model", "dtype", "draft_dtype"),
        ("off", "verify", "verification"),
    ],
)
def test_the_nearest_key_is_named(method: str, wrong: str, right: str) -> None:
    assert f"Did you mean {right!r}" in refused({"method": method, wrong: 1})


def test_keys_of_another_method_are_refused() -> None:
    assert "prompt_lookup_max" in refused({"method": "draft_model", "prompt_lookup_max": 3})
    assert "siblings" in refused({"method": "ngram", "siblings": 3})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (5, "speculative_config"),
        ([("method", "ngram")], "speculative_config"),
        ({"num_speculative_tokens": 3}, "method"),
        ({"method": 5}, "5"),
        ({"method": "ngram", 5: 1}, "5"),
        ({"method": "ngram", "verification": "mach"}, "Did you mean 'match'"),
        ({"method": "ngram", "verification": None}, "None"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "2.0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "True"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2]]},
            "num_speculative_tokens_per_batch_size",
        ),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[3, 2, 1]]}, "[3, 2, 1]"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[0, 2, 1]]}, "[0, 2, 1]"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": 5}, "5"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 5], [3, 9, 1]]},
            "overlap, got [1, 4, 5] and [3, 9, 1]",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[3, 9, 1], [1, 3, 5]]},
            "overlap, got [1, 3, 5] and [3, 9, 1]",
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 0},
            "prompt_lookup_max must be a whole number of at least 1, got 0",
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4},
            "prompt_lookup_min must be in 1 … prompt_lookup_max (3)",
        ),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_max": 3.5}, "prompt_lookup_max"),
        ({"method": "draft_model", "siblings": 0}, "siblings"),
        ({"method": "draft_model", "siblings": 65}, "65"),
        ({"method": "draft_model", "siblings": "2"}, "siblings"),
        ({"method": "draft_model", "vocab_mismatch": "ignore"}, "vocab_mismatch"),
        ({"method": "draft_model", "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        ({"method": "draft_model", "model": ""}, "model must be a folder or a hub id or None, got ''"),
        ({"model": ""}, "model must be a folder or a hub id, got ''"),
        ({"model": 5}, "model must be a folder or a hub id, got 5"),
        ({"method": "draft_model", "quantization": "q4"}, "unknown quantization"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named(config: Any, named: str) -> None:
    assert named in refused(config)


def test_the_target_drafts_for_itself_in_a_mix_too() -> None:
    config = {"model": "self", "draft_kv_budget": 64}
    assert SpeculativeOptions.of(config).method is parse(config).method is DraftModel
    for wrong in ("", 5, None):
        with pytest.raises(ConfigError, match=f"model must be a folder or a hub id, got {wrong!r}"):
            parse({"model": wrong})


def test_adjacent_ranges_are_accepted() -> None:
    table = [(4, 9, 1), [1, 3, 5]]
    given = {"method": "ngram", "num_speculative_tokens_per_batch_size": table}
    assert SpeculativeOptions.of(given).control.num_speculative_tokens_per_batch_size == table


@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (2, 2), (4, 2)])
def test_the_shortest_ngram_is_never_longer_than_the_longest(longest: int, shortest: int) -> None:
    taken = SpeculativeOptions.of({"method": "ngram", "prompt_lookup_max": longest})
    drafter = taken.method(taken.options)  # type: ignore[call-arg, arg-type]
    assert (drafter.shortest, drafter.longest) == (shortest, longest)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("tensor_parallel_size", "Did you mean 'draft_tensor_parallel_size'?"),
        ("rejection_sample_method", "Did you mean 'verification'?"),
        ("draft_sample_method", "Leave it out"),
        ("use_heterogeneous_vocab", "Did you mean 'vocab_mismatch'?"),
        ("speculative_token_tree", "Did you mean 'siblings'?"),
        ("posterior_threshold", "'verification': 'typical'"),
        ("attention_backend", "no effect here"),
        ("moe_backend", "no effect here"),
        ("draft_load_config", "no effect here"),
        ("hf_overrides", "Change config.json"),
    ],
)
def test_a_key_of_vllms_is_refused_with_what_serves_here(key: str, cure: str) -> None:
    message = refused({"method": "draft_model", "model": "builtin-draft", key: None})
    assert f"unknown key {key!r}" in message and cure in message


@pytest.mark.parametrize(
    ("method", "cure"),
    [("EAGLE3", "'eagle3'"), ("MTP", "'mtp'"), ("ngram_gpu", "'ngram'"), ("custom_class", "add-a-drafter")],
)
def test_a_method_of_vllms_is_refused_with_ours(method: str, cure: str) -> None:
    assert cure in refused({"method": method}).partition(" Valid: ")[0]


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("enforce_eager", "no effect here"),
        ("limit_mm_per_prompt", "no effect here"),
        ("download_dir", "HF_HOME"),
        ("cpu_offload_gb", "gpu_layers"),
    ],
)
def test_an_engine_option_of_vllm_is_refused_with_what_serves_here(wrong: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown engine option {wrong!r}. .*{cure}"):
        options(EngineOptions, {"model": "builtin", wrong: 1}, "engine option")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_model_length", "max_model_len"),
        ("max_seqs", "max_num_seqs"),
        ("kv_cache_memory", "kv_cache_memory_bytes"),
        ("quantisation", "quantization"),
        ("kv_cache_type", "kv_cache_dtype"),
        ("torch_dtype", "dtype"),
        ("n_ctx", "max_model_len"),
        ("rope_theta", None),
    ],
)
def test_an_unknown_engine_option(wrong: str, right: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        options(EngineOptions, {"model": "builtin", wrong: 1}, "engine option")
    output = str(caught.value)
    assert f"unknown engine option {wrong!r}" in output and all(name in output for name in NAMES)
    assert right is None or f"Did you mean {right!r}" in output


@pytest.mark.parametrize(
    "given",
    [
        {"model": ""},
        {"model": None},
        {"model": 5},
        {"max_model_len": 0},
        {"max_model_len": 10.0},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_num_batched_tokens": -1},
        {"max_num_batched_tokens": 8},
        {"kv_cache_memory_bytes": 0},
        {"kv_cache_memory_bytes": "1GB"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": "a"},
        {"max_decode_slowdown": 1},
        {"max_decode_slowdown": 0.5},
        {"max_decode_slowdown": float("nan")},
        {"max_decode_slowdown": "2"},
        {"max_decode_slowdown": True},
        {"tensor_parallel_size": 0},
        {"pipeline_parallel_size": 1.5},
        {"seed": "x"},
        {"quantization": "int5"},
        {"quantization": 8},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": None},
        {"tokenizer": 5},
        {"tokenizer": ""},
        {"revision": 5},
        {"revision": ""},
    ],
    ids=str,
)
def test_an_engine_option_out_of_range(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**{"model": "builtin"} | given)
    assert name in str(caught.value) and str(value) in str(caught.value)


def test_the_sentence_of_a_refusal() -> None:
    assert (
        unknown("fruit", "aple", ["pear", "apple"])
        == "unknown fruit 'aple'. Did you mean 'apple'? Valid: apple, pear."
    )
    assert unknown("fruit", "xyz", ["pear"]) == "unknown fruit 'xyz'. Valid: pear."
    assert unknown("fruit", "best_of", ["stop"]) == "unknown fruit 'best_of'. Valid: stop.", (
        "half of the letters are no hint"
    )
    assert "Did you mean 'apple_pie'" in unknown("dish", "apple", ["apple_pie"])
    assert "Did you mean 'apple_pie'" in unknown("dish", "pie", ["apple_pie"])
    assert unknown("key", "x", ["pear"], "the basket").startswith("unknown key 'x' in the basket. Valid")


def test_unknown_names_suggest_only_near_ones() -> None:
    output = refused({"method": "ngram", "controller": "auto"})
    assert output.startswith("unknown key 'controller' in speculative_config of method 'ngram'. How much")
    assert "Did you mean 'model'" in refused({"method": "ngram", "speculative_model": "x"})
    assert "It has 'speculative_model': Did you mean 'model'?" in refused({"speculative_model": "x"})
    assert "It has 'methd': Did you mean 'method'?" in refused({"methd": "ngram"})
    assert refused({"num_speculative_tokens": 3}).endswith("or a draft 'model'.")
    assert "leave it out" in refused({"model": "builtin-draft", "enforce_eager": True})
    assert "Did you mean 'mtp'" in refused({"method": "deepseek_mtp"})
    with pytest.raises(ModelError, match=r"'ngram' is a method: give it as 'method'"):
        SpeculativeOptions.of({"model": "[ngram]", "num_speculative_tokens": 5})
    assert "Did you mean 'draft_model'?" in refused({"method": "draft"})
    with pytest.raises(ConfigError, match=r"'max_new_tokens'\. It is max_tokens of SamplingParams\."):
        options(EngineOptions, {"model": "builtin", "max_new_tokens": 5}, "engine option")
    with pytest.raises(ConfigError, match=r"'speculative_model'\. It is a key of speculative_config\."):
        options(EngineOptions, {"model": "builtin", "speculative_model": "x"}, "engine option")


def test_a_path_object_is_a_path() -> None:
    assert SpeculativeOptions.of({"model": Path("builtin-draft")}).options.model == "builtin-draft"


def test_errors_derive_from_one_base_and_value_errors() -> None:
    """What the docstring draws: one base class, and ValueErrors where a value is at fault."""
    from outrider import CapacityError, ModelError, RequestError

    for kind in (ConfigError, RequestError, ModelError, CapacityError):
        assert issubclass(kind, OutriderError)
    assert issubclass(ConfigError, ValueError) and issubclass(RequestError, ValueError)
    assert not issubclass(ModelError, ValueError)


def test_a_control_module_needs_an_adaptive_controller() -> None:
    assert SpeculativeOptions.of({"method": "auto", "control_module": "bins"}).control_module == "bins"
    assert "leave it out" in refused({"method": "ngram", "control_module": "bins"})
    for given in (3, ""):
        assert "control_module must be" in refused({"method": "auto", "control_module": given})
