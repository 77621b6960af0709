"""Checkpoints and drafts that cannot be used are refused in one sentence that names the fault."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from healthy import GOOD, GREEDY, answer, assert_well
from safetensors.torch import load_file, save_file

from outrider import LLM, ConfigError, ModelError, OutriderError, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """A tiny model without a tokenizer: vocabulary 300, context 256."""
    return LLM(str(tiny), max_num_seqs=4, seed=0)


# ---- drafts that do not fit


def drafted(target: Path, draft: Path, **given: Any) -> list[list[int]]:
    llm = LLM(
        str(target), speculative_config={"model": str(draft), "num_speculative_tokens": 3, **given}, seed=0
    )
    outputs = llm.generate(
        [{"prompt_token_ids": [i, i + 1]} for i in range(12)],
        SamplingParams(temperature=0.9, seed=2, max_tokens=20),
    )
    llm.engine.check()
    assert sum(o.speculation.drafted for o in outputs) > 0
    return [o.outputs[0].token_ids for o in outputs]


def plain(target: Path) -> list[list[int]]:
    outputs = LLM(str(target), seed=0).generate(
        [{"prompt_token_ids": [i, i + 1]} for i in range(12)],
        SamplingParams(temperature=0.9, seed=2, max_tokens=20),
    )
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize(("target", "draft"), [(300, 900), (900, 300)])
def test_a_draft_of_another_vocabulary_is_refused_or_allowed(
    checkpoint: Callable[..., Path], target: int, draft: int
) -> None:
    """Refused with both sizes in the message.  With "allow", common ids are drafted and the text stays."""
    large, small = (
        checkpoint(vocab_size=target, seed=1),
        checkpoint(vocab_size=draft, seed=2, num_hidden_layers=1),
    )
    with pytest.raises(ConfigError) as caught:
        drafted(large, small)
    assert "300" in str(caught.value) and "900" in str(caught.value) and "vocab_mismatch" in str(caught.value)
    assert drafted(large, small, vocab_mismatch="allow") == plain(large)


@pytest.mark.parametrize(("target", "draft"), [(320, 300), (300, 320)])
def test_vocabularies_that_differ_in_padding_just_work(
    checkpoint: Callable[..., Path], target: int, draft: int
) -> None:
    """As Qwen2.5's 152,064 and 151,936: one tokenizer, matrices padded to different multiples."""
    large, small = (
        checkpoint(vocab_size=target, seed=1),
        checkpoint(vocab_size=draft, seed=2, num_hidden_layers=1),
    )
    assert drafted(large, small) == plain(large)
    assert drafted(large, small, siblings=2) == plain(large)


def test_tokenizers_that_disagree_are_refused(tmp_path: Path) -> None:
    """The same size says nothing: here two tokens have changed places."""
    import outrider

    shutil.copytree(Path(outrider.__file__).parent / "builtin" / "target", tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = [token for token, i in vocabulary.items() if i in (1000, 1001)]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"8192.*disagree.*1000"):
        LLM("builtin", speculative_config={"model": str(tmp_path / "draft")})


def test_a_draft_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in (str(tmp_path / "nothing"), str(tmp_path / "file"), "a/b/c"):
        with pytest.raises(
            ModelError,
            match=rf"no draft model or head {name!r}\. Give a folder.*builtin-draft, .*builtin-eagle",
        ):
            LLM(str(tiny), speculative_config={"model": name})


@pytest.mark.parametrize(
    ("wrong", "right"), [("builtin-draf", "builtin-draft"), ("builtin-medsua", "builtin-medusa")]
)
def test_the_nearest_draft_is_named(tiny: Path, wrong: str, right: str) -> None:
    for config in ({"model": wrong}, {"method": "union", "drafters": [{"model": wrong}]}):
        with pytest.raises(ModelError, match=f"{wrong!r}. Did you mean {right!r}"):
            LLM(str(tiny), speculative_config=config)


# ---- checkpoints


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "broken"))


def refused(folder: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        LLM(str(folder))
    return str(caught.value)


def edit_config(folder: Path, **given: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | given))


NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(broken: Path, name: str) -> None:
    tensors = load_file(broken / "model.safetensors")
    del tensors[name]
    save_file(tensors, broken / "model.safetensors")
    assert name in refused(broken)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_named(broken: Path, name: str) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, broken / "model.safetensors")
    message = refused(broken)
    assert name in message and str(tuple(tensors[name].shape)) in message


def test_a_config_of_another_size_is_a_wrong_shape(broken: Path) -> None:
    edit_config(broken, intermediate_size=100)
    message = refused(broken)
    assert "gate_proj" in message and "(96, 64)" in message and "(100, 64)" in message


def test_integer_weights_are_refused(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, broken / "model.safetensors")
    assert "int8" in refused(broken)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_truncated_safetensors_file(broken: Path, keep: int) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refused(broken)
    assert "model.safetensors" in message and "corrupt or truncated" in message


