"""Invalid input raises one sentence that names it, for its own request only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, CapacityError, ConfigError, ModelError, OutriderError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
GOOD = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """A tiny model without a tokenizer: vocabulary 300, context 256."""
    return LLM(str(tiny), max_num_seqs=4, seed=0)


@pytest.fixture(scope="module")
def speaking(tiny: Path) -> LLM:
    return LLM("builtin", max_num_seqs=4, max_model_len=64, seed=0)


def answer(llm: LLM) -> list[int]:
    return llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids


def assert_well(llm: LLM) -> None:
    """The engine holds nothing and answers as a fresh one would."""
    llm.engine.check()
    assert not llm.engine.busy
    assert len(answer(llm)) == 6
    llm.engine.check()


# ---- prompts

LONG = list(range(256))
BAD_PROMPTS = [
    ({"prompt_token_ids": []}, "empty"),
    ({"prompt_token_ids": LONG}, "256 tokens"),
    ({"prompt_token_ids": LONG * 9}, "2304 tokens"),
    ({"prompt_token_ids": [1, 300]}, "300"),
    ({"prompt_token_ids": [-1]}, "-1"),
    ({"prompt_token_ids": [1, "2"]}, "'2'"),
    ({"prompt_token_ids": [1.0]}, "1.0"),
    ({"prompt_token_ids": [None]}, "None"),
    ({"prompt_token_ids": "abc"}, "list"),
    ({"prompt_token_ids": 5}, "list"),
    ({}, "prompt"),
    ({"text": "hello"}, "prompt_token_ids"),
    ({"prompt_token_ids": [5], "promt": 3}, "Did you mean 'prompt'"),
    ({"prompt_token_ids": [5], "multi_modal_data": {}}, "multi_modal_data"),
    (b"ab", "b'ab'"),
    (5, "5"),
    (None, "None"),
    ("hello", "no tokenizer"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda x: str(x)[:40])
def test_a_bad_prompt_among_good_ones_fails_alone(llm: LLM, prompt: Any, message: str) -> None:
    outputs = llm.generate([GOOD, prompt, GOOD], GREEDY)
    good = answer(llm)
    assert [o.error is None for o in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, RequestError) and message in str(outputs[1].error)
    assert outputs[1].finished and outputs[1].outputs == []
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == good
    assert_well(llm)


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": []}, {"prompt_token_ids": [300]}, "no tokenizer here"], ids=str
)
def test_a_bad_prompt_alone_raises(llm: LLM, prompt: Any) -> None:
    for form in (prompt, [prompt]):
        with pytest.raises(RequestError):
            llm.generate(form, GREEDY)
    assert_well(llm)


@pytest.mark.parametrize("prompt", [5, None, b"ab", 1.5], ids=str)
def test_what_is_no_prompt_is_one_bad_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=f"a prompt must be a string.* got {prompt!r}"):
        llm.generate(prompt, GREEDY)
    (output,) = llm.stream(prompt, GREEDY)
    assert isinstance(output.error, RequestError) and repr(prompt) in str(output.error)
    assert_well(llm)


def test_whole_numbers_of_any_kind_are_token_ids(llm: LLM) -> None:
    import numpy as np

    output = llm.generate({"prompt_token_ids": list(np.array([5, 6, 7]))}, GREEDY)[0]
    assert output.outputs[0].token_ids == answer(llm)
    assert all(type(token) is int for token in output.prompt_token_ids)
    with pytest.raises(RequestError, match="token id 300 does not exist"):
        llm.generate({"prompt_token_ids": list(np.array([5, 300]))}, GREEDY)


def test_ids_go_before_the_text_beside_them(speaking: LLM) -> None:
    """As in vLLM: the text is only shown."""
    output = speaking.generate({"prompt": "shown", "prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
    assert output.prompt == "shown" and output.prompt_token_ids == [5, 6, 7]


def test_too_long_prompt_prints_one_error_with_the_cure(
    speaking: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither a warning of the tokenizer's, which knows another length than the engine."""
    import logging

    monkeypatch.setattr(speaking.tokenizer, "model_max_length", 64)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens \(at most 63\).*max_model_len"):
        speaking.generate("word " * 100, GREEDY)
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        speaking.chat([{"role": "user", "content": "word " * 100}], GREEDY)
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_context_that_is_the_models_own_cannot_be_raised(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate({"prompt_token_ids": LONG}, GREEDY)
    assert "truncate_prompt_tokens" in str(caught.value) and "max_model_len" not in str(caught.value)


def test_a_bad_prompt_in_a_stream_comes_first_and_the_others_go_on(llm: LLM) -> None:
    seen = list(llm.stream([GOOD, {"prompt_token_ids": [999]}], GREEDY))
    assert isinstance(seen[0].error, RequestError)
    assert seen[-1].finished and seen[-1].outputs[0].token_ids == answer(llm)
    assert_well(llm)


@pytest.mark.parametrize(
    "prompt",
    ["", {"prompt": ""}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]}, "word " * 100],
    ids=lambda p: str(p)[:20],
)
def test_a_bad_text_among_good_ones_fails_alone(speaking: LLM, prompt: Any) -> None:
    outputs = speaking.generate(["Once upon", prompt], GREEDY)
    assert outputs[0].error is None and outputs[0].outputs[0].text
    assert isinstance(outputs[1].error, RequestError)
    assert_well(speaking)


