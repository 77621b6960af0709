"""Other engines on the same requests, for comparison.

Each runs in a process of its own.  OUTRIDER_LLAMA_CPP_PYTHON, OUTRIDER_OPENVINO_PYTHON,
OUTRIDER_TRANSFORMERS_PYTHON and OUTRIDER_VLLM_PYTHON name the interpreter of an environment of its own, which
needs the engine and not Outrider.  OUTRIDER_LLAMA_CPP names a folder with llama.cpp's own server instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

import torch

from outrider.bench.measure import Attempt, Run, Stopped
from outrider.bench.peers import worker
from outrider.bench.peers.worker import Job
from outrider.checkpoints.hub import Checkpoint, locate
from outrider.core.clock import Times
from outrider.core.params import SamplingParams
from outrider.errors import ConfigError, unknown
from outrider.llm import LLM
from outrider.models.export import write
from outrider.outputs import CompletionOutput

LIMIT = 600.0  # seconds for a peer to load, and for each of its answers


class Peer(NamedTuple):
    """package: for pip.  module: to import.  check: refuses a checkpoint."""

    package: str
    module: str
    check: Callable[[str], None] = lambda model: None


class Rival(NamedTuple):
    """An engine, and the checkpoints that it reads in place of ours.  draft: None for no draft model."""

    name: str
    model: str
    draft: str | None

    @classmethod
    def parse(cls, text: str, model: str, draft: str | None) -> Rival:
        """NAME, NAME=TARGET or NAME=TARGET,DRAFT; ours by default.  Raises ConfigError."""
        name, equals, given = text.partition("=")
        if name not in PEERS:
            raise ConfigError(unknown("peer", name, PEERS))
        if equals:
            model, _, own = given.partition(",")
            draft = own or None
        peer = PEERS[name]
        binaries = os.environ.get("OUTRIDER_LLAMA_CPP") if name == "llama.cpp" else None
        if binaries and not (Path(binaries) / "llama-server").is_file():
            raise ConfigError(f"OUTRIDER_LLAMA_CPP: the folder {binaries} has no llama-server.")
        if not binaries and not _installed(name, peer.module):
            raise ConfigError(
                f"{name} is not installed for {_python(name)}: {_python(name)} -m pip install {peer.package}"
            )
        for checkpoint in (model, draft):
            if checkpoint is not None:
                peer.check(checkpoint)
        return cls(name, model, draft)


def _needs_gguf(model: str) -> None:
    if not model.endswith(".gguf"):
        raise ConfigError(f"llama.cpp reads GGUF files, and {model!r} is none: --peer llama.cpp=FILE,DRAFT.")


def _needs_converted(model: str) -> None:
    """Raise ConfigError for a folder without an OpenVINO model."""
    folder = locate(model)
    if not (folder / "openvino_model.xml").is_file():
        raise ConfigError(
            f"openvino reads converted models, and {model!r} has no openvino_model.xml: optimum-cli export "
            f"openvino --task text-generation-with-past -m {folder} {folder}"
        )


PEERS: Mapping[str, Peer] = {
    "transformers": Peer("transformers", "transformers"),
    "llama.cpp": Peer("xllamacpp", "xllamacpp", _needs_gguf),
    "openvino": Peer("openvino-genai", "openvino_genai", _needs_converted),
    "vllm": Peer("vllm", "vllm"),
}


def _file(name: str) -> str:
    return name.replace(".", "_")


def _python(name: str) -> str:
    return os.environ.get(f"OUTRIDER_{_file(name).upper()}_PYTHON", sys.executable)


def _environment(name: str) -> dict[str, str]:
    """Variables of the engine's interpreter.  Another one than ours does not find our libraries."""
    own = _python(name) == sys.executable
    return {key: value for key, value in os.environ.items() if own or key != "PYTHONPATH"}


def _installed(name: str, module: str) -> bool:
    """Whether the engine's interpreter finds a module, without importing it."""
    asks = f"import sys, importlib.util as util; sys.exit(util.find_spec({module!r}) is None)"
    line, environment = [_python(name), "-c", asks], _environment(name)
    try:
        return not subprocess.run(line, capture_output=True, check=False, env=environment).returncode
    except OSError:
        return False


