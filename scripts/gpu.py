#!/usr/bin/env python
"""Tests, certificate and figures of the Triton kernels on a CUDA device, as one dated JSON file.

scripts/gpu.py [--shape 1b|8b] [--out FILE]  under ten minutes with 1b; models are random
scripts/gpu.py --shape tiny                  tries the script itself, in Triton's interpreter; no figures
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
ROOT = Path(__file__).parents[1]
TESTS = ["tests/backends/test_triton_attention.py", "tests/backends/test_triton_graphs.py",
         "tests/backends/test_triton_ops.py", "tests/backends/test_triton_verifier.py",
         "tests/exact/test_triton.py", "tests/heads/test_device_trees.py",
         "tests/models/test_draft_chains.py"]  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--shape", choices=SHAPES, default="1b")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    tiny = given.shape == "tiny"
    if not tiny and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here; --shape tiny tries the script in the interpreter.")
    os.environ["OUTRIDER_KERNELS"] = "triton"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.time()
    found = {"date": datetime.date.today().isoformat(), **machine(device), "shape": given.shape}
    if not tiny:
        found["tests"] = run_tests()
    with tempfile.TemporaryDirectory() as folder:
        found["certificate"] = certificate(random_model(Path(folder), given.shape), device)
        found["decoder"] = decoder_figures(folder, device, 40 if tiny else 1024, 1 if tiny else 20)
    found["attention"] = attention_figures(SHAPES[given.shape], device, [40] if tiny else [1024, 8192, 32768])
    found["seconds"] = round(time.time() - began)
    text = json.dumps(found, indent=2)
    out = given.out or Path(f"gpu-{found['date']}.json")
    out.write_text(text + "\n")
    print(text)


def machine(device: torch.device) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: Triton's interpreter"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def run_tests() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    return {"passed": done.returncode == 0, "last_lines": lines[-12:]}


def random_model(folder: Path, shape: str) -> str:
    from outrider.testing import bare_checkpoint

    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    sizes = {"max_position_embeddings": 4096, "initializer_range": 0.05, "tie_word_embeddings": False}
    return str(bare_checkpoint(folder, dtype=dtype, **sizes, **SHAPES[shape]))


def certificate(model: str, device: torch.device) -> dict[str, Any]:
    """Texts with and without speculation, and the start-up test of bit-exactness."""
    from outrider import LLM, SamplingParams
    from outrider.testing import KnownTexts, Scripts, random_prompts

    llm = LLM(
        model, speculative_config=None, device=device.type, dtype="auto",
        max_model_len=1024 if device.type == "cuda" else 64,
    )  # fmt: skip
    tokens, longest = (64, 200) if device.type == "cuda" else (6, 12)
    truth, same, accepted = KnownTexts(), 0, 0
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2 if longest == 12 else 8, 0, longest)]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=i, temperature=i % 2)
              for i in range(len(prompts))]  # fmt: skip
    plain = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params)]
    for prompt, p, output in zip(prompts, params, plain):
        truth.learn(prompt["prompt_token_ids"], p.seed or 0, output.outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 24, "num_speculative_tokens": 6})
    for mine, output in zip(llm.generate(prompts, params), plain):
        same += mine.outputs[0].token_ids == output.outputs[0].token_ids
        accepted += mine.speculation.accepted
    return {"backend": llm.engine.decoder.backend.name, "self_test": llm.engine.exact, "texts": len(plain),
            "same_texts": same, "accepted_nodes": accepted}  # fmt: skip


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of `rounds` calls, each until the device is idle, after three to warm up."""
    taken = []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken[3:]), 4)


def decoder_figures(model: str, device: torch.device, context: int, rounds: int) -> dict[str, Any]:
    """A forward of 1 + n rows, a chain of n nodes behind `context` tokens, with all logits."""
    from outrider.checkpoints.hub import Checkpoint
    from outrider.core.step_input import StepInput
    from outrider.models.decoder import Decoder
    from outrider.models.placement import Precision

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = Decoder(Checkpoint.open(model), Precision(dtype), device, 4096)
    pool, table = decoder.pool(context + 80), array("i", range(context + 80))

    def forward(nodes: int) -> None:
        step = StepInput()
        step.chain(table, context - 1, [1])
        if nodes:
            paths = [table[context : context + i + 1].tolist() for i in range(nodes)]
            step.nodes(table, context, paths, [1] * nodes)
        step.logits_rows = [*range(nodes + 1)]
        decoder.forward_step(step.build(), pool, {})

    source = torch.empty(1 << (30 if device.type == "cuda" else 16), dtype=torch.uint8, device=device)
    copy = milliseconds(lambda: source.clone(), device, rounds)
    weights = sum(p.numel() for p in _weights(decoder)) * dtype.itemsize
    took = {nodes: milliseconds(lambda n=nodes: forward(n), device, rounds) for nodes in (0, 16, 64)}
    graphs, decoder.backend.graphs = decoder.backend.graphs, None
    launched = {nodes: milliseconds(lambda n=nodes: forward(n), device, rounds) for nodes in (0, 16, 64)}
    return {
        "context": context,
        "copy_gb_per_second": round(2 * source.numel() / copy / 1e6, 1),
        "weight_bytes": weights,
        "forward_ms_by_nodes": took,
        "forward_ms_by_nodes_without_graphs": launched,
        "graph_bytes": graphs and graphs.bytes,
        "weights_gb_per_second_of_one_row": round(weights / took[0] / 1e6, 1),
    }


def _weights(decoder: Any) -> list[torch.Tensor]:
    names = ("qkv", "o", "gate_up", "down")
    layers = [getattr(layer, name).values for layer in decoder.layers for name in names]
    return [*layers, decoder.lm_head.values]


def attention_figures(sizes: dict[str, int], device: torch.device, contexts: list[int]) -> list[Any]:
    many = (1, 16, 64) if device.type == "cuda" else (1, 3)
    return [attention(sizes, device, context, nodes) for context in contexts for nodes in many]


def attention(sizes: dict[str, int], device: torch.device, context: int, nodes: int) -> dict[str, Any]:
    """One layer, one request with a chain of n nodes, beside SDPA on contiguous K and V."""
    from outrider.backends.base import LayerKV, Scores
    from outrider.backends.select import backend_for
    from outrider.cache.pool import Pool
    from outrider.core.step_input import StepInput

    heads, kv_heads, d = (sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec: Any = argparse.Namespace(heads=heads, kv_heads=kv_heads, head_dim=d)
    backend, table = backend_for(device, dtype), array("i", range(context + nodes))
    pool = Pool(1, kv_heads, d, context + nodes, dtype, device)
    pool.data.normal_()
    step = StepInput()
    step.nodes(table, context, [table[context : context + i + 1].tolist() for i in range(nodes)], [1] * nodes)
    q = torch.randn(step.build().length, heads, d, device=device, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, context + nodes, d, device=device, dtype=dtype) for _ in "kv")
    mask = torch.ones(nodes, context + nodes, dtype=torch.bool, device=device).tril(context)
    rows, sdpa = q.transpose(0, 1)[None], torch.nn.functional.scaled_dot_product_attention
    rounds = 20 if device.type == "cuda" else 1
    return {
        "context": context,
        "nodes": nodes,
        "tree_attention_ms": milliseconds(
            lambda: backend.attend(q, spec, LayerKV(step, pool, 0), Scores(d**-0.5, 0)), device, rounds
        ),
        "sdpa_ms": milliseconds(lambda: sdpa(rows, k, v, attn_mask=mask, enable_gqa=True), device, rounds),
    }


if __name__ == "__main__":
    main()
