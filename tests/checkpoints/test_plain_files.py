"""Configs and tokenizers that are read without transformers are what transformers reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer

from outrider.checkpoints.hub import Checkpoint, locate, read_config, read_tokenizer
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.plain_config import PlainConfig, plain_config
from outrider.checkpoints.plain_tokenizer import PlainTokenizer, plain_tokenizer
from outrider.checkpoints.spec import Facts
from outrider.engine.detokenizer import Detokenizer
from outrider.errors import ModelError
from outrider.testing import tiny_checkpoint

WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "another theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "a window that Llama does not have": ("Llama", {"sliding_window": 8}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3}),
    "qwen3 with windows": ("Qwen3", {**WINDOWED, "use_sliding_window": True}),
}
READ = ("dtype", "eos_token_id", "rope_parameters", "head_dim", "model_type", "tie_word_embeddings")
SHORTENED = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
TEXTS = ["", "The quick brown fox", "a<|end|>b <|bos|>", " é ☃ 12 + 30\n\n  x", "<|user|>\nHi<|end|>\n"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_config_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    family, given = PLAIN[name]
    folder = Path(tiny_checkpoint(tmp_path, family, **given))
    ours, theirs = read_config(folder, False), AutoConfig.from_pretrained(folder)
    assert isinstance(ours, PlainConfig)
    assert Facts.of(ours) == Facts.of(theirs) and Scheme.of(ours) is None
    assert all(getattr(ours, key, None) == getattr(theirs, key, None) for key in READ)


def test_older_names_of_keys(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path))
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("rope_parameters")
    settings |= {"rope_theta": 2e4, "rope_scaling": None, "torch_dtype": settings.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(settings))
    ours, theirs = read_config(folder, False), AutoConfig.from_pretrained(folder)
    assert isinstance(ours, PlainConfig) and Facts.of(ours) == Facts.of(theirs)
    assert (ours.dtype, ours.rope_parameters) == (theirs.dtype, theirs.rope_parameters)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"auto_map": {"AutoConfig": "a.B"}},
        {"model_type": "mistral", "layer_types": ["full_attention"] * 2},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        {"model_type": "gemma"},
        {"architectures": ["LlamaModel"]},
        {"dtype": "float8"},
        {"dtype": ""},
        {"dtype": "float32", "torch_dtype": "float8"},
        {"layer_types": []},
        {"model_type": "qwen3", "head_dim": None},
        {"tie_word_embeddings": None},
        {"max_position_embeddings": None},
        {"hidden_size": 97},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_what_needs_transformers_is_not_plain(given: dict[str, Any]) -> None:
    settings = json.loads((locate("builtin") / "config.json").read_text())
    own = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    named = {"architectures": [own[given["model_type"]]]} if given.get("model_type") in own else {}
    assert plain_config(settings) is not None
    assert plain_config({"sliding_window": None, **settings, **named, **given}) is None
    for key in ("hidden_size", "eos_token_id", "num_key_value_heads"):
        assert plain_config({k: v for k, v in settings.items() if k != key}) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", 0.5),
        ("attention_bias", "yes"),
        ("mlp_bias", 3),
        ("head_dim", 7),
        ("intermediate_size", 0),
    ],
)
def test_a_config_with_nonsense_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(ModelError, match=key):
        Checkpoint.open(str(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(locate("builtin")), tiny_checkpoint(tmp_path_factory.mktemp("tiny"))]


def test_a_plain_tokenizer_does_what_transformers_does(folders: list[str]) -> None:
    for folder in folders:
        ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert isinstance(ours, PlainTokenizer) and len(ours) == len(theirs)
        for text in TEXTS:
            for special in (True, False):
                ids = theirs.encode(text, add_special_tokens=special)
                assert ours.encode(text, add_special_tokens=special) == ids
                assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                    ids, skip_special_tokens=special
                )
            assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
            assert Detokenizer(ours).again(ids).text == Detokenizer(theirs).again(ids).text
        assert ours.decode(5) == theirs.decode(5) and ours.get_vocab() == theirs.get_vocab()
        assert ours.eos_token_id == theirs.eos_token_id and ours.all_special_ids == theirs.all_special_ids
        assert {i: str(t) for i, t in ours.added_tokens_decoder.items()} == {
            i: str(t) for i, t in theirs.added_tokens_decoder.items()
        }
        assert ours.chat_template == theirs.chat_template and ours(TEXTS[1]) == theirs(TEXTS[1])


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m }}{% endfor %}{{ tools }}{{ word }}"


def test_a_plain_tokenizer_renders_what_transformers_does(folders: list[str]) -> None:
    messages = [
        {"role": "user", "content": " Hi"},
        {"role": "assistant", "content": "Yes", "tool_calls": None},
    ]
    given: list[dict[str, Any]] = [
        {"add_generation_prompt": True, "tools": TOOLS},
        {"continue_final_message": True},
        {"chat_template": TEMPLATE, "word": "x"},
        {"chat_template": ""},
        {"chat_template": TEMPLATE, "bos_token": "<other>", "tools": TOOLS},
    ]
    ours, theirs = read_tokenizer(folders[0]), AutoTokenizer.from_pretrained(folders[0])
    for options in given:
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.apply_chat_template(messages, tokenize=False, **options) == text
    assert "full" not in vars(ours), "transformers' tokenizer was not needed"
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    with pytest.raises(ValueError, match="return_assistant_tokens_mask"):
        ours.apply_chat_template(messages, tokenize=False, return_assistant_tokens_mask=True)


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"bos_token": "<|new|>"}),
        ("tokenizer.json", {"truncation": SHORTENED}),
        ("added_tokens.json", {"<|new|>": 9000}),
        ("tekken.json", {}),
        ("config.json", {"model_type": "qwen2"}),
    ],
    ids=str,
)
def test_a_tokenizer_that_transformers_changes_is_read_by_it(
    file: str, given: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(tiny_checkpoint(tmp_path))
    path = folder / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    assert plain_tokenizer(folder, AssertionError) is not None
    path.write_text(json.dumps({**settings, **given}))
    assert plain_tokenizer(folder, AssertionError) is None


def test_the_prompt_of_a_qwen2_checkpoint_has_the_ids_of_transformers(tmp_path: Path) -> None:
    """Its code splits digits by a pattern of its own, which its tokenizer.json does not have."""
    folder = tiny_checkpoint(tmp_path, "Qwen2")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["</s>"], initial_alphabet=alphabet)
    core.train_from_iterator(["In 2024 2024 2024"] * 9, trainer)
    core.save(str(Path(folder) / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = AutoTokenizer.from_pretrained(folder).encode("In 2024")
    assert read_tokenizer(folder).encode("In 2024") == ids != core.encode("In 2024").ids


def test_what_transformers_cannot_read_later_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    tokenizer = read_tokenizer(folder)
    (Path(folder) / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=f"the tokenizer of '{folder}'"):
        tokenizer("text")
    for name in ("full", "load", "__deepcopy__"):
        with pytest.raises(AttributeError):
            PlainTokenizer.__new__(PlainTokenizer).__getattr__(name)


TEMPLATE_READ = """
import sys
from outrider.checkpoints.hub import read_tokenizer
print(read_tokenizer(sys.argv[1]).chat_template.encode())
"""


def test_a_chat_template_is_utf8_in_every_locale(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (Path(folder) / "chat_template.jinja").write_text("é☃", encoding="utf-8")
    setting = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", TEMPLATE_READ, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=setting)
    assert done.stdout == f"{'é☃'.encode()!r}\n"


GENERATE = """
import sys
from outrider import LLM, SamplingParams
llm = LLM("builtin", max_model_len=64, speculative_config={"method": "eagle", "model": "builtin-eagle"})
assert llm.generate("The future", SamplingParams(max_tokens=4))[0].outputs[0].text
print("transformers" in sys.modules)
"""


def test_the_builtin_model_generates_without_transformers() -> None:
    """Its import would take longer than that of torch."""
    done = subprocess.run([sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert isinstance(Checkpoint.open("builtin-draft").config, PlainConfig)
