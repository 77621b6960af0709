"""An invalid adapter is refused by name, for the request that names it only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer, write_adapter
from safetensors.torch import load_file, save_file

from outrider import LLM, ConfigError, LoRARequest, RequestError, SamplingParams
from outrider.testing import visible_parts

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = {"prompt_token_ids": [5, 6, 7]}
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), enable_lora=True, max_lora_rank=8)


def settings(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    edit(held)
    save_file(held, file)


def setting(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: settings(folder, **changes)


def tensor(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda folder: tensors(folder, lambda held: held.update({name: torch.zeros(*shape)}))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda f: (f / "adapter_config.json").unlink(),
        "has no adapter_config.json: it is not a PEFT adapter",
    ),
    "bad config": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is corrupt"),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "has no weights: expected adapter_model.safetensors",
    ),
    "cut weights": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"123"), "corrupt or truncated"),
    "another method": (setting(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "dora": (setting(use_dora=True), "use_dora = True is not supported: DoRA scales"),
    "modules_to_save": (
        setting(modules_to_save=["lm_head"]),
        r"modules_to_save = \['lm_head'\] is not supported: it replaces",
    ),
    "bias": (setting(bias="all"), "bias = 'all' is not supported"),
    "lora_bias": (setting(lora_bias=True), "lora_bias = True is not supported"),
    "pissa": (
        setting(init_lora_weights="pissa_niter_4"),
        "init_lora_weights = 'pissa_niter_4'.*path_initial_model",
    ),
    "activated": (setting(alora_invocation_tokens=[5]), "alora_invocation_tokens"),
    "rank": (setting(r=9), "down_proj has rank 9, max_lora_rank is 8: raise max_lora_rank"),
    "rank type": (setting(r="4"), "rank of model.layers.0.* got '4'"),
    "alpha type": (setting(lora_alpha=None), "lora_alpha of model.layers.0.* got None"),
    "pattern": (setting(rank_pattern={"(": 2}), "rank_pattern cannot be read"),
    "other rank": (setting(r=3), r"has shape \(4, 96\), rank 3 and this model ask for \(3, 96\)"),
    "other base": (
        tensor(Q, 4, 48),
        r"shape \(4, 48\), .* for \(4, 64\): was the adapter made for another base model\?.*'made/up'",
    ),
    "deeper base": (
        lambda f: (
            tensor(Q.replace("0", "7"), 4, 64)(f),
            tensor(Q.replace("0", "7").replace("_A", "_B"), 64, 4)(f),
        ),
        "layers.7.self_attn.q_proj is layer 7 of a model that has 2: the adapter was made for 'made/up', "
        "which is not this model",
    ),
    "half": (
        lambda f: tensors(f, lambda held: held.pop(Q)),
        "layers.0.self_attn.q_proj has only one of lora_A and lora_B",
    ),
    "lm_head": (
        tensor("base_model.model.lm_head.lora_A.weight", 4, 64),
        "lm_head.lora_A.weight is not supported: only the q, k",
    ),
    "embedding": (
        tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 300),
        "lora_embedding_A is not supported",
    ),
    "expert": (tensor(Q.replace("q_proj", "w1_proj"), 4, 64), "w1_proj.lora_A.weight is not supported"),
    "integers": (
        lambda f: tensors(f, lambda held: held.update({Q: torch.ones(4, 64, dtype=torch.int32)})),
        "only floating-point weights",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_fails_its_own_request_only(kind: str, llm: LLM, tiny: Path, tmp_path: Path) -> None:
    """Alone it raises; in a batch its own output has the error; a repaired adapter keeps its id."""
    write_adapter(tmp_path / "good", str(tiny), base_model_name_or_path="made/up")
    bad = tmp_path / "bad"
    write_adapter(bad, str(tiny), base_model_name_or_path="made/up")
    spoil, message = BROKEN[kind]
    spoil(bad)
    number = 100 + list(BROKEN).index(kind) * 2
    wrong, right = (
        LoRARequest("wrong", number, str(bad)),
        LoRARequest("right", number + 1, str(tmp_path / "good")),
    )
    with pytest.raises(RequestError, match=message) as raised:
        llm.generate(PROMPT, GREEDY, lora_request=wrong)
    assert "LoRA adapter 'wrong'" in str(raised.value)
    outputs = llm.generate([PROMPT] * 3, GREEDY, lora_request=[right, wrong, None])
    assert [o.error is None for o in outputs] == [True, False, True]
    assert all(len(outputs[i].outputs[0].token_ids) == 6 for i in (0, 2))
    write_adapter(bad, str(tiny))
    assert visible_parts(llm.generate(PROMPT, GREEDY, lora_request=wrong)[0].outputs) == visible_parts(
        outputs[0].outputs
    )


def test_a_missing_adapter_folder_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no adapter folder '/nowhere/at/all'"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("x", 1, "/nowhere/at/all"))


def test_an_adapter_id_names_one_adapter(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    for name in "ab":
        write_adapter(tmp_path / name, str(tiny))
    llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("a", 7, str(tmp_path / "a")))
    with pytest.raises(
        RequestError,
        match=r"lora_int_id 7 is '.*/a' already, and now '.*/b': give every adapter an id of its own",
    ):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("b", 7, str(tmp_path / "b")))


@pytest.mark.parametrize(
    "given", [("", 1, "p"), ("n", 0, "p"), ("n", -1, "p"), ("n", True, "p"), ("n", "1", "p"), ("n", 1, None)]
)
def test_lora_requests_check_their_fields(given: Any) -> None:
    with pytest.raises(RequestError, match="lora_"):
        LoRARequest(*given)


def test_fields_of_a_lora_request_are_checked(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", str(tiny))
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    with pytest.raises(RequestError, match="2 prompts and 1 LoRARequests"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=[lora])
    with pytest.raises(RequestError, match=r"must be a LoRARequest.* got 5"):
        llm.generate(PROMPT, GREEDY, lora_request=[5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"'a' needs LLM.*enable_lora=True"):
        LLM(str(tiny)).generate(PROMPT, GREEDY, lora_request=lora)


@pytest.mark.parametrize(("option", "value"), [("enable_lora", 1), ("max_loras", 0), ("max_lora_rank", "16")])
def test_wrong_lora_options_are_refused_by_name(option: str, value: Any, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=option):
        LLM(str(tiny), **{option: value})


def test_the_engine_is_well_after_all_this(llm: LLM, tiny: Path) -> None:
    llm.engine.check()
    assert visible_parts(answer(llm, [5, 6, 7], GREEDY).outputs) == visible_parts(
        answer(LLM(str(tiny)), [5, 6, 7], GREEDY).outputs
    )
