"""Speed of the core on a CPU against plain decoding and other engines, as ratios within one run.

    python benchmarks/core.py --folder DIR [--gguf FILE] [--openvino DIR] [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16.  The other engines run
from their own environments as peers.py describes; one that is not installed is left out.  The machine should
be idle.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from command_line import parser_of, write
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.core.step_input import StepInput

PROMPT, NEW = 64, 128
LLAMA_100M = {  # 100.7 M weights
    "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


def checkpoint(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """A random Llama of the size that the figures are about; sizes: keys of its config in place of these."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**LLAMA_100M, **sizes}))
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(length: int, salt: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + 13 * salt) % 8000 + 100 for i in range(length)]}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def cold(llm: LLM, rows: int, count: int) -> float:
    """Seconds to answer `rows` prompts at once with `count` tokens each, nothing cached."""
    llm.engine.forget_prefixes()
    return seconds(lambda: llm.generate([prompt(PROMPT, i) for i in range(rows)], greedy(count)))


def decode_speed(llm: LLM, rows: int = 1, repeats: int = 5) -> float:
    """New tokens a second after the first, all rows together; the median of `repeats`."""
    times = [cold(llm, rows, NEW + 1) - cold(llm, rows, 1) for _ in range(repeats)]
    return rows * NEW / statistics.median(times)


def forward_ms(llm: LLM, rows: tuple[int, ...] = (1, 2, 4, 8, 16)) -> dict[int, float]:
    """Milliseconds of one decode step with so many rows: the median step of a run."""
    return {n: n / decode_speed(llm, n, 3) * 1e3 for n in rows}


