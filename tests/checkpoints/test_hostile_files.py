"""Corrupt and hostile files: with any key of any config replaced, loading works or names the key."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import write_adapter
from hostile import GREEDY, PROMPT, SECONDS, try_all
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from outrider import LLM, CapacityError, LoRARequest, ModelError, RequestError
from outrider.checkpoints.heads import builtin
from outrider.checkpoints.validate import MAX_DEPTH, read_json
from outrider.core.limits import MAX_HEAD_DIM
from outrider.models.decoder import rotations
from outrider.testing import tiny_checkpoint

# ---- every key of every kind of file

LLAMA = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA["rope_parameters"]}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen3": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "qwen3-moe": ("Qwen3Moe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "fallback": ("Phi", {}),
}


def answer(folder: Path) -> None:
    """Loads a target and generates: memory errors show while it computes."""
    llm = LLM(str(folder), max_model_len=32, kv_cache_memory_bytes=1 << 22)
    with contextlib.suppress(RequestError):
        llm.generate(PROMPT, GREEDY)


@pytest.mark.parametrize(
    ("name", "third"),
    [
        *(pytest.param(name, None, marks=pytest.mark.full, id=name) for name in TARGETS),
        *(pytest.param(name, i % 3, id=f"{name}-third") for i, name in enumerate(TARGETS)),
    ],
)
def test_every_key_of_a_target(name: str, third: int | None, tmp_path: Path) -> None:
    """The families share their keys: by default each gets a third of the values."""
    family, given = TARGETS[name]
    folder = Path(tiny_checkpoint(tmp_path / "model", family, **given))
    for spare in ("tokenizer.json", "tokenizer_config.json"):
        (folder / spare).unlink()
    config = json.loads((folder / "config.json").read_text())
    config = {"head_dim": 16, "dtype": "float32", "quantization_config": None, "text_config": None, **config}
    try_all(
        folder / "config.json",
        config,
        lambda: answer(folder),
        (str(folder), "checkpoint", "the config asks"),
        third,
    )


def test_every_key_of_a_generation_config(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path / "model"))
    config = {"eos_token_id": [2], "bos_token_id": 0, "pad_token_id": 2}
    config |= {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "max_new_tokens": 3}
    try_all(folder / "generation_config.json", config, lambda: answer(folder), ())


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("builtin", max_model_len=64, kv_cache_memory_bytes=1 << 24, max_num_seqs=2)


HEADS = sorted(builtin())
EVERY_VALUE = [pytest.param(name, None, marks=pytest.mark.full, id=name) for name in HEADS]
PARTS = [pytest.param(name, i % 6, id=f"{name}-sixth") for i, name in enumerate(HEADS)]


@pytest.mark.parametrize(("name", "part"), [*EVERY_VALUE, *PARTS])
def test_every_key_of_a_head(name: str, part: int | None, target: LLM, tmp_path: Path) -> None:
    """Heads share their keys and the checks of them: by default a head gets a sixth of the values."""
    assert len(HEADS) >= 6
    folder = Path(shutil.copytree(builtin()[name], tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    method = name.removeprefix("builtin-")

    def load() -> None:
        target.use({"method": method, "model": str(folder)})
        with contextlib.suppress(RequestError):
            target.generate(PROMPT, GREEDY)

    try_all(folder / "config.json", config, load, (str(folder),), part, parts=6)


def test_every_key_of_an_adapter(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny), enable_lora=True, max_lora_rank=8)
    write_adapter(
        tmp_path / "a", str(tiny), use_rslora=False, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 8}
    )
    numbers = iter(range(1, 10_000))

    def load() -> None:
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("a", next(numbers), str(tmp_path / "a")))

    file = tmp_path / "a" / "adapter_config.json"
    try_all(file, json.loads(file.read_text()), load, ("q_proj",))


QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "dynamic": {},
        "checkpoint_format": "gptq",
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "transform_config": {},
        "config_groups": {
            "g": {
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "group_size": 32,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
    },
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_every_key_of_a_quantization(method: str, tiny: Path, tmp_path: Path) -> None:
    """Weights are unquantized: tensors tell whether a layer is quantized, so accepted configs load."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    inner = QUANTIZED[method]

    class Nested(type(folder)):  # type: ignore[misc]
        """Writes the section into the config that is around it."""

        def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
            whole = json.dumps({**config, "quantization_config": "?"}).replace('"?"', data)
            return int(Path(self).write_text(whole))

    names = ("quantized", "quantization_config", "group_size", "config_groups")
    try_all(Nested(folder / "config.json"), inner, lambda: answer(folder), names)


# ---- what crashed the process: in a process of its own


def in_process(code: str, *arguments: str) -> str:
    """The error of a script that may crash; it must end by itself, with a ModelError."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, f"exit status {run.returncode}: {run.stderr[-2000:]}"
    return run.stdout


LOAD_EACH = """
import json, sys
from outrider import LLM, ModelError, SamplingParams
for model, config in json.loads(sys.argv[1]):
    try:
        llm = LLM(model, max_model_len=32, speculative_config=config)
        llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * 3, SamplingParams(temperature=0, max_tokens=12))
        print("loaded")
    except ModelError as error:
        print(error)
