"""Helpers of several test folders: engines with changed EOS ids, weight sizes, LoRA adapters."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import LLM, RequestOutput, SamplingParams
from outrider.backends.cpu import structs
from outrider.backends.cpu.structs import LINEARS, VECTORS
from outrider.checkpoints.hub import Checkpoint
from outrider.control.prefill import PrefillBudget
from outrider.core.step_input import StepInput
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.testing import KnownTexts, Scripts, check_idle, use_example


@contextmanager
def eos_replaced(llms: Sequence[LLM], ids: Sequence[int]) -> Iterator[None]:
    """End the texts of these engines at other ids than generation_config.json names."""
    before = [llm.engine.ending for llm in llms]
    try:
        for llm in llms:
            llm.engine.ending = frozenset(ids)
        yield
    finally:
        for llm, old in zip(llms, before):
            llm.engine.ending = old


# ---- measuring


def weight_bytes(llm: LLM) -> int:
    """Bytes of all weights of a decoder; a tied head counts once, as the embedding."""
    decoder: Any = llm.engine.decoder
    linears = [
        decoder.embedding,
        decoder.lm_head,
        *(getattr(layer, name) for layer in decoder.layers for name in LINEARS),
    ]
    for experts in filter(None, (layer.experts for layer in decoder.layers)):
        linears += [experts.router, *experts.gate_up, *experts.down]
    for delta in filter(None, (layer.delta for layer in decoder.layers)):
        linears += [delta.qkvz, delta.gates]
    matrices = list({id(matrix): matrix for matrix in linears if matrix is not None}.values())
    vectors = [decoder.norm, *(getattr(layer, name) for layer in decoder.layers for name in VECTORS)]
    biases = [matrix.bias for matrix in matrices]
    return sum(
        tensor.nbytes
        for tensor in [*(matrix.data for matrix in matrices), *vectors, *biases]
        if tensor is not None
    )


# ---- running


def decoder_of(model: str | Path, dtype: torch.dtype = torch.float32, max_len: int = 256) -> Decoder:
    return Decoder(Checkpoint.open(str(model)), Precision(dtype), torch.device("cpu"), max_len)


@torch.inference_mode()
def text_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """float32 [len(ids), V] after every token of a text, in one prefill."""
    x = model.forward(StepInput.of_ids(ids), model.pool(len(ids)))
    return model.logits(x, list(range(len(ids)))).clone()


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The output of one prompt alone."""
    return llm.generate({"prompt_token_ids": list(prompt)}, params)[0]


@torch.inference_mode()
def transformers_tokens(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """transformers' greedy continuations of prompts of one length, of `new` tokens each."""
    ids = torch.tensor(prompts)
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    return output[:, ids.shape[1] :].tolist()


def check_speculation(model: str, prompts: Sequence[Sequence[int]]) -> None:
    """Look-up and scripted trees leave the texts of a checkpoint as they are, greedy and sampled."""
    plain, fast, truth = LLM(model, enable_prefix_caching=False), LLM(model), KnownTexts()
    assert fast.engine.exact
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
        for prompt in prompts:
            truth.learn(prompt, 3, answer(plain, prompt, params).outputs)
        use_example(fast, "ngram", num_speculative_tokens=4)
        for script in (None, Scripts(truth).hidden):
            if script is not None:
                fast.use({"method": "scripted", "script": script, "nodes": 40, "num_speculative_tokens": 6})
            outputs = fast.generate(token_prompts(prompts), params)
            for prompt, output in zip(prompts, outputs):
                assert [*prompt, *output.outputs[0].token_ids] == truth.texts[tuple(prompt), 3, 0]
            check_idle(fast)
        assert sum(output.speculation.accepted for output in outputs) > 0


def token_prompts(ids: Sequence[Sequence[int]]) -> list[Mapping[str, Any]]:
    """Prompts of token ids as `generate` takes them."""
    return [{"prompt_token_ids": list(prompt)} for prompt in ids]


def attended_slots(step_input: StepInput, table: array[int], row: int) -> list[int]:
    """The cache slots that the C kernels attend to for one row, read at the addresses they get."""
    rows = structs.view(step_input).rows
    assert (c_void_p * step_input.length).from_address(rows.tables)[row] == table.buffer_info()[0]
    context, depth = (
        (c_int64 * step_input.length).from_address(at)[row] for at in (rows.table_lengths, rows.path_lengths)
    )
    paths = (c_int32 * (step_input.length * rows.path_width)).from_address(rows.paths or 0)
    slots = [*table[:context], *paths[row * rows.path_width : row * rows.path_width + depth]]
    assert slots == step_input.key_slots(row)
    return slots


def requests_of(step_input: StepInput) -> list[tuple[array[int], int, int]]:
    """(slot table, first row, rows) of every request of a step."""
    bounds = zip(step_input.slot_tables, step_input.query_start, step_input.query_start[1:])
    return [(table, first, end - first) for table, first, end in bounds]


# ---- LoRA adapters


def write_adapter(
    folder: Path,
    model: str,
    seed: int = 0,
    projections: str = "q k v o gate up down",
    binary: bool = False,
    **config: Any,
) -> dict[str, tuple[Any, Any]]:
    """Save a random adapter for a tiny checkpoint in PEFT's format; return module name -> (A, B)."""
    import re

    from safetensors.torch import load_file, save_file

    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "base_model_name_or_path": model,
        **config,
    }
    torch.manual_seed(seed)
    matrices: dict[str, tuple[Any, Any]] = {}
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(f".{projection}_proj" for projection in projections.split())):
            patterns = settings.get("rank_pattern", {}).items()
            rank = next(
                (rank for pattern, rank in patterns if re.search(rf"(^|\.)({pattern})$", module)),
                settings["r"],
            )
            outputs, inputs = weight.shape
            matrices[module] = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) * 0.25
    tensors = {
        f"base_model.model.{m}.lora_{x}.weight": t for m, pair in matrices.items() for x, t in zip("AB", pair)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")
    return matrices


def unpaced(llm: LLM) -> None:
    """Turns prefill pacing off: which rows share a step does not depend on measured times."""
    llm.engine.scheduler.hooks.prefill = lambda decoding, tokens, waiting: PrefillBudget(tokens)