def job_of(llm: LLM, params: SamplingParams, depth: int) -> Job:
    """The job of an engine, without its checkpoints."""
    return Job(
        model="",
        draft=None,
        depth=depth,
        ending=[] if params.ignore_eos else sorted(llm.engine.ending),
        sampling={name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        tokens=params.max_tokens or llm.engine.max_len,
        seed=params.seed or 0,
        context=llm.engine.max_len,
        threads=torch.get_num_threads(),
        dtype=str(llm.engine.decoder.dtype).removeprefix("torch."),
        device=str(llm.engine.device),
    )


@contextmanager
def running(
    rivals: Sequence[Rival], llm: LLM, params: SamplingParams, depth: int, seconds: float = LIMIT
) -> Iterator[dict[str, Attempt]]:
    """Label -> what answers a group of prompts, for every mode of these engines.

    This and its calls raise ConfigError with the engine's message if it cannot run the models.
    seconds: for each loading and each answer.  The calls raise Stopped once a mode has taken longer.
    """
    found: dict[str, Attempt] = {}
    with ExitStack() as stack:
        for name, model, draft in rivals:
            files = [
                None if one is None else str(stack.enter_context(_readable(name, one)))
                for one in (model, draft)
            ]
            job = {**asdict(job_of(llm, params, depth)), "model": files[0], "draft": files[1]}
            process = stack.enter_context(Worker(name, model, seconds))
            try:
                modes = process.ask(job)["modes"]
            except Stopped:
                found[name] = process.attempt  # it raises Stopped, too
                continue
            for i, mode in enumerate(modes):
                if i:  # modes in one process slow each other down: the threads of each wait for work
                    process = stack.enter_context(Worker(name, model, seconds))
                found[mode] = process.attempt
                with suppress(Stopped):
                    if i:
                        process.ask(job)
                    process.ask({"load": mode})
        yield found


@contextmanager
def _readable(name: str, model: str) -> Iterator[Path]:
    """A checkpoint as the engine reads it: a compressed-tensors one unquantized, but for vLLM."""
    scheme = None if name in ("openvino", "vllm") else Checkpoint.open(model).scheme
    if scheme is None or scheme.method != "compressed-tensors":
        yield locate(model)
        return
    with TemporaryDirectory() as folder:
        write(model, Path(folder), 32)
        yield Path(folder)


class Worker:
    """The process of a mode of an engine, with those that it starts.

    seconds: for each of its answers.  It is killed after these, and raises Stopped from then on.
    """

    def __init__(self, name: str, model: str, seconds: float) -> None:
        self.name, self.model, self.seconds, self.late = name, model, seconds, False
        self.errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [_python(name), str(Path(worker.__file__)), _file(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**_environment(name), "OMP_NUM_THREADS": str(torch.get_num_threads())},
            start_new_session=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self.process.communicate()
        self.errors.close()

    def _kill(self) -> None:
        """End the engine's processes.  One that is left would hold its memory, and our pipe open."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _stop(self) -> None:
        self.late = True
        self._kill()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and return the one that comes back.  Raises Stopped and ConfigError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(self.seconds, self._stop)
        timer.start()
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            if self.late:
                raise Stopped(f"stopped after {self.seconds:g} s") from None
            self._kill()  # a line that is no answer does not come from a process that ends
            self.process.wait()
            self.errors.seek(0)
            last = (self.errors.read().strip().splitlines() or ["it ended without a word"])[-1]
            reply = {"error": last}
        finally:
            timer.cancel()
        if "error" in reply:
            raise ConfigError(f"{self.name} cannot run {self.model!r}: {reply['error']}")
        return reply

    def attempt(self, kind: str, group: list[Any]) -> Run:
        replies = [self.ask({"ids": prompt["prompt_token_ids"]}) for prompt in group]
        answers = [CompletionOutput(0, "", each["tokens"], token_times=each["times"]) for each in replies]
        return Run(kind, sum(each["seconds"] for each in replies), Times(), answers)
