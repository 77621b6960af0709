"""Plain greedy decode speed of other inference engines on one checkpoint, for side-by-side figures.

Each peer runs in a subprocess of its own, with its own interpreter or binary:

* transformers: OUTRIDER_TRANSFORMERS_PYTHON (default: the running interpreter), bf16 and fp32;
* OpenVINO GenAI: OUTRIDER_OPENVINO_PYTHON, on a folder exported by optimum-intel;
* llama.cpp: OUTRIDER_LLAMA_CPP, the folder of its binaries (default: the search path), on a GGUF file.

A missing peer is reported as "not installed", one that breaks as "failed"; neither stops the others. All
rates are decode tokens per second, prefill excluded. llama-bench decodes from an empty context, the other two
after the prompt; OpenVINO keeps its key-value cache in 16 bits here, which was faster than its default of 8.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import parser_of, write

Result = dict[str, Any]
MISSING: Result = {"status": "not installed"}


@dataclass
class Tools:
    """Where each peer is found (None: nowhere), and how it is run."""

    transformers: str | None = os.environ.get("OUTRIDER_TRANSFORMERS_PYTHON", sys.executable)
    openvino: str | None = os.environ.get("OUTRIDER_OPENVINO_PYTHON")
    llama_cpp: str | None = os.environ.get("OUTRIDER_LLAMA_CPP")
    threads: int = 2
    repeats: int = 5


DEFAULT = Tools()


def _run(command: list[str], threads: int) -> tuple[str, Result | None]:
    """Return a command's standard output, and the result to report instead where there is none."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env, check=False)
    except OSError:
        return "", MISSING
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return "", MISSING if "No module named" in error else {"status": "failed", "error": error}
    return done.stdout, None


def _worker(python: str | None, name: str, tools: Tools, **arguments: Any) -> Result:
    """Run a measuring function of this file under another interpreter; its last output line is the result."""
    if python is None:
        return MISSING
    arguments |= {"threads": tools.threads, "repeats": tools.repeats}
    command = [python, str(Path(__file__).resolve()), "--worker", name, json.dumps(arguments)]
    output, problem = _run(command, tools.threads)
    return problem or json.loads(output.strip().splitlines()[-1])


def _prompt(model_dir: str, length: int) -> list[int]:
    config = json.loads((Path(model_dir) / "config.json").read_text())
    return random.Random(0).choices(range(config["vocab_size"]), k=length)


def _transformers(
    model_dir: str, dtype: str, prompt_tokens: int, new_tokens: int, threads: int, repeats: int
) -> Result:
    """Time generate() for one token and for new_tokens more; the difference is the decode time."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    ids = torch.tensor([_prompt(model_dir, prompt_tokens)])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def seconds(count: int) -> float:
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=count, **options)
        assert out.shape[1] == prompt_tokens + count, "stopped early"
        return time.perf_counter() - start

    seconds(8)  # warms up
    rates = [new_tokens / (seconds(new_tokens + 1) - seconds(1)) for _ in range(repeats)]
    version = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"status": "ok", "tokens_per_s": statistics.median(rates), "runs": rates, "version": version}


def _openvino(model_dir: str, prompt_tokens: int, new_tokens: int, threads: int, repeats: int) -> Result:
    """Read the engine's own time per output token, which leaves out the first one."""
    import numpy as np
    import openvino
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(
        model_dir, "CPU", INFERENCE_NUM_THREADS=threads, KV_CACHE_PRECISION="f16"
    )
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, new_tokens + 1
    ids = openvino.Tensor(np.array([_prompt(model_dir, prompt_tokens)], dtype=np.int64))
    rates = []
    for _ in range(repeats + 1):  # the first run warms up
        metrics = pipe.generate(ids, config).perf_metrics
        assert metrics.get_num_generated_tokens() == new_tokens + 1, "stopped early"
        rates.append(1000 / metrics.get_tpot().mean)
    core = openvino.Core()  # gives the defaults of the device, which the pipeline keeps
    version = {"openvino": openvino.__version__, "genai": openvino_genai.__version__}
    version |= {key: str(core.get_property("CPU", key)) for key in ("INFERENCE_PRECISION_HINT",)}
    return {
        "status": "ok",
        "tokens_per_s": statistics.median(rates[1:]),
        "runs": rates[1:],
        "version": version,
    }


