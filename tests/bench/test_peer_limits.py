"""An engine that takes too long is stopped and reported, and does not end the measurement of the others."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rival_engine import install

from outrider import LLM, SamplingParams
from outrider.bench import peers
from outrider.bench.measure import PLAIN, Measured, Run, Stopped
from outrider.bench.peers import Rival
from outrider.bench.report import figures, matrix, table
from outrider.bench.rounds import Rounds, measure
from outrider.cli import main
from outrider.core.clock import Times
from outrider.outputs import CompletionOutput

SLOW = """
import time
from pathlib import Path

def hang():
    Path(__file__).with_name("hangs").touch()
    time.sleep(3600)

def loads(well):
    if not well:
        hang()
    return answer

def answer(ids):
    if answer.calls == 1:
        hang()
    answer.calls += 1
    return [1], [0.1]

def modes(job):
    answer.calls = 0
    return {"rival loads": lambda: loads(False), "rival": lambda: loads(True)}
"""
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = ("a", {"prompt_token_ids": [5, 6, 7]})


@pytest.fixture
def rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine with a mode that never loads, and one that hangs at its second answer.

    A limit is over once the engine hangs, and not before: starting it may take longer on a busy machine.
    """
    install(SLOW, tmp_path, monkeypatch)
    hangs = tmp_path / "hangs"

    class Timer:
        def __init__(self, seconds: float, stop: Callable[[], None]) -> None:
            assert seconds <= 2
            self.stop, self.over = stop, threading.Event()

        def start(self) -> None:
            threading.Thread(target=self.watch, daemon=True).start()

        def watch(self) -> None:
            while not self.over.wait(0.01):
                if hangs.exists():
                    hangs.unlink()
                    self.stop()
                    break

        def cancel(self) -> None:
            self.over.set()

    monkeypatch.setattr(peers, "threading", SimpleNamespace(Timer=Timer))
    return tmp_path


def test_loading_and_answers_are_stopped_after_the_limit(tiny: Path, rival: Path) -> None:
    llm = LLM(str(tiny))
    with peers.running([Rival.parse("rival", str(tiny), None)], llm, GREEDY, 2, seconds=2) as found:
        with pytest.raises(Stopped, match=r"^stopped after 2 s$"):
            found["rival loads"](PROMPT[0], [PROMPT[1]])
        assert found["rival"](PROMPT[0], [PROMPT[1]]).answers[0].token_ids == [1]
        with pytest.raises(Stopped, match=r"^stopped after 2 s$"):
            found["rival"](PROMPT[0], [PROMPT[1]])


def test_an_engine_that_never_lists_its_modes_is_stopped(tiny: Path, rival: Path) -> None:
    (rival / "rival.py").write_text(f"{SLOW}\nhang()\n")
    with peers.running(
        [Rival.parse("rival", str(tiny), None)], LLM(str(tiny)), GREEDY, 2, seconds=1
    ) as found:
        assert list(found) == ["rival"]
        with pytest.raises(Stopped):
            found["rival"](PROMPT[0], [PROMPT[1]])


def test_a_stopped_engine_is_a_row_and_the_others_are_measured(tiny: Path) -> None:
    calls = list[str]()

    def stops(kind: str, group: list[Any]) -> Run:
        calls.append(kind)
        if len(calls) == 3:
            raise Stopped("stopped after 9 s")
        return Run(kind, 0.5, Times(), [CompletionOutput(0, "", [1] * 4, token_times=[0.1] * 4)])

    def never(kind: str, group: list[Any]) -> Run:
        raise Stopped("stopped after 8 s")

    def well(kind: str, group: list[Any]) -> Run:
        return Run(kind, 0.5, Times(), [CompletionOutput(0, "", [1] * 4, token_times=[0.1] * 4)])

    prompts = [PROMPT, ("b", {"prompt_token_ids": [8, 9]})]
    others = {"stops": stops, "never": never, "well": well}
    results = measure(LLM(str(tiny)), {PLAIN: None}, prompts, GREEDY, Rounds(2), others=others)
    assert [result.method for result in results] == [PLAIN, "well", "never", "stops"]
    assert [result.stopped for result in results] == ["", "", "stopped after 8 s", "stopped after 9 s"]
    assert len(calls) == 3 and len(results[1].runs) == 2 and not results[3].runs
    console = Console(width=160, file=io.StringIO())
    console.print(table("title", results), matrix(results[:1], results[1:]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (row,) = [line for line in text.splitlines() if "stops" in line]
    assert "stops: stopped after 9 s" in row and "÷ well" in text and "÷ stops" not in text
    found = figures(results)
    assert (
        found["stops"] == {"all": {"stopped": "stopped after 9 s"}} and found["well"]["all"]["requests"] == 2
    )
    json.dumps(found)


def test_bench_shows_what_was_stopped(
    tiny: Path, rival: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rival / "lines.txt"
    lines.write_text("The sun\n")
    out = rival / "out.json"
    given = ["bench", str(lines), "--raw", "-n", "4", "--ignore-eos", "--repeats", "1", "--peer", "rival"]
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main([*given, "--peer-timeout", "1.5", "--json", str(out)])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "rival: stopped after 1.5 s" in text and "rival loads: stopped after 1.5 s" in text
    found = json.loads(out.read_text())["results"]
    assert (
        found["rival"]["all"] == {"stopped": "stopped after 1.5 s"} and found[PLAIN]["all"]["requests"] == 1
    )


def test_a_stopped_result_has_no_figures() -> None:
    stopped = Measured("rival", [], "", "stopped after 1 s")
    assert stopped.without([]).stopped == stopped.only("a").stopped == "stopped after 1 s"