def test_a_safetensors_file_of_rubbish(broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not json at all")
    assert "corrupt" in refused(broken)


def as_bin(folder: Path) -> Path:
    """Turns the copy's weights into a .bin."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def test_a_bin_file_works(broken: Path, llm: LLM) -> None:
    as_bin(broken)
    assert answer(LLM(str(broken))) == answer(llm)


@pytest.mark.parametrize("keep", [0, 100, 20000])
def test_a_truncated_bin_file_is_refused(broken: Path, keep: int) -> None:
    file = as_bin(broken)
    file.write_bytes(file.read_bytes()[:keep])
    assert "pytorch_model.bin" in refused(broken)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this must never run",))


def test_a_bin_file_that_would_run_code_is_refused(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model.norm.weight": Evil()}, as_bin(broken))
    assert "pytorch_model.bin" in refused(broken)
    assert "never" not in capsys.readouterr().out


def test_a_bin_file_that_holds_no_tensors(broken: Path) -> None:
    torch.save([1, 2, 3], as_bin(broken))
    refused(broken)


def test_a_missing_shard_is_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint(max_shard_size="50KB"), tmp_path / "sharded"))
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refused(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 5}'])
def test_a_corrupt_index_is_named(checkpoint: Callable[..., Path], tmp_path: Path, text: str) -> None:
    folder = Path(shutil.copytree(checkpoint(max_shard_size="50KB"), tmp_path / "sharded"))
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(folder)


def test_an_index_that_promises_too_much(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The index sends us to a shard that does not hold the tensor."""
    folder = Path(shutil.copytree(checkpoint(max_shard_size="50KB"), tmp_path / "sharded"))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    where = content["weight_map"]
    where["model.norm.weight"] = next(file for file in where.values() if file != where["model.norm.weight"])
    index.write_text(json.dumps(content))
    assert "model.norm.weight" in refused(folder)


def test_no_weights_at_all(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "no weights" in refused(broken)


def test_a_folder_without_config_is_refused(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert "config.json" in refused(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no such model"}'])
def test_a_corrupt_config_is_refused(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    refused(broken)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_corrupt_generation_config_is_refused_or_ignored(broken: Path, text: str) -> None:
    """Found when the model is loaded or ignored, but never a crash in the middle of a request."""
    (broken / "generation_config.json").write_text(text)
    try:
        llm = LLM(str(broken))
    except ModelError as error:
        assert "generation_config.json" in str(error)
    else:
        assert_well(llm)


def test_a_corrupt_tokenizer_is_refused(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(OutriderError, match="tokenizer"):
        LLM(str(broken))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "nothing" in refused(tmp_path / "nothing")
    assert "config.json" in refused(tmp_path)
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file")
    assert "builtin" in refused("no-such-name")
    assert "Did you mean 'builtin'" in refused("builtn")


def test_weights_that_are_not_numbers_end_the_request_and_not_the_engine(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors")
    llm = LLM(str(broken))
    for _ in range(2):
        outputs = llm.generate([GOOD, GOOD], GREEDY)
        assert all(
            isinstance(output.error, ModelError) and "finite" in str(output.error) for output in outputs
        )
        with pytest.raises(ModelError, match="finite"):
            llm.generate(GOOD, GREEDY)
        assert not llm.engine.busy
        llm.engine.check()


# ---- models of other kinds


def config_only(folder: Path, name: str, **given: Any) -> Path:
    import transformers

    config = getattr(transformers, f"{name}Config")(**given)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "architecture", "reason"),
    [
        ("T5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("Bart", "BartForConditionalGeneration", "encoder-decoder"),
        ("Mamba", "MambaForCausalLM", "state"),
        ("Mamba2", "Mamba2ForCausalLM", "state"),
        ("Rwkv", "RwkvForCausalLM", "state"),
        ("RecurrentGemma", "RecurrentGemmaForCausalLM", "state"),
        ("FalconMamba", "FalconMambaForCausalLM", "state"),
        ("Bert", "BertForMaskedLM", "not supported"),
        ("Llama", "LlamaForSequenceClassification", "not supported"),
        ("GPT2", "GPT2LMHeadModel", "no file named"),
    ],
)
def test_other_models_are_refused_by_name_and_with_the_reason(
    tmp_path: Path, name: str, architecture: str, reason: str
) -> None:
    message = refused(config_only(tmp_path, name, architectures=[architecture]))
    assert architecture in message and re.search(reason, message)


def test_an_unknown_rope_is_refused(broken: Path) -> None:
    edit_config(broken, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(OutriderError, match="spiral"):
        LLM(str(broken))


def test_top_k_may_be_any_number(llm: LLM) -> None:
    """More than every token is every token, however many more."""
    few, many = (SamplingParams(seed=3, top_k=k, max_tokens=8, ignore_eos=True) for k in (0, 1 << 70))
    first, second = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, [few, many])
    assert second.error is None and second.outputs[0].token_ids == first.outputs[0].token_ids
