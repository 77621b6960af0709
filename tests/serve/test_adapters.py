"""/v1/load_lora_adapter and /v1/unload_lora_adapter: an adapter is a model while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers import write_adapter
from safetensors.torch import save_file
from served import Served

from outrider import LLM, LoRARequest, SamplingParams
from outrider.checkpoints.hub import locate

MODEL, PROMPT = "builtin-draft", "Once upon a time"


def models(server: Served) -> dict[str, Any]:
    return {model["id"]: model["parent"] for model in server.get("/v1/models").json()["data"]}


def adapter_in(folder: Path) -> str:
    """A random adapter of the model's MLPs."""
    config = json.loads((locate(MODEL) / "config.json").read_text())
    shape = config["intermediate_size"], config["hidden_size"]
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(config["num_hidden_layers"])]
    save_file({name: torch.zeros(shape) for name in names}, folder / "model.safetensors")
    write_adapter(folder / "adapter", str(folder))
    return str(folder / "adapter")


def test_an_adapter_is_a_model_while_it_is_loaded(open_server: Served, tmp_path: Path) -> None:
    path = adapter_in(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12)
    adapter = LoRARequest("style", 1, path)
    expected = LLM(MODEL, enable_lora=True).generate(PROMPT, params, lora_request=adapter)[0].outputs[0].text
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}

    def text(model: str) -> str:
        return str(open_server.post("/v1/completions", {**body, "model": model}).json()["choices"][0]["text"])

    place = {"lora_name": "style", "lora_path": path}
    assert open_server.post("/v1/load_lora_adapter", place).json()["status"] == "loaded"
    assert models(open_server) == {MODEL: None, "style": MODEL}
    assert text("style") == expected != text(MODEL)
    assert open_server.post("/v1/load_lora_adapter", place).status_code == 400
    assert open_server.post("/v1/unload_lora_adapter", {"lora_name": "style"}).status_code == 200
    assert models(open_server) == {MODEL: None}
    assert open_server.post("/v1/completions", {**body, "model": "style"}).status_code == 404