def test_the_longest_prompt_still_gets_one_token(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": LONG[:255]}, SamplingParams(temperature=0, max_tokens=50))[
        0
    ].outputs[0]
    assert len(output.token_ids) == 1 and output.finish_reason == "length"


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert list(llm.stream([], GREEDY)) == []


# ---- parameters


def test_parameters_must_be_sampling_params(llm: LLM) -> None:
    for wrong in ({"temperature": 0}, ["greedy"], 5, "greedy"):
        with pytest.raises(RequestError):
            llm.generate(GOOD, wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts and 3"):
        llm.generate([GOOD, GOOD], [GREEDY] * 3)
    assert_well(llm)


@pytest.mark.parametrize(
    "given", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 2}, {"temprature": 1}], ids=str
)
def test_bad_parameters_never_reach_the_engine(llm: LLM, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        llm.generate(GOOD, SamplingParams(**given))
    assert_well(llm)


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not(llm: LLM) -> None:
    good = answer(llm)
    outputs = llm.generate(
        [GOOD, GOOD], [SamplingParams(stop="x"), SamplingParams(temperature=0, stop_token_ids=[good[2]])]
    )
    assert "stop_token_ids" in str(outputs[0].error)
    assert outputs[1].outputs[0].token_ids == good[:3] and outputs[1].outputs[0].stop_reason == good[2]
    assert_well(llm)


def test_a_request_without_an_allowed_token_fails_alone(llm: LLM) -> None:
    """min_tokens forbids all stop tokens; where these are the whole vocabulary nothing is left to say."""
    outputs = llm.generate(
        [GOOD, GOOD], [GREEDY, SamplingParams(min_tokens=2, stop_token_ids=list(range(300)))]
    )
    assert outputs[0].error is None and outputs[0].outputs[0].token_ids == answer(llm)
    assert isinstance(outputs[1].error, RequestError) and "min_tokens" in str(outputs[1].error)
    assert_well(llm)


def test_without_a_tokenizer_ids_are_enough(llm: LLM) -> None:
    output = llm.generate(GOOD, GREEDY)[0]
    assert output.prompt is None and output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 6
    assert llm.get_tokenizer() is None


# ---- options of the engine and of speculation


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modellen": 5}, "Did you mean 'max_model_len'"),
        ({"max_model_len": 257}, "256"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "toaster"}, "toaster"),
        ({"speculative_config": {"method": "ngramm"}}, "Did you mean 'ngram'"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_mux": 3}},
            "Did you mean 'prompt_lookup_max'",
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": -3}}, "-3"),
        ({"speculative_config": {"method": "ngram", "verification": "block?"}}, "block?"),
        (
            {
                "speculative_config": {
                    "model": "builtin-draft",
                    "vocab_mismatch": "allow",
                    "draft_dtype": "int3",
                }
            },
            "int3",
        ),
    ],
    ids=str,
)
def test_a_bad_option_is_refused(tiny: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny), **given)
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would work")
def test_a_device_that_is_not_there(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        LLM(str(tiny), device="cuda")


def test_a_tokenizer_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"no tokenizer folder .*nothing.*: give a folder or a hub id"):
        LLM(str(tiny), tokenizer=str(tmp_path / "nothing"))


def test_too_little_memory_for_one_request_is_refused(tiny: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        LLM(str(tiny), kv_cache_memory_bytes=100_000)
    assert (
        "100,000" in str(caught.value)
        and "kv_cache_memory_bytes" in str(caught.value)
        and "max_model_len" in str(caught.value)
    )
    assert_well(LLM(str(tiny), kv_cache_memory_bytes=100_000, max_model_len=64))


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("length", [2, 8, 17])
def test_a_very_short_context_works(
    tiny: Path, llm: LLM, length: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    short = LLM(str(tiny), max_model_len=length, speculative_config={"method": "ngram"})
    assert short.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=None))[
        0
    ].outputs[0].token_ids == (
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=length - 1))[0]
        .outputs[0]
        .token_ids
    )
    short.engine.check()


def test_the_drafter_cannot_change_while_requests_run(tiny: Path) -> None:
    llm = LLM(str(tiny))
    stream = llm.stream(GOOD, GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="running"):
        llm.use({"method": "ngram"})
    stream.close()
    assert_well(llm)
    with pytest.raises(ConfigError):
        llm.use({"method": "nothing of the kind"})
    assert_well(llm)


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
def test_a_truncated_bin_file(broken: Path, keep: int) -> None:
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


def test_no_config(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert "config.json" in refused(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no such model"}'])
def test_a_corrupt_config(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    refused(broken)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_corrupt_generation_config(broken: Path, text: str) -> None:
    """Found when the model is loaded or ignored, but never a crash in the middle of a request."""
    (broken / "generation_config.json").write_text(text)
    try:
        llm = LLM(str(broken))
    except ModelError as error:
        assert "generation_config.json" in str(error)
    else:
        assert_well(llm)


def test_a_corrupt_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(OutriderError, match="tokenizer"):
        LLM(str(broken))


def test_no_folder(tmp_path: Path) -> None:
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
        ("Qwen3Next", "Qwen3NextForCausalLM", "linear_attention.*recurrent state"),
        ("OlmoHybrid", "OlmoHybridForCausalLM", "recurrent state"),
        ("Gemma3", "Gemma3ForConditionalGeneration", "images"),
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
