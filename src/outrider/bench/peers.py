"""Other installed engines on the same prompts, one request at a time, for comparison."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import torch

from outrider.bench.measure import Measured, Prompts, Run
from outrider.checkpoints.hub import Checkpoint, locate
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.errors import ConfigError, unknown
from outrider.llm import LLM
from outrider.models.export import write
from outrider.outputs import CompletionOutput

Answer = Callable[[list[int]], CompletionOutput]


class _Clock:
    """A transformers streamer that records the arrival of tokens; its first call carries the prompt."""

    def __init__(self) -> None:
        self.began, self.times, self.prompt = time.perf_counter(), [0.0] * 0, True

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt:
            self.times += [time.perf_counter() - self.began] * value.numel()
        self.prompt = False

    def end(self) -> None: ...


@contextmanager
def readable(name: str) -> Iterator[Path]:
    """Folder of a checkpoint.  A compressed-tensors one is copied unquantised, as any engine can read it."""
    scheme = Checkpoint.open(name).scheme
    if scheme is None or scheme.method != "compressed-tensors":
        yield locate(name)
        return
    with TemporaryDirectory() as folder:
        write(name, Path(folder), 32)
        yield Path(folder)


def _transformers(
    llm: LLM, params: SamplingParams, draft: str | None, draft_tree: int
) -> Iterator[tuple[str, Answer]]:
    """Modes of transformers in our dtype: plain, prompt look-up, and assisted by the draft model, if any."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def loaded(name: str) -> Any:
        with readable(name) as folder:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=llm.engine.decoder.dtype)
            return model.to(llm.engine.device).eval()

    model = loaded(llm.engine.options.model)
    modes: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers lookup": {"prompt_lookup_num_tokens": draft_tree},
    }
    if draft is not None:
        assistant = loaded(draft)
        assistant.generation_config.num_assistant_tokens = draft_tree
        modes["transformers assisted"] = {"assistant_model": assistant}
    sampling: dict[str, Any] = {"do_sample": params.temperature > 0, "max_new_tokens": params.max_tokens}
    if params.temperature > 0:
        sampling |= {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    model.generation_config.eos_token_id = None if params.ignore_eos else sorted(llm.engine.ending) or None
    model.generation_config.pad_token_id = 0

    def answer(ids: list[int], mode: dict[str, Any]) -> CompletionOutput:
        torch.manual_seed(params.seed or 0)
        given, clock = torch.tensor([ids], device=llm.engine.device), _Clock()
        with torch.inference_mode():
            said = model.generate(
                given, attention_mask=torch.ones_like(given), streamer=clock, **sampling, **mode
            )
        return CompletionOutput(0, "", said[0, len(ids) :].tolist(), token_times=clock.times)

    for name, mode in modes.items():
        yield name, lambda ids, mode=mode: answer(ids, mode)  # type: ignore[misc]


def _llama_cpp(
    llm: LLM, params: SamplingParams, draft: str | None, draft_tree: int
) -> Iterator[tuple[str, Answer]]:
    """Modes of llama.cpp: plain, n-gram look-up, and with the draft model, if any."""
    import xllamacpp

    kinds, model = xllamacpp.common_speculative_type, llm.engine.options.model
    modes = {"llama.cpp": None, "llama.cpp lookup": kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE}
    if draft is not None:
        modes["llama.cpp draft"] = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
    asked: dict[str, Any] = {
        "n_predict": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": max(0, params.top_k), "min_p": params.min_p, "seed": params.seed or 0, "cache_prompt": False,
        "samplers": ["top_k", "top_p", "min_p", "temperature"], "ignore_eos": params.ignore_eos,
        "return_tokens": True,
    }  # fmt: skip
    for name, kind in modes.items():
        given = xllamacpp.CommonParams()
        given.model.path, given.n_parallel, given.n_ctx = str(locate(model)), 1, llm.engine.max_len
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = torch.get_num_threads()
        speculative = given.speculative
        if kind is not None:
            speculative.types, speculative.draft.n_max = [kind], draft_tree
            speculative.ngram_simple.size_m = draft_tree
        if name.endswith("draft"):
            speculative.draft.mparams.path = str(locate(str(draft)))
        server = xllamacpp.Server(given)

        def answer(ids: list[int], url: str = f"{server.listening_address}/completion") -> CompletionOutput:
            body = json.dumps({**asked, "prompt": ids}).encode()
            with urlopen(Request(url, body, {"Content-Type": "application/json"})) as reply:
                told = json.load(reply)
            first, rest = (told["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
            times = [first, *[first + rest] * (len(told["tokens"]) - 1)]  # steps are not told
            return CompletionOutput(0, told["content"], told["tokens"], token_times=times)

        yield name, answer
        del server


PEERS = {"transformers": ("transformers", _transformers), "llama.cpp": ("xllamacpp", _llama_cpp)}


def peer(
    name: str, *models: str | None
) -> Callable[[LLM, SamplingParams, str | None, int], Iterator[tuple[str, Answer]]]:
    """The modes of an engine.  Raises ConfigError for one that is unknown, missing, or cannot read these."""
    if name not in PEERS:
        raise ConfigError(unknown("peer", name, PEERS))
    package, modes = PEERS[name]
    if find_spec(package) is None:
        raise ConfigError(f"{name} is not installed here: pip install {package}.")
    for model in models if modes is _llama_cpp else ():
        if model is not None and not model.endswith(".gguf"):
            raise ConfigError(f"{name} reads GGUF files, and {model!r} is none: leave out --peer {name}.")
    return modes


def measure_peer(
    name: str,
    llm: LLM,
    prompts: Prompts,
    params: SamplingParams,
    draft: str | None = None,
    draft_tree: int = 5,
    repeats: int = 1,
    tick: Callable[[str], None] = lambda label: None,
) -> list[Measured]:
    """Run every mode of an engine over the prompts (token ids); the best of 2 × `repeats`, as for ours."""
    results = []
    for label, answer in peer(name)(llm, params, draft, draft_tree):
        result = Measured(label, promise="")
        for kind, prompt in prompts:
            ids = prompt["prompt_token_ids"]
            result.runs.append(
                min((_run(kind, ids, answer) for _ in range(2 * repeats)), key=lambda run: run.seconds)
            )
            tick(label)
        results.append(result)
    return results


def _run(kind: str, ids: list[int], answer: Answer) -> Run:
    began = time.perf_counter()
    said = answer(ids)
    return Run(kind, time.perf_counter() - began, Times(), [said])
