"""Other engines answer given requests, with plain decoding and their own speculation, one request at a time.

Each runs from its own environment, found as peers.py describes; vLLM by OUTRIDER_VLLM_PYTHON.  All get the
same token ids and stop at the same end token.  A *mode* is one way to run an engine: a process that is loaded
once, answers a first request to warm up, and then each request of each setting.  The fastest of `repeats`
answers counts.  seconds: wall clock around one answer, the prompt included.  times: arrival of its tokens,
from its beginning.

llama.cpp and OpenVINO give the times of the first token and of the last; the other two show every step.
Weights are bfloat16 (OpenVINO: float16).  Prefix caches are off, so that a prompt is computed each time.
vLLM keeps one core for its scheduler unless VLLM_CPU_OMP_THREADS_BIND is set.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers

LIMIT = 900  # seconds that one mode may take
NGRAM = 3  # tokens that have to agree before a rival copies what followed


@dataclass
class Job:
    """settings: title -> temperature and top_p.  Folders and files: the same pair, as the engine wants it."""

    requests: list[list[int]]
    settings: dict[str, dict[str, float]]
    tokens: int
    model: str
    draft: str | None = None
    mode: str = "plain"
    draft_tree: int = 4
    end: int = 1
    threads: int = 2
    repeats: int = 1
    context: int = 1024


@dataclass
class Answer:
    """times: when each token was there, in seconds; several of one step share theirs."""

    tokens: list[int]
    seconds: float
    times: list[float]
    steps: int = 0  # 0: unknown
    drafted: int = 0
    accepted: int = 0


Ask = Callable[[list[int], dict[str, float]], Answer]


@dataclass
class Outcome:
    """answers: setting -> one a request."""

    status: str = "ok"
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    version: dict[str, str] = field(default_factory=dict)


def spread(first: float, last: float, count: int) -> list[float]:
    """Times of which only the first and the last are known."""
    return [first] + [last] * (count - 1)


# ---- inside the engine's own process


def _transformers(job: Job) -> tuple[Ask, dict[str, str]]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job.threads)

    def loaded(folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    class Clock:
        """A streamer; the first call brings the prompt."""

        def __init__(self) -> None:
            self.began, self.calls = time.perf_counter(), []

        def put(self, value: Any) -> None:
            self.calls.append((time.perf_counter() - self.began, value.numel()))

        def end(self) -> None: ...

    model, options = loaded(job.model), {}
    if job.mode == "lookup":
        options = {"prompt_lookup_num_tokens": job.draft_tree, "max_matching_ngram_size": NGRAM}
    elif job.mode == "draft":
        assistant = loaded(str(job.draft))
        assistant.generation_config.num_assistant_tokens = job.draft_tree
        options = {"assistant_model": assistant}

    def ask(ids: list[int], setting: dict[str, float]) -> Answer:
        given = torch.tensor([ids])
        sampling = (
            {"do_sample": True, "top_k": 0, **setting} if setting["temperature"] else {"do_sample": False}
        )
        torch.manual_seed(1)
        clock = Clock()
        with torch.inference_mode():
            said = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=job.tokens, eos_token_id=job.end,
                pad_token_id=0,
                streamer=clock, **sampling, **options,
            )  # fmt: skip
        seconds = time.perf_counter() - clock.began
        tokens = said[0, len(ids) :].tolist()
        times = [when for when, count in clock.calls[1:] for _ in range(count)][: len(tokens)]
        return Answer(tokens, seconds, times, len(clock.calls) - 1)

    return ask, {"transformers": transformers.__version__, "torch": torch.__version__}


def _openvino(job: Job) -> tuple[Ask, dict[str, str]]:
    import numpy as np
    import openvino
    import openvino_genai

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "KV_CACHE_PRECISION": "f16"}
    if job.mode == "lookup":
        options |= {"prompt_lookup": True}
    elif job.mode == "draft":
        options |= {"draft_model": openvino_genai.draft_model(job.draft, "CPU", **options)}
    if job.mode != "plain":
        scheduler = options["scheduler_config"] = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    pipe = openvino_genai.LLMPipeline(job.model, "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.eos_token_id, config.stop_token_ids = job.tokens, job.end, {job.end}
    if job.mode != "plain":
        config.num_assistant_tokens = job.draft_tree
    if job.mode == "lookup":
        config.max_ngram_size = NGRAM

    def ask(ids: list[int], setting: dict[str, float]) -> Answer:
        config.do_sample = setting["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p, config.rng_seed = setting["temperature"], setting["top_p"], 1
        given = openvino.Tensor(np.array([ids], dtype=np.int64))
        began = time.perf_counter()
        result = pipe.generate(given, config)
        seconds, metrics = time.perf_counter() - began, result.perf_metrics
        tokens, more = list(result.tokens[0]), result.extended_perf_metrics
        counts = (
            (more.get_num_draft_tokens(), more.get_num_accepted_tokens()) if job.mode == "draft" else (0, 0)
        )
        times = spread(metrics.get_ttft().mean / 1e3, seconds, len(tokens))
        return Answer(tokens, seconds, times, len(metrics.raw_metrics.m_batch_sizes), *counts)

    return ask, {"openvino": openvino.__version__, "genai": openvino_genai.__version__}


def _vllm(job: Job) -> tuple[Ask, dict[str, str]]:
    import vllm

    speculation: dict[str, Any] = {"num_speculative_tokens": job.draft_tree}
    if job.mode == "lookup":
        speculation |= {"method": "ngram", "prompt_lookup_max": NGRAM, "prompt_lookup_min": NGRAM}
    elif job.mode == "draft":
        speculation |= {"method": "draft_model", "model": job.draft}
    llm = vllm.LLM(
        model=job.model, dtype="bfloat16", max_model_len=job.context, max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=None if job.mode == "plain" else speculation,
    )  # fmt: skip
    count = iter(range(1 << 30))

    def ask(ids: list[int], setting: dict[str, float]) -> Answer:
        params = vllm.SamplingParams(
            max_tokens=job.tokens, seed=1, detokenize=False, stop_token_ids=[job.end], **setting
        )
        times: list[float] = []
        tokens: list[int] = []
        began, steps = time.perf_counter(), 0
        llm.llm_engine.add_request(str(next(count)), {"prompt_token_ids": ids}, params)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens, steps = list(output.outputs[0].token_ids), steps + 1
                times += [time.perf_counter() - began] * (len(tokens) - len(times))
        return Answer(tokens, time.perf_counter() - began, times, steps)

    return ask, {"vllm": vllm.__version__}


# ---- in ours


def _llama_words(job: Job, port: int) -> list[str]:
    """Arguments of llama-server."""
    words = f"-t {job.threads} -c {job.context} -np 1 --port {port} --no-webui".split()
    if job.mode == "lookup":
        words += f"--spec-type ngram-simple --spec-ngram-simple-size-n {NGRAM}".split()
        words += ["--spec-ngram-simple-size-m", str(job.draft_tree)]
    elif job.mode == "draft":
        words += f"--spec-type draft-simple --spec-draft-n-max {job.draft_tree}".split()
        words += ["-md", str(job.draft)]
    return ["-m", job.model, *words]


@contextlib.contextmanager
def _llama_cpp(job: Job, binaries: str | None) -> Iterator[tuple[Ask, dict[str, str]]]:
    """llama-server with one slot."""
    binary = shutil.which("llama-server", path=binaries)
    if binary is None:
        raise FileNotFoundError("llama-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, headers = f"http://127.0.0.1:{port}", {"Content-Type": "application/json"}

    def ask(ids: list[int], setting: dict[str, float]) -> Answer:
        asked = {
            "prompt": ids, "n_predict": job.tokens, "cache_prompt": False, "return_tokens": True, "seed": 1,
            "top_k": 0, "min_p": 0,
            "samplers": ["top_p", "temperature"], **setting,
        }  # fmt: skip
        sent = urllib.request.Request(f"{url}/completion", json.dumps(asked).encode(), headers)
        began = time.perf_counter()
        with urllib.request.urlopen(sent, timeout=LIMIT) as reply:
            told = json.load(reply)
        seconds, spent = time.perf_counter() - began, told["timings"]
        first, last = spent["prompt_ms"] / 1e3, (spent["prompt_ms"] + spent["predicted_ms"]) / 1e3
        drafted, accepted = spent.get("draft_n", 0), spent.get("draft_n_accepted", 0)
        return Answer(told["tokens"], seconds, spread(first, last, len(told["tokens"])), 0, drafted, accepted)

    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([binary, *_llama_words(job, port)], stdout=log, stderr=log) as server,
    ):
        try:
            _wait(f"{url}/health", server)
            with urllib.request.urlopen(f"{url}/props") as reply:
                yield ask, {"llama.cpp": json.load(reply).get("build_info", "")}
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server is ready.  Raises OSError where it ends before."""
    for _ in range(600):
        if server.poll() is not None:
            raise OSError(f"llama-server ended with {server.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as reply:
            if reply.status == 200:
                return
        time.sleep(0.1)
    raise OSError("llama-server is not ready after a minute")


def _answered(job: Job, ask: Ask) -> dict[str, list[Answer]]:
    """Every request of every setting, after a first one that warms up."""
    found: dict[str, list[Answer]] = {}
    for title, setting in job.settings.items():
        ask(job.requests[0], setting)
        found[title] = [
            min((ask(ids, setting) for _ in range(job.repeats)), key=lambda a: a.seconds)
            for ids in job.requests
        ]
    return found


WORKERS = {"transformers": _transformers, "OpenVINO GenAI": _openvino, "vLLM": _vllm}
MODULES = {"transformers": "transformers", "OpenVINO GenAI": "openvino", "vLLM": "vllm"}
ENGINES = (*WORKERS, "llama.cpp")
LEFT_OUT = {("vLLM", "draft")}  # minutes to load and compile
MISSING = "not installed"
MODES = {"plain": "", "draft": ", draft model", "lookup": ", n-gram"}


def run(engine: str, job: Job, tools: peers.Tools) -> Outcome:
    """One mode of an engine.  status: "ok", or why there are no answers."""
    if engine == "llama.cpp":
        try:
            with _llama_cpp(job, tools.llama_cpp) as (ask, version):
                return Outcome("ok", _answered(job, ask), version)
        except FileNotFoundError:
            return Outcome(MISSING)
        except (
            OSError,
            ValueError,
            KeyError,
            http.client.HTTPException,
        ) as error:  # another build may answer in another form
            return Outcome(f"failed: {type(error).__name__}: {error}")
    python = {"transformers": tools.transformers, "OpenVINO GenAI": tools.openvino, "vLLM": tools.vllm}[
        engine
    ]
    if python is None:
        return Outcome(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "job.json"), Path(folder, "answers.json")
        given.write_text(json.dumps(asdict(job)))
        command = [python, str(Path(__file__).resolve()), "--worker", engine, str(given), str(made)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {
            "OMP_NUM_THREADS": str(job.threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        try:
            error = _ended(command, environment)
        except OSError:  # there is no such interpreter
            return Outcome(MISSING)
        if error is not None:
            return Outcome(MISSING if f"No module named '{MODULES[engine]}" in error else f"failed: {error}")
        told = json.loads(made.read_text())
    return Outcome(
        "ok",
        {title: [Answer(**a) for a in answers] for title, answers in told["answers"].items()},
        told["version"],
    )


def _ended(command: list[str], environment: dict[str, str]) -> str | None:
    """Run a process and end its children with it.  Returns the last line of its errors if it failed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return (log.read().strip().splitlines() or [f"exit status {code}"])[-1] if code else None


def _work(engine: str, given: Path, made: Path) -> None:
    job = Job(**json.loads(given.read_text()))
    ask, version = WORKERS[engine](job)
    answers = {title: [asdict(answer) for answer in group] for title, group in _answered(job, ask).items()}
    made.write_text(json.dumps({"version": version, "answers": answers}))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--worker"]:
        raise SystemExit("spec_bench.py runs this.")
    _work(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
