"""Other engines are refused in one sentence, take turns with our methods, and have their tokens compared."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from outrider import LLM, ConfigError, SamplingParams
from outrider.bench import peers
from outrider.bench.measure import PLAIN, measure
from outrider.bench.measure import Run as Group
from outrider.bench.peers.base import Job, Peer
from outrider.bench.report import figures, matrix, table
from outrider.core.clock import Times
from outrider.outputs import CompletionOutput


@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_an_engine_that_is_not_installed_is_refused_with_the_cure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"{name} is not installed.*pip install {peers.PEERS[name].package}"
    ):
        peers.check(name, "target.gguf")


def test_files_that_an_engine_cannot_read_are_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="'draft' is none"):
        peers.check("llama.cpp", "target.gguf", "draft")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no openvino_model.xml: optimum-cli export openvino"):
        peers.check("openvino", str(tmp_path))
    (tmp_path / "openvino_model.xml").touch()
    peers.check("openvino", str(tmp_path), None)  # no draft is asked for


def test_what_an_engine_refuses_is_one_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def modes(job: Job) -> Any:
        raise RuntimeError("Exception from building_blocks.cpp:716:\nUnsupported quantization type\n\n")

    monkeypatch.setattr(peers, "PEERS", {"rival": Peer("rival", "rival", modes)})
    with pytest.raises(ConfigError, match=r"^rival cannot run '.*': Unsupported quantization type$"):
        peers.attempts("rival", Job(LLM(str(tiny)), SamplingParams(), None, 4))


def test_engines_take_turns_with_methods_and_their_answers_are_compared(tiny: Path) -> None:
    order: list[str] = []
    prompts = [("a", {"prompt_token_ids": [5, 6, 7]}), ("b", {"prompt_token_ids": [8, 9]})]
    llm, params = LLM(str(tiny)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    plain = {kind: llm.generate(prompt, params)[0].outputs[0].token_ids for kind, prompt in prompts}

    def rival(kind: str, group: list[Any]) -> Group:
        tokens = plain[kind] if kind == "a" else [1, 2, 3, 4]
        return Group(kind, 0.5, Times(), [CompletionOutput(0, "", tokens, token_times=[0.1] * 4)])

    configs = {PLAIN: None, "ngram": {"method": "ngram"}}
    results = measure(llm, configs, prompts, params, 2, order.append, others={"rival": rival})
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
    found = peers.attempts("vllm", Job(llm, params, str(tiny), 3))
    assert list(found) == ["vllm", "vllm lookup", "vllm draft"]
    assert [options["model"] for options in made] == [str(tiny)] * 3
    assert {(options["dtype"], options["max_model_len"]) for options in made} == {("float32", 64)}
    speculation = [options["speculative_config"] for options in made]
    assert speculation[0] is None and [s["method"] for s in speculation[1:]] == ["ngram", "draft_model"]
    assert all(s["num_speculative_tokens"] == 3 for s in speculation[1:])
    run = found["vllm draft"]("a", [{"prompt_token_ids": [5, 6]}] * 2)
    assert [answer.token_ids for answer in run.answers] == [[7, 8, 7, 8]] * 2
    first, second, third, fourth = run.answers[0].token_times
    assert first == second < third == fourth <= run.seconds