def verification_ms(
    llm: LLM, rows: tuple[int, ...] = (1, 8, 16, 64), context: int = 128, repeats: int = 50
) -> dict[int, float]:
    """Milliseconds of a forward over the root and the binary draft tree of one request: the median.

    `rows` are root and nodes, with the logits of all, behind `context` tokens of random K/V.  The sizes take
    turns.
    """
    decoder, times = llm.engine.decoder, {n: list[float]() for n in rows}
    pool, table = decoder.pool(context + max(rows)), array("i", range(context + 1))
    for layer in range(decoder.spec.layers):
        for part in (0, 1):
            kv = torch.randn(context, decoder.spec.kv_heads, decoder.spec.head_dim)
            pool.write(layer, part, torch.arange(context), kv)
    steps = {n: StepInput() for n in rows}
    for n, step_input in steps.items():
        paths: list[list[int]] = []
        for node in range(n - 1):
            paths.append([*(paths[node // 2 - 1] if node > 1 else ()), context + 1 + node])
        step_input.chain(table, context, [100])
        if paths:
            step_input.nodes(table, context + 1, paths, [*range(200, 199 + n)])
        step_input.logits_rows = [*range(n)]
        step_input.build()
    for _ in range(repeats):
        for n, step_input in steps.items():
            decoder.forward_step(step_input, pool, {})  # the logits' memory is there
            times[n].append(seconds(lambda step=step_input: decoder.forward_step(step, pool, {})))
    return {n: statistics.median(of_size) * 1e3 for n, of_size in times.items()}


def overhead_ms(llm: LLM, config: dict[str, Any] | None, params: SamplingParams) -> float:
    """Milliseconds of a step outside the forwards of target and draft, batch 1: the best of five runs.

    Picks are no part of a forward, even within the same call: the kernels count their time.
    """
    llm.use(config)
    inside, busy = [0.0], [False]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            outer, busy[0] = not busy[0], True
            result = function(*args, **named)
            if outer:  # no part of another one
                busy[0] = False
                inside[0] += time.perf_counter() - began
            return result

        return wrapper

    decoders = [llm.engine.decoder] + (
        [llm.engine.drafter.decoder] if hasattr(llm.engine.drafter, "decoder") else []
    )
    for decoder in decoders:
        for name in ("forward_step", "draft_chain", "forward", "logits"):
            setattr(decoder, name, timed(getattr(decoder, name)))
    picking = ctypes.c_double.in_dll(llm.engine.decoder.backend.lib, "picking")
    best = float("inf")
    for _ in range(5):
        llm.generate(prompt(PROMPT), params)
        llm.engine.reset()
        inside[0] = picking.value = 0.0
        total = seconds(lambda: llm.generate(prompt(PROMPT), params))
        best = min(best, (total - inside[0] + picking.value) / llm.engine.steps * 1e3)
    for decoder in decoders:
        del decoder.forward_step, decoder.draft_chain, decoder.forward, decoder.logits
    return best


def first_token(llm: LLM) -> tuple[float, float]:
    """Milliseconds to the first token of a 512-token prompt, uncached and cached (medians of seven)."""
    misses, hits = [], []
    for _ in range(7):
        llm.engine.forget_prefixes()
        misses.append(seconds(lambda: llm.generate(prompt(512), greedy(1))))
        hits.append(seconds(lambda: llm.generate(prompt(512), greedy(1))))
    return statistics.median(misses) * 1e3, statistics.median(hits) * 1e3


def peak_memory(folder: Path) -> dict[str, int]:
    """Peak bytes of a separate process that loads the model and answers 8 prompts, and their bound."""
    limit = 64 << 20
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import core\n"
        f"llm = core.LLM(model={str(folder)!r}, kv_cache_memory_bytes={limit}, max_model_len=1024, "
        f"speculative_config=None)\n"
        "llm.generate([core.prompt(512, i) for i in range(8)], core.greedy(64))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), 1024)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    peak = int(out[-2]) * int(out[-1])
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return {
        "peak": peak,
        "weights": weights,
        "limit": limit,
        "allowed": int(weights * 1.15) + limit + 600_000_000,
    }


def run(folder: Path, gguf: Path | None, openvino: Path | None) -> dict[str, Any]:
    model = checkpoint(folder / "llama100m")
    llm = LLM(model=str(model), max_num_batched_tokens=512, max_num_seqs=64, speculative_config=None)
    ours = [decode_speed(llm)]
    plain = peers.plain(str(model), PROMPT, NEW, gguf=gguf and str(gguf), openvino=openvino and str(openvino))
    ours.append(decode_speed(llm))  # before and after the rivals: shows how steady the machine is
    rows, verification = forward_ms(llm, (1, 2, 4, 8, 16, 64)), verification_ms(llm)
    theirs = peers.batched(str(gguf)) if gguf else {}
    sampled = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=NEW, ignore_eos=True, seed=1)
    small = str(checkpoint(folder / "draft", seed=1, num_hidden_layers=2))
    drafts: dict[str, dict[str, Any] | None] = {
        "plain": None, "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "draft_model": {"model": small, "num_speculative_tokens": 4},
    }  # fmt: skip
    outside = {
        f"{name}, {how}": overhead_ms(llm, c, p)
        for name, c in drafts.items()
        for how, p in (("greedy", greedy(NEW)), ("0.8", sampled))
    }
    llm.use(None)
    miss, hit = first_token(llm)
    wide = checkpoint(folder / "wide", vocab_size=152064, num_hidden_layers=1, tie_word_embeddings=True)
    wide = LLM(model=str(wide), speculative_config=None)
    for how, params in (("greedy", greedy(NEW)), ("0.8", sampled)):
        outside[f"ngram, {how}, V = 152064"] = overhead_ms(wide, drafts["ngram"], params)
    return {
        "plain tokens/s": {"outrider": ours, **plain},
        "step ms by rows": {"outrider": rows, "llama.cpp": theirs},
        "verification ms by rows of one request": verification,
        "outside the forwards, ms a step": outside,
        "8 concurrent over 1": rows[1] * 8 / rows[8],
        "first token of 512, ms": {"cold": miss, "cached": hit, "ratio": miss / hit},
        "memory": peak_memory(model),
    }


def show(result: dict[str, Any], console: Console) -> None:
    made = Table("figure", "value", title="Outrider, the core")
    for name, value in result.items():
        text = "\n".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        made.add_row(name, text)
    console.print(made)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--openvino", type=Path)
    given = parser.parse_args()
    found = {"conditions": conditions(), **run(given.folder, given.gguf, given.openvino)}
    show(found, Console())
    write(given.json, found)
