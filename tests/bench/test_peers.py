"""Other engines are refused in one sentence, take turns with our methods, and have their tokens compared."""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rival_engine import install

from outrider import LLM, ConfigError, SamplingParams
from outrider.bench import peers
from outrider.bench.measure import PLAIN
from outrider.bench.measure import Run as Group
from outrider.bench.peers import Rival, vllm
from outrider.bench.report import figures, matrix, table
from outrider.bench.rounds import Rounds, measure
from outrider.core.clock import Times
from outrider.outputs import CompletionOutput

RIVAL = """
import sys
from outrider.bench.peers.worker import Job

def modes(job):
    assert isinstance(job, Job) and "outrider" not in sys.modules
    print("loading")  # what an engine prints is no answer
    if job.depth == 9:
        raise RuntimeError("Exception from building_blocks.cpp:716:\\nUnsupported quantization type\\n\\n")
    ends = lambda ids: sys.exit("out of memory")
    loaded = []

    def load(mode):
        loaded.append(mode)
        assert len(loaded) == 1, "the modes share a process"
        return mode

    rival = lambda ids: ([*ids, job.tokens], [0.5])
    return {"rival": lambda: load(rival), "rival ends": lambda: load(ends)}
"""


@pytest.fixture
def rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers with the prompt and the number of tokens that it may emit."""
    install(RIVAL, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_an_engine_that_is_not_installed_is_refused_with_the_cure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"OUTRIDER_{name.upper().replace('.', '_')}_PYTHON"
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    with pytest.raises(
        ConfigError, match=f"{name} is not installed for .*gone: .*pip install {peers.PEERS[name].package}"
    ):
        Rival.parse(name, "target.gguf", None)
    with pytest.raises(ConfigError, match="transfomers"):
        Rival.parse("transfomers", "target.gguf", None)


def test_files_that_an_engine_cannot_read_are_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_installed", lambda name, module: True)
    with pytest.raises(ConfigError, match="'draft' is none"):
        Rival.parse("llama.cpp", "target.gguf", "draft")
    assert Rival.parse("llama.cpp=a.gguf,b.gguf", "target", "draft") == Rival("llama.cpp", "a.gguf", "b.gguf")
    assert Rival.parse("llama.cpp=a.gguf", "target", "draft").draft is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no openvino_model.xml: optimum-cli export openvino"):
        Rival.parse("openvino", str(tmp_path), None)
    (tmp_path / "openvino_model.xml").touch()
    assert Rival.parse("openvino", str(tmp_path), None) == Rival("openvino", str(tmp_path), None)


def test_each_mode_of_an_engine_answers_from_its_own_process(tiny: Path, rival: None) -> None:
    llm, params = LLM(str(tiny)), SamplingParams(temperature=0, max_tokens=4)
    with peers.running([Rival.parse("rival", str(tiny), None)], llm, params, 2) as found:
        assert list(found) == ["rival", "rival ends"]
        began = time.perf_counter()
        run = found["rival"]("a", [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}])
        seconds = time.perf_counter() - began
        assert [answer.token_ids for answer in run.answers] == [[5, 6, 4], [7, 4]]
        assert run.kind == "a" and run.answers[0].token_times == [0.5] and 0 < run.seconds <= seconds
        with pytest.raises(ConfigError, match=r"^rival cannot run '.*': out of memory$"):
            found["rival ends"]("a", [{"prompt_token_ids": [7]}])


def test_processes_that_an_engine_leaves_behind_end_with_it(tiny: Path, rival: None, tmp_path: Path) -> None:
    """A fork may have our pipe too, whose end would not come before that of the fork."""
    forking = "import os, time\nif not (child := os.fork()):\n    time.sleep(3600)\n    os._exit(0)\n"
    modes = "{'rival': lambda: lambda ids: ([child], [0.5]), 'rival ends': lambda: lambda ids: os._exit(1)}"
    answer = f"def modes(job):\n    return {modes}\n"
    (tmp_path / "rival.py").write_text(forking + answer)
    given = [Rival.parse("rival", str(tiny), None)]
    with peers.running(given, LLM(str(tiny)), SamplingParams(max_tokens=4), 2) as found:
        run = found["rival"]("a", [{"prompt_token_ids": [5]}])
        with pytest.raises(ConfigError, match="rival cannot run"):
            found["rival ends"]("a", [{"prompt_token_ids": [5]}])
    (child,) = run.answers[0].token_ids
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):  # until init has taken its status
            os.kill(child, 0)
            time.sleep(0.01)


def test_an_interpreter_that_prints_something_else_is_refused(
    tiny: Path, rival: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho no module >&2; echo activated\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("OUTRIDER_RIVAL_PYTHON", str(python))
    given = [Rival.parse("rival", str(tiny), None)]
    with (
        pytest.raises(ConfigError, match=r"^rival cannot run '.*': no module$"),
        peers.running(given, LLM(str(tiny)), SamplingParams(max_tokens=4), 2),
    ):
        pass


def test_what_an_engine_refuses_is_one_sentence(tiny: Path, rival: None) -> None:
    given = [Rival.parse("rival", str(tiny), None)]
    with (
        pytest.raises(ConfigError, match=r"^rival cannot run '.*': Unsupported quantization type$"),
        peers.running(given, LLM(str(tiny)), SamplingParams(), 9),
    ):
        pass


def test_engines_take_turns_with_methods_and_their_answers_are_compared(tiny: Path) -> None:
    order: list[str] = []
    prompts = [("a", {"prompt_token_ids": [5, 6, 7]}), ("b", {"prompt_token_ids": [8, 9]})]
    llm, params = LLM(str(tiny)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    plain = {kind: llm.generate(prompt, params)[0].outputs[0].token_ids for kind, prompt in prompts}

    def rival(kind: str, group: list[Any]) -> Group:
        tokens = plain[kind] if kind == "a" else [1, 2, 3, 4]
        return Group(kind, 0.5, Times(), [CompletionOutput(0, "", tokens, token_times=[0.1] * 4)])

    configs = {PLAIN: None, "ngram": {"method": "ngram"}}
    results = measure(llm, configs, prompts, params, Rounds(2), order.append, others={"rival": rival})
    assert [result.method for result in results] == [PLAIN, "ngram", "rival"]
    assert order[:6] == [PLAIN, "ngram", "rival", "ngram", "rival", PLAIN]
    assert len(order) == 12 and [len(run.turns) for run in results[2].runs] == [2, 2]
    assert len(results[2].speed_ups(results[0])) == 2, "a ratio for each round"
    console = Console(width=160, file=io.StringIO())
    console.print(table("title", results), matrix(results[:2], results[2:]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1/2" in text and "÷ rival" in text
    found = figures(results)
    assert found["rival"]["all"]["answers with the same tokens"] == 1
    assert found["ngram"]["all"]["answers with the same tokens"] == 2
    assert found["rival"]["all"]["same tokens"] is None, "nothing was promised"


class FakeEngine:
    """vLLM's engine with one request, which gets two tokens a step."""

    def __init__(self) -> None:
        self.left = 0

    def add_request(self, number: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.tokens, self.left = list(prompt["prompt_token_ids"][:0]), 2

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[Any]:
        self.left -= 1
        self.tokens += [7, 8]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens)])]


def test_vllm_gets_our_settings_and_speculates_in_its_own_ways(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def engine(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(llm_engine=FakeEngine())

    fake = SimpleNamespace(LLM=engine, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    llm, params = (
        LLM(str(tiny), dtype="float32", max_model_len=64),
        SamplingParams(temperature=0, max_tokens=4),
    )
    modes = vllm.modes(replace(peers.job_of(llm, params, 3), model=str(tiny), draft=str(tiny)))
    found = {label: load() for label, load in modes.items()}
    assert list(found) == ["vllm", "vllm lookup", "vllm draft"]
    assert [options["model"] for options in made] == [str(tiny)] * 3
    assert {(options["dtype"], options["max_model_len"]) for options in made} == {("float32", 64)}
    speculation = [options["speculative_config"] for options in made]
    assert speculation[0] is None and [s["method"] for s in speculation[1:]] == ["ngram", "draft_model"]
    assert all(s["num_speculative_tokens"] == 3 for s in speculation[1:])
    tokens, (first, second, third, fourth) = found["vllm draft"]([5, 6])
    assert tokens == [7, 8, 7, 8] and first == second < third == fourth
