"""Weights and K/V in few bits: speed against llama.cpp at the same bits, and memory.

    python benchmarks/quantized.py --folder DIR [--q8 FILE.gguf] [--q4 FILE.gguf] [--json OUT]

DIR gets (or holds) the checkpoint of core.py.  The GGUF files are the same weights through llama-quantize,
Q8_0 and Q4_0.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import peers
import torch
from command_line import parser_of, write
from core import NEW, PROMPT, checkpoint, conditions, decode_speed, first_token, forward_ms
from rich.console import Console

from outrider import LLM
from outrider.backends.cpu.structs import LINEARS
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision, pick_dtype

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CONTEXT = 8192


def weight_bytes(decoder: Any) -> int:
    """Bytes of all packed weights."""
    weights = {
        id(w): w
        for w in (
            decoder.embedding,
            decoder.lm_head,
            *(getattr(x, name) for x in decoder.layers for name in LINEARS),
        )
    }
    return sum(weight.data.nbytes for weight in weights.values())


def figures(model: Path, form: str, gguf: Path | None) -> dict[str, Any]:
    """Ours, theirs, ours again, which shows how steady the machine is."""
    llm = LLM(model=str(model), speculative_config=None, **FORMS[form])
    ours = [decode_speed(llm, 1, 1), decode_speed(llm)]
    theirs: dict[str, Any] = peers.llama_cpp(str(gguf), PROMPT, NEW, peers.DEFAULT) if gguf else {}
    ours = [*ours[1:], decode_speed(llm)]
    steps = peers.batched(str(gguf), tools=peers.Tools(repeats=1)) if gguf else {}
    return {
        "tokens/s": {"outrider": ours, "llama.cpp": theirs},
        "ratio": statistics.mean(ours) / theirs["tokens_per_s"] if theirs.get("status") == "ok" else None,
        "step ms by rows": {"outrider": forward_ms(llm), "llama.cpp": steps.get("step_ms")},
        "first token of 512, cold, ms": first_token(llm)[0],
        "weight bytes": weight_bytes(llm.engine.decoder),
    }


def long_step_ms(model: Path, form: str, kv: str) -> float:
    """Milliseconds of one forward and its logits behind 8,192 tokens of random K/V (the median of 15)."""
    source = Checkpoint.open(str(model))
    device = torch.device("cpu")
    decoder = Decoder(
        source,
        Precision(pick_dtype("auto", source.stored_dtype, device), FORMS[form].get("quantization"), kv),
        device,
        CONTEXT + 1,
    )
    pool, slots, spec = decoder.pool(CONTEXT + 16), torch.arange(CONTEXT), source.spec
    for layer in range(spec.layers):
        for part in (0, 1):
            pool.write(layer, part, slots, torch.randn(CONTEXT, spec.kv_heads, spec.head_dim))
    step_input, times = StepInput.of_chain(array("i", range(CONTEXT + 16)), CONTEXT, [100]), []
    for _ in range(18):
        began = time.perf_counter()
        decoder.logits(decoder.forward(step_input, pool), [0])
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]) * 1e3


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--q8", type=Path)
    parser.add_argument("--q4", type=Path)
    given = parser.parse_args()
    model = checkpoint(given.folder / "llama100m")
    ggufs = {"bfloat16": None, "int8": given.q8, "int4": given.q4}
    found: dict[str, Any] = {"conditions": conditions()}
    found |= {form: figures(model, form, gguf) for form, gguf in ggufs.items()}
    found[f"step ms behind {CONTEXT} tokens"] = {
        f"{form} weights": {kv: long_step_ms(model, form, kv) for kv in ("auto", "int8")}
        for form in ("bfloat16", "int4")
    }
    Console().print_json(json.dumps(found))
    write(given.json, found)