def _llama(tool: str, options: dict[str, object], tools: Tools) -> tuple[str, Result | None]:
    binary = shutil.which(tool, path=tools.llama_cpp)
    command = [str(word) for option in options.items() for word in option]
    return _run([binary, *command, "-t", str(tools.threads)], tools.threads) if binary else ("", MISSING)


def llama_cpp(gguf: str, prompt_tokens: int, new_tokens: int, tools: Tools) -> Result:
    """Return llama-bench's text generation figure."""
    options = {"-m": gguf, "-p": prompt_tokens, "-n": new_tokens, "-r": tools.repeats, "-o": "json"}
    output, problem = _llama("llama-bench", options, tools)
    if problem:
        return problem
    test = next(entry for entry in json.loads(output) if entry["n_gen"])
    runs, version = test["samples_ts"], {"llama.cpp": test["build_commit"]}
    return {"status": "ok", "tokens_per_s": statistics.median(runs), "runs": runs, "version": version}


def prefill(gguf: str, tokens: int, tools: Tools) -> Result:
    """Return llama-bench's prompt processing figure."""
    options = {"-m": gguf, "-p": tokens, "-n": 0, "-r": tools.repeats, "-o": "json"}
    output, problem = _llama("llama-bench", options, tools)
    if problem:
        return problem
    [test] = json.loads(output)
    return {"status": "ok", "tokens_per_s": statistics.median(test["samples_ts"])}


def plain(
    model_dir: str,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    gguf: str | None = None,
    openvino: str | None = None,
    tools: Tools = DEFAULT,
) -> dict[str, Result]:
    """Return every peer's greedy decode rate for one sequence; gguf and openvino are the converted model."""
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    results: dict[str, Result] = {
        key: {"status": "no model given"} for key in ("openvino-genai", "llama.cpp")
    }
    for kind in ("bfloat16", "float32"):
        run = _worker(tools.transformers, "transformers", tools, model_dir=model_dir, dtype=kind, **sizes)
        results[f"transformers {kind}"] = run
    if openvino:
        results["openvino-genai"] = _worker(tools.openvino, "openvino", tools, model_dir=openvino, **sizes)
    if gguf:
        results["llama.cpp"] = llama_cpp(gguf, prompt_tokens, new_tokens, tools)
    return results


def batched(gguf: str, rows: tuple[int, ...] = (1, 2, 4, 8, 16), tools: Tools = DEFAULT) -> Result:
    """Return llama.cpp's milliseconds for one decode step with that many rows, 64 tokens into the context."""
    sizes = {"-npp": 64, "-ntg": 128, "-npl": ",".join(map(str, rows)), "-c": max(rows) * 192}
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(tools.repeats):
        output, problem = _llama(
            "llama-batched-bench", {"-m": gguf, **sizes, "--output-format": "jsonl"}, tools
        )
        if problem:
            return problem
        for entry in [json.loads(line) for line in output.splitlines() if line.startswith("{")]:
            times[entry["pl"]].append(1000 * entry["t_tg"] / entry["tg"])
    step_ms = {str(count): statistics.median(steps) for count, steps in times.items() if steps}
    return {"status": "ok", "step_ms": step_ms, "runs": {str(count): steps for count, steps in times.items()}}


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder, for transformers")
    for name, peer in (("--gguf", "llama.cpp"), ("--openvino", "OpenVINO GenAI")):
        parser.add_argument(name, help=f"the same model for {peer}")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tools = Tools(threads=args.threads)
    results: Result = {"plain": plain(args.model, gguf=args.gguf, openvino=args.openvino, tools=tools)}
    for name, run in results["plain"].items():
        figure = f"{run['tokens_per_s']:8.1f} tokens/s" if run["status"] == "ok" else run["status"]
        print(f"{name:24} {figure} {run.get('error', '')}".rstrip())
    results["batched"] = batched(args.gguf, tools=tools) if args.gguf else {}
    for count, step in results["batched"].get("step_ms", {}).items():
        print(f"{'llama.cpp step, rows ' + count:24} {step:8.2f} ms")
    write(args.json, {"threads": args.threads, **results})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        measure: Any = _transformers if sys.argv[2] == "transformers" else _openvino
        print(json.dumps(measure(**json.loads(sys.argv[3]))))
    else:
        main()