"""


def edited(folder: Path, **changes: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def resized(folder: Path, heads: int, kv_heads: int, head_dim: int) -> str:
    """A model or head whose files agree on this shape of its attention; its attention is not quantized."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": heads * head_dim}
    for name in list(tensors):
        if found := re.fullmatch(r"(.*self_attn\.(.)_proj)\.weight(_shape)?", name):
            layer, own, tensor = found[1], rows[found[2]], tensors[name]
            outputs, inputs = tensor.tolist() if found[3] else tensor.shape
            for part in ("", "_packed", "_scale", "_shape"):
                tensors.pop(f"{layer}.weight{part}", None)
            shape = (outputs, own) if found[2] == "o" else (own, inputs)
            tensors[f"{layer}.weight"] = torch.randn(*shape).to(torch.bfloat16)
    save_file(tensors, file)
    return edited(folder, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_what_crashed_is_refused(tmp_path: Path) -> None:
    """Sizes that crashed the kernels are refused.

    Windows below 0 ended in a double free.  Heads of more than MAX_HEAD_DIM or an odd number of dimensions
    overflowed arrays on the stack.  Query heads without a K/V head read uninitialised memory.
    """
    cases: list[tuple[str, dict[str, str] | None]] = []

    def copied(folder: str | Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy {len(cases)}"))

    mistral = tiny_checkpoint(tmp_path / "mistral", "Mistral", sliding_window=64)
    for window in (-1, 1 << 63):
        cases.append((edited(copied(mistral), sliding_window=window), None))
    llama = tiny_checkpoint(tmp_path / "llama")
    for shape in ((4, 3, 16), (4, 2, 31), (4, 2, 33), (2, 1, MAX_HEAD_DIM + 1)):
        cases.append((resized(copied(llama), *shape), None))
    for shape in ((2, 1, 2 * MAX_HEAD_DIM), (2, 1, 33), (3, 2, 64)):
        head = resized(copied(builtin()["builtin-eagle"]), *shape)
        cases.append(("builtin", {"method": "eagle", "model": head}))
    head = edited(copied(builtin()["builtin-mtp"]), partial_rotary_factor=16.0)
    cases.append(("builtin", {"method": "mtp", "model": head}))
    run = subprocess.run(
        [sys.executable, "-c", LOAD_EACH, json.dumps(cases)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, f"exit status {run.returncode}: {run.stderr[-2000:]}"
    message = run.stdout.splitlines()
    keys = ["sliding_window"] * 2 + [
        "num_key_value_heads",
        *["head_dim"] * 5,
        "num_attention_heads",
        "partial_rotary_factor",
    ]
    assert len(message) == len(keys)
    for key, line in zip(keys, message):
        assert key in line, line


# ---- names of tensors and shards


def shards(folder: Path, weight_map: Any) -> str:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError) as error:
        LLM(str(folder))
    return str(error.value)


@pytest.mark.parametrize(
    "shard",
    [5, None, ["x"], {}, "../model.safetensors", "/etc/passwd", "a\0b", "", "x" * 5000, "gone.safetensors"],
)
def test_a_weight_map_names_files_of_its_folder(shard: Any, tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "inner" / "model"))
    shutil.copy(folder / "model.safetensors", tmp_path / "inner" / "model.safetensors")
    message = shards(folder, {"model.norm.weight": shard})
    assert "model.safetensors.index.json" in message and "weight_map" in message


@pytest.mark.parametrize("name", ["{}.0.linear.weight", "0.{}.linear.weight", "0.{}.weight"])
@pytest.mark.parametrize("number", ["999999999999", "9" * 5000, "9999"])
def test_numbers_in_names_are_no_promises(name: str, number: str, target: LLM, tmp_path: Path) -> None:
    """A head with one tensor of a high number is no head with so many blocks."""
    folder = Path(shutil.copytree(builtin()["builtin-medusa"], tmp_path / "medusa"))
    file = next(folder.glob("*.safetensors"))
    save_file({**load_file(file), name.format(number): torch.zeros(1)}, file)
    began = time.process_time()
    with pytest.raises(ModelError, match="medusa"):
        target.use({"method": "medusa", "model": str(folder)})
    assert time.process_time() - began < SECONDS


def test_a_tensor_without_its_elements(tiny: Path, tmp_path: Path) -> None:
    """A pickle may hold a view that repeats one number."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(1).expand(1 << 40)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*more elements"):
        LLM(str(folder))


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 9999), ("intermediate_size", 1 << 24), ("vocab_size", 1 << 26)]
)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi"])
def test_sizes_that_the_files_do_not_hold(family: str, key: str, value: int, tmp_path: Path) -> None:
    """Plausible each, and far beyond the weights: refused before anything of that size is allocated."""
    folder = Path(tiny_checkpoint(tmp_path / "m", family))
    config = json.loads((folder / "config.json").read_text())
    if key == "num_hidden_layers":
        config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    began = time.process_time()
    with pytest.raises(ModelError):
        LLM(str(folder), max_model_len=32)
    assert time.process_time() - began < 2 * SECONDS


def test_rotations_of_too_many_positions() -> None:
    """Each size is allowed; the table of both would take 32 GB."""
    with pytest.raises(CapacityError, match=r"max_position_embeddings.*max_model_len"):
        rotations(LlamaConfig(head_dim=512, num_attention_heads=1, hidden_size=512), 1 << 24)


# ---- JSON itself


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested"),
        (b'{"a": NaN}', "a is nan"),
        (b'{"a": [1, {"b": -Infinity}]}', "b is -inf"),
        (b'{"a": 1e999}', "a is inf"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b'{"a": "\xff\xfe"}', "decode"),
        (b"\xff\xfe{\0}\0", "decode"),
        (b"5", "no object"),
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_invalid_json_is_refused_by_file_name(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json") as error:
        read_json(tmp_path / "config.json")
    assert message in str(error.value)


def test_a_huge_json_file_is_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk
    with pytest.raises(ModelError, match=r"config\.json has 1,099,511,627,776 bytes"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match="cannot be read"):
        read_json(tmp_path)
