#!/usr/bin/env python
"""Tests, certificate and figures of the Triton kernels on a CUDA device, as one dated JSON file.

scripts/gpu.py [--out FILE]              all parts; under ten minutes.  Models are random or the built-in pair
scripts/gpu.py --parts decoder pair      some of tests, certificate, decoder, attention, pair, peer
scripts/gpu.py --shapes 1b               sizes of the decoder and the attention; default: 1b 8b
scripts/gpu.py --parts pair --pair wide grown --batches 1 8 --methods draft auto --rounds 3
scripts/gpu.py --shapes tiny             tries the script itself, on the CPU; no figures

Outrider need not be installed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TESTS = ["tests/backends/test_triton_attention.py", "tests/backends/test_triton_experts.py",
         "tests/backends/test_triton_graphs.py", "tests/backends/test_triton_ops.py",
         "tests/backends/test_triton_verifier.py", "tests/backends/test_triton_rule_kernels.py",
         "tests/exact/test_triton.py",
         "tests/exact/test_triton_variants.py", "tests/heads/test_device_trees.py",
         "tests/models/test_draft_chains.py"]  # fmt: skip
PARTS = ("decoder", "attention", "pair", "peer", "certificate", "tests")
METHODS = ("draft", "eagle3", "ngram", "auto", "eagle3-tree")  # of the pair; the last one only if asked for
Save = Callable[[Any], None]
NODES, CONTEXTS = (0, 4, 15, 16, 63, 64), (1024, 8192, 32768)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--pair", nargs="+", choices=("wide", "grown"), default=["wide"], help="its targets")
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="of the pair")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:4], help="of the pair")
    options.add_argument("--rounds", type=int, default=2, help="of every figure of the pair")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    tiny = given.shapes == ["tiny"]
    if not tiny and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here; --shapes tiny tries the script in the interpreter.")
    os.environ["OUTRIDER_KERNELS"] = "triton"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), **machine(device)}
    out = given.out or Path(f"gpu-{found['date']}.json")
    for part in PARTS:
        if part in given.parts:
            began = time.time()

            def save(figures: Any, part: str = part, began: float = began) -> None:
                found[part], found[f"seconds of {part}"] = figures, round(time.time() - began)
                out.write_text(json.dumps(found, indent=2, default=str) + "\n")

            save(figures(part, given, device, tiny, save))
            print(json.dumps({part: found[part]}, indent=1, default=str), flush=True)
            gc.collect()


def figures(part: str, given: argparse.Namespace, device: torch.device, tiny: bool, save: Save) -> Any:
    """The figures of a part; `save` gets them while they are not complete, where it takes long."""
    if part == "tests":
        return None if tiny else run_tests()
    if part == "pair":
        return pair(given, device, tiny, save)
    if part == "peer":
        from gpu_peer import peer

        return peer(device, tiny)
    if part == "certificate":
        with tempfile.TemporaryDirectory() as folder:
            return certificate(random_model(Path(folder), given.shapes[0]), device)
    if part == "decoder":
        return {name: decoder_figures(name, device, 40 if tiny else 1024, tiny) for name in given.shapes}
    contexts, many = ((40,), (1, 3)) if tiny else (CONTEXTS, (1, 16, 64))
    cases = [(context, nodes) for context in contexts for nodes in many]
    return {name: [attention(SHAPES[name], device, *case) for case in cases] for name in given.shapes}


def pair(given: argparse.Namespace, device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    from gpu_pair import Options, pair

    if not tiny:
        return pair(Options(given.pair, given.batches, given.methods, given.rounds), device, save)
    with mock.patch.dict(os.environ, OUTRIDER_KERNELS="torch"):  # to load it interpreted takes minutes
        return pair(Options(["wide"], (1,), given.methods, rounds=1, tokens=3, tiny=True), device, save)


def machine(device: torch.device) -> dict[str, Any]:
    import triton

    from outrider.bench.conditions import conditions

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: Triton's interpreter"
    return {**conditions(), "device": name, "triton": triton.__version__}


def run_tests() -> dict[str, Any]:
    several = ["-n", "8"] if find_spec("xdist") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *several, *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OUTRIDER_KERNELS"}
        | {"PYTHONPATH": str(ROOT / "src")},
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "last_lines": [*failed[:60], *lines[-3:]]}


def random_model(folder: Path, shape: str) -> str:
    from outrider.testing import bare_checkpoint

    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    sizes = {"max_position_embeddings": 4096, "initializer_range": 0.05, "tie_word_embeddings": False}
    return str(bare_checkpoint(folder, dtype=dtype, **sizes, **SHAPES[shape]))


def certificate(model: str, device: torch.device) -> dict[str, Any]:
    """Texts with and without speculation, and the start-up test of bit-exactness."""
    from outrider import LLM, SamplingParams
    from outrider.testing import KnownTexts, Scripts, random_prompts

    cuda = device.type == "cuda"
    llm = LLM(
        model, speculative_config=None, device=device.type, dtype="auto", max_model_len=1024 if cuda else 64
    )
    tokens, longest = (64, 200) if cuda else (6, 12)
    truth, same, accepted = KnownTexts(), 0, 0
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(8 if cuda else 2, 0, longest)]
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=i, temperature=i % 2)
        for i in range(len(prompts))
    ]
    plain = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params)]
    for prompt, p, output in zip(prompts, params, plain):
        truth.learn(prompt["prompt_token_ids"], p.seed or 0, output.outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 24, "num_speculative_tokens": 6})
    for mine, output in zip(llm.generate(prompts, params), plain):
        same += mine.outputs[0].token_ids == output.outputs[0].token_ids
        accepted += mine.speculation.accepted
    return {
        "backend": llm.engine.decoder.backend.name,
        "self_test": llm.engine.exact,
        "texts": len(plain),
        "same_texts": same,
        "accepted_nodes": accepted,
    }


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int, warm: int = 4) -> float:
    """Median of `rounds` calls, each until the device is idle."""
    taken = []
    for _ in range(rounds + warm):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken[warm:]), 4)


def decoder_figures(shape: str, device: torch.device, context: int, tiny: bool) -> dict[str, Any]:
    """A step of 1 + n rows, a chain of n nodes behind `context` tokens, with all logits; and a prefill."""
    from outrider.models.decoder import Decoder
    from outrider.models.placement import Precision

    decoder = Decoder(
        random_checkpoint(SHAPES[shape]), Precision(torch.float32 if tiny else torch.bfloat16), device, 4096
    )
    pool, table, rounds = decoder.pool(context + 2100), array("i", range(context + 2100)), 1 if tiny else 20

    def forward(nodes: int, start: int, wanted: int) -> None:
        from outrider.core.step_input import StepInput

        step = StepInput.of_chain(table, start, [1] * (nodes + 1))
        step.logits_rows = [*range(nodes + 1 - wanted, nodes + 1)]
        decoder.forward_step(step, pool, {})

    copied = copy_rate(device, rounds)
    weights = sum(p.numel() * p.element_size() for p in _weights(decoder))
    took = {n: milliseconds(lambda n=n: forward(n, context - 1, n + 1), device, rounds) for n in NODES}
    prefill = None if tiny else milliseconds(lambda: forward(2047, 0, 1), device, 5)
    graphs, decoder.backend.graphs = decoder.backend.graphs, None
    launched = milliseconds(lambda: forward(0, context - 1, 1), device, rounds)
    return {
        "context": context,
        "copy_gb_per_second": round(copied, 1),
        "weight_bytes": weights,
        "step_ms_by_nodes": took,
        "step_of_one_row_without_graphs_ms": launched,
        "share_of_copy_bandwidth_of_one_row": round(weights / took[0] / 1e6 / copied, 3),
        "cost_of_nodes": {n: round(took[n] / took[0], 3) for n in NODES[1:]},
        "prefill_of_2048_ms": prefill,
        "graphs": graphs and asdict(graphs.counts),
    }


def copy_rate(device: torch.device, rounds: int) -> float:
    """GB/s of a copy on the device, bytes read and written."""
    source = torch.empty(1 << (31 if device.type == "cuda" else 16), dtype=torch.uint8, device=device)
    return 2 * source.numel() / milliseconds(source.clone, device, rounds) / 1e6


def random_checkpoint(sizes: Mapping[str, int]) -> Any:
    """A Llama of these sizes without a file of weights: they are drawn on the device when asked for."""
    from transformers import LlamaConfig

    from outrider.checkpoints.hub import Checkpoint

    class Random(Checkpoint):
        def tensors(self) -> Any:
            return RandomTensors()

    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**sizes, max_position_embeddings=4096, tie_word_embeddings=False)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        made = Checkpoint.open(folder)
    return Random(**{field.name: getattr(made, field.name) for field in fields(made)})


class RandomTensors:
    """`Source` of random weights."""

    def __contains__(self, name: str) -> bool:
        return not name.endswith("bias")

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return torch.ones(shape)

    def linear(self, name: str, outputs: int, inputs: int) -> torch.Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5


def _weights(decoder: Any) -> list[torch.Tensor]:
    parts = [part for layer in decoder.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [part.values for part in (*parts, decoder.lm_head)]


def attention(sizes: dict[str, int], device: torch.device, context: int, nodes: int) -> dict[str, Any]:
    """One layer, one request with a tree of n nodes, beside SDPA with a mask on contiguous K and V."""
    from outrider.backends.base import LayerKV, Scores
    from outrider.backends.select import backend_for
    from outrider.cache.pool import Pool
    from outrider.core.step_input import StepInput

    heads, kv_heads, d = (sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
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
    kv, scores = LayerKV(step, pool, 0), Scores(d**-0.5, 0)
    calls: dict[str, Callable[[], object]] = {
        "tree_attention_us": lambda: backend.attend(q, spec, kv, scores),
        "sdpa_us": lambda: sdpa(rows, k, v, attn_mask=mask, enable_gqa=True),
    }
    read = 2 * kv_heads * (context + nodes) * d * dtype.itemsize
    timed = {name: device_microseconds(call) for name, call in calls.items()} if cuda else {}
    return {"context": context, "nodes": nodes, "kv_bytes": read, **timed}


def device_microseconds(call: Callable[[], object]) -> float:
    """Time of a call on the device, without launches from Python: the median of replays of a graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 20
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    taken = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / repeats)
    return round(statistics.median(taken), 2)


if __name__ == "__main__":
    main()
