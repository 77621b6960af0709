"""`outrider bench`: categories, figures and JSON, on files of the shape of Spec-Bench's."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from outrider import LLM, RequestError, SamplingParams
from outrider.bench.measure import PLAIN, Measured, demonstrations, grouped, too_short
from outrider.bench.measure import Run as Group
from outrider.bench.questions import MT_BENCH, prompts_for, prompts_of, read
from outrider.bench.report import figures, remarks, within_noise
from outrider.bench.rounds import Rounds, measure
from outrider.cli.bench import configs_of
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.outputs import CompletionOutput

FAST = ("-n", 8, "--method", "ngram", "--draft", 2)
KEYS = {
    "requests",
    "tokens",
    "tokens/s",
    "speed-up",
    "tokens per step",
    "acceptance",
    "share of time drafting",
    "repeated 4-grams",
    "same tokens",
}


def figures_of(out: str) -> dict[str, Any]:
    (line,) = out.splitlines()
    return dict(json.loads(line))


def test_tables_and_one_line_of_json(run: Run, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    config = 'tree={"model": "builtin-draft", "siblings": 2, "num_speculative_tokens": 2}'
    result = run("bench", questions, *FAST, "--speculative-config", config, "-b", 2, "--json", out)
    assert result.status == 0, result.err
    assert run("bench", questions, "-n", 2, "--limit", 1, "--json", out).status == 0
    for words in ("qa", "writing", "all 3 prompts", "ngram", "tree", "first token", "exceed the context: 1."):
        assert words in result.out
    assert "✓" in result.out and "✗" not in result.out
    lines = out.read_text().splitlines()
    assert len(lines) == 2, "every run adds one"
    found = json.loads(lines[0])
    assert found["conditions"].keys() >= {"cpu", "cores", "torch", "commit", "command", "date", "outrider"}
    assert (
        found["left out"] == 1
        and found["settings"]["batch size"] == 2
        and found["settings"]["max_tokens"] == 8
    )
    assert list(found["results"]) == [PLAIN, "ngram", "tree"]
    for rows in found["results"].values():
        assert list(rows) == ["all", "qa", "writing"]
        for row in rows.values():
            assert row.keys() >= KEYS and row["same tokens"] is True
            for name in ("first token ms", "stall ms", "per token ms"):
                assert 0 < row[name]["p50"] <= row[name]["p95"] <= row[name]["p99"]
        assert rows["all"]["tokens"] == rows["qa"]["tokens"] + rows["writing"]["tokens"]
    assert (
        found["results"][PLAIN]["all"]["speed-up"] == 1
        and found["results"][PLAIN]["all"]["tokens per step"] == 1
    )
    tree, each = found["results"]["tree"]["all"], found["requests"]["tree"]
    assert tree["share of time drafting"] > 0.05 and len(tree["acceptance by depth"]) == 2
    assert each["category"] == ["qa", "qa", "writing"] and sum(each["tokens"]) == tree["tokens"]
    assert sum(each["accepted"]) / sum(each["drafted"]) == pytest.approx(tree["acceptance"], abs=1e-4)


def test_a_plot_names_its_conditions(run: Run, questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.svg"
    result = run("bench", questions, *FAST, "--limit", 1, "--repeats", 1, "--plot", out)
    assert result.status == 0, result.err
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", out.read_text()))
    for words in ("2 prompts", "builtin", "batch 1", "greedy", "at most 8 tokens", "faster in every round"):
        assert words in drawn, drawn


def test_standard_output_has_json_only(run: Run, questions: Path) -> None:
    result = run("bench", questions, "-n", 4, "--limit", 1, "--json", "-")
    found = figures_of(result.out)
    assert found["results"][PLAIN]["all"]["requests"] == 2, "one of each category"
    assert "all 2 prompts" in result.err


def test_our_own_prompts_and_a_peer(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_text("The sun\n\nOnce upon a time\n")
    result = run(
        "bench",
        text,
        "-n",
        6,
        "-md",
        "builtin-draft",
        "--draft",
        2,
        "--dtype",
        "float32",
        "--peer",
        "transformers",
        "--repeats",
        1,
        "--json",
        "-",
    )
    assert result.status == 0, result.err
    results = figures_of(result.out)["results"]
    assert list(results) == [
        PLAIN,
        "draft model",
        "transformers",
        "transformers lookup",
        "transformers assisted",
    ]
    for name, rows in results.items():
        assert rows["all"]["requests"] == 2 and rows["all"]["tokens"] == results[PLAIN]["all"]["tokens"], name
        assert rows["all"]["first token ms"]["p50"] > 0
    assert "chat" in run("bench", "-n", 2, "--repeats", 1).out, "without a file our own prompts are asked"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/file",), "/no/such/file"),
        (("--method", "ngarm"), "Did you mean 'ngram'"),
        (("--speculative-config", "tree={"), "no JSON"),
        (("--speculative-config", '{"method": "ngram", "foo": 1}'), "foo"),
        (("--temperature", -1), "temperature"),
        (("-b", 0), "batch-size"),
        (("--peer", "nosuch"), "nosuch"),
        (("--plot", "all.svg"), "needs a method to draw"),
        (("-m", "/no/model"), "/no/model"),
        (("-n", 1024), "fit into the context"),
        (("--json", "/no/such/folder/x", "-n", 2), "/no/such/folder/x"),
    ],
)
def test_wrong_arguments_are_refused_before_measuring(
    run: Run, questions: Path, arguments: tuple[Any, ...], message: str
) -> None:
    file = () if str(arguments[0]).startswith("/") else (questions, "--limit", 1)
    result = run("bench", *file, *arguments)
    assert result.status == 2 and message in result.err
    assert "│" not in result.out, "nothing half-done"


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: no JSON"), ('{"turns": []}', "line 2"), ('{"words": "x"}', "line 2"), ("[1]", "line 2")],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text('{"category": "a", "turns": ["x"]}\n' + line)
    with pytest.raises(RequestError, match=message):
        read(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(RequestError, match="no prompts"):
        read(tmp_path / "none.txt")


def test_all_turns_have_the_answers_so_far(questions: Path, mute: str) -> None:
    llm, params = LLM("builtin"), SamplingParams(temperature=0, max_tokens=8)
    asked = read(questions, limit=1)
    prompts, left_out = prompts_of(llm, asked, params, all_turns=True)
    assert ([kind for kind, _ in prompts], left_out) == (["qa", "writing", "writing"], 0)
    history = [{"role": "user", "content": "Write a letter to a friend."}]
    message = llm.chat(history, params)[0].outputs[0].text
    history += [{"role": "assistant", "content": message}, {"role": "user", "content": "Make it shorter."}]
    assert prompts[2][1]["prompt_token_ids"] == llm.chat(history, params)[0].prompt_token_ids
    with pytest.raises(RequestError, match="chat template"):
        prompts_of(LLM(mute), asked, params, all_turns=True)
    assert len(prompts_of(LLM(mute), asked, params)[0]) == 2, (
        "without a template first turns are asked unchanged"
    )


def test_batched_output_equals_single_output(questions: Path) -> None:
    llm, params = LLM("builtin", max_num_seqs=4), SamplingParams(temperature=0.8, seed=1, max_tokens=12)
    prompts = [("a", "The sun"), ("b", "Once upon a time"), ("a", "The moon")]
    assert grouped(prompts, 2) == [("a", ["The sun", "The moon"]), ("b", ["Once upon a time"])]
    (together,), (alone,) = (
        measure(llm, {PLAIN: None}, prompts, params, Rounds(batch_size=size)) for size in (2, 1)
    )
    assert together.tokens == alone.tokens and len(together.runs) == 2 and len(alone.runs) == 3


def measured(times: list[list[float]], seconds: float) -> Measured:
    answers = [
        CompletionOutput(0, "", list(range(len(t))), speculation=Speculation(2, 4, 1, len(t)), token_times=t)
        for t in times
    ]
    return Measured("x", [Group("a", seconds, Times(1.0, 2.0, 1.0), answers)])


def test_latency_statistics_match_their_definitions() -> None:
    result = measured([[0.1, 0.3, 0.3, 0.6], [0.2], []], 2.0)
    assert result.first_token == [0.1, 0.2]
    assert result.stalls == pytest.approx([0.2, 0.3]), "tokens of one step come together"
    assert result.per_token == pytest.approx([0.5 / 3])
    assert result.speed == 2.5 and result.drafting == 0.25
    other = measured([[0.1, 0.2, 0.2, 0.2, 0.2]], 1.25)
    row = figures([result, other])["x"]["all"]
    assert row["speed-up"] == pytest.approx(4 / 2.5) and row["same tokens"] is False


def test_a_changed_token_is_seen(run: Run, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **more: Any) -> list[Measured]:
        results = measure(*arguments, **more)
        results[1].runs[0].answers[0].token_ids[-1] += 1
        return results

    monkeypatch.setattr("outrider.bench.rounds.measure", broken)
    result = run("bench", questions, *FAST, "--limit", 1)
    assert result.status == 1 and "✗" in result.out


def test_a_speed_up_is_the_median_of_rounds() -> None:
    """Ratios are taken within a round, so that a slow round of the machine does not count."""

    def measured(tokens: int, *turns: list[float]) -> Measured:
        answers = [CompletionOutput(0, "", [1] * tokens, speculation=Speculation())]
        return Measured("", [Group("chat", min(turn), Times(), answers, turn) for turn in turns])

    plain = measured(10, [2.0, 4.0, 9.0], [2.0, 2.0, 2.0])
    assert measured(10, [4.0, 4.0, 9.0], [2.0, 2.0, 2.0]).speed_up(plain) == 1.0
    assert measured(20, [1.0, 4.0, 9.0], [1.0, 2.0, 2.0]).speed_up(plain) == 2.0
    assert measured(10, [1.0, 2.0, 9.0], [1.0, 1.0, 2.0]).speed_up(plain) == 2.0


def test_the_share_of_the_ideal_speed_up_is_what_other_work_leaves_of_it() -> None:
    """Forwards take 80 % of plain decoding; drafting and forwards 60 % of a run with drafts."""
    answers = [CompletionOutput(0, "", [1] * 10, speculation=Speculation())]
    plain = Measured(PLAIN, [Group("chat", 10.0, Times(0.0, 8.0, 1.0), answers)])
    ours = Measured("drafts", [Group("chat", 5.0, Times(1.0, 2.0, 1.0), answers)])
    assert ours.speed_up(plain) == 2.0 and ours.of_ideal(plain) == pytest.approx(2.0 / (8 / 3))
    assert not Measured("other", [Group("chat", 5.0, Times(), answers)]).of_ideal(plain)


def answered(
    method: str, *answers: list[int], turns: list[float] | None = None, promise: str = "tokens"
) -> Measured:
    """One request a run, of these tokens; turns: the seconds of each repeat."""
    outputs = [CompletionOutput(0, "", tokens, speculation=Speculation()) for tokens in answers]
    runs = [Group("chat", min(turns or [1.0]), Times(), [answer], list(turns or [1.0])) for answer in outputs]
    return Measured(method, runs, promise)


def test_answers_of_one_token_are_not_measured() -> None:
    plain = answered(PLAIN, [1, 2, 3], [1], [4], [])
    assert too_short([plain, answered("same", [1, 2, 3], [1], [4], [])]) == {1, 2, 3}
    assert too_short([plain, answered("wrong", [1, 2, 3], [1], [5], [])]) == {1, 3}, (
        "a changed token is shown"
    )
    assert too_short([plain, answered("sampled", [1, 2], [1], [5], [], promise="distribution")]) == {1, 2, 3}
    assert plain.without({1, 2, 3}).tokens == [[1, 2, 3]]


def test_table_without_answers_is_reported(
    run: Run, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*arguments: Any, **more: Any) -> list[Measured]:
        return [answered(PLAIN, [7], [8]), answered("ngram", [7], [8])]

    monkeypatch.setattr("outrider.bench.rounds.measure", ended)
    result = run("bench", questions, *FAST, "--limit", 1, "--out", tmp_path / "out.json")
    assert result.status == 0 and "×" not in result.out
    assert "Every answer has one token" in result.out
    assert json.loads((tmp_path / "out.json").read_text())["results"] == {}


def test_measurement_noise_is_distinguished_from_a_difference() -> None:
    plain = answered(PLAIN, [1, 2], turns=[1.0, 1.0, 1.0])
    faster = answered("faster", [1, 2], turns=[0.5, 0.5, 0.6])
    unsure = answered("unsure", [1, 2], turns=[0.8, 0.98, 1.2])
    assert faster.speed_ups(plain) == pytest.approx([2, 2, 1 / 0.6])
    assert faster.noise(plain) == pytest.approx((2 - 1 / 0.6) / 2)
    assert not within_noise(faster, plain) and within_noise(unsure, plain)
    (message,) = remarks([plain, faster, unsure])
    assert "unsure" in message and "faster" not in message and "--repeats" in message
    assert remarks([plain, faster]) == [] == remarks([plain])
    (message,) = remarks([answered(PLAIN, [1, 2]), answered("ngram", [1, 2])])
    assert "One repeat" in message
    assert figures([plain, faster])["faster"]["all"]["speed-up"] == 2


def test_repeats_end_when_the_time_is_over() -> None:
    llm = LLM("builtin", max_num_seqs=1, max_model_len=64)
    params, prompts = SamplingParams(temperature=0, max_tokens=2), [("a", "The sun")]
    for seconds, expected in ((0.0, 1), (math.inf, 3)):
        (result,) = measure(llm, {PLAIN: None}, prompts, params, Rounds(3, runs=1, seconds=seconds))
        assert len(result.runs[0].turns) == expected


def test_the_categories_of_mt_bench_are_one_task_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    kinds = [*MT_BENCH, "qa", "translation"]
    path.write_text("\n".join(json.dumps({"category": kind, "turns": ["x"]}) for kind in kinds))
    assert {question.category for question in read(path)} == {"multi-turn", "qa", "translation"}


def test_methods_all_selects_every_method() -> None:
    assert list(configs_of(["all"], [], None, None)) == list(demonstrations())


def test_methods_all_leaves_out_heads_of_the_builtin_target(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(configs_of(["all"], [], None, None, "builtin-100m")) == list(demonstrations())
    alone, drafted = (configs_of(["all"], [], draft, None, str(tiny)) for draft in (None, str(tiny)))
    assert {"n-gram look-up", "layer skipping", "suffix or recycling"} < alone.keys() < {*demonstrations()}
    assert "builtin" not in json.dumps([alone, drafted])
    assert alone["auto"] == {"method": "auto"} and drafted["auto"] == {"method": "auto", "model": str(tiny)}
    assert drafted.keys() - alone.keys() == {"draft model"}
    assert "note: left out" in (told := capsys.readouterr().err) and "EAGLE-3" in told and "REST" in told


def test_the_label_of_a_row_selects_it_too() -> None:
    """Those of "all" have a built-in model, and some methods have two.  A method's name is the method."""
    assert configs_of(["auto"], [], None, None)["auto"] == {"method": "auto"}
    for label, config in demonstrations().items():
        if config is not None and label != "auto":
            assert configs_of([label], [], None, None) == {PLAIN: None, label: config}
    assert configs_of(["EAGLE"], [], None, 2)["EAGLE"]["num_speculative_tokens"] == 2  # type: ignore[index]


def test_lines_of_text_go_through_the_chat_template_unless_raw(tmp_path: Path, mute: str) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("What do plants need?\n")
    llm, params = LLM("builtin"), SamplingParams(temperature=0, max_tokens=4)
    (asked,), _ = prompts_of(llm, read(file), params)
    (raw,), _ = prompts_of(llm, read(file, raw=True), params)
    chat = llm.chat([{"role": "user", "content": "What do plants need?"}], params)[0]
    assert asked[1]["prompt_token_ids"] == chat.prompt_token_ids
    assert raw[1]["prompt_token_ids"] == llm.tokenizer.encode("What do plants need?")
    (bare,), _ = prompts_of(LLM(mute), read(file), params)
    assert bare[1]["prompt_token_ids"] == LLM(mute).tokenizer.encode("What do plants need?")
    with pytest.raises(RequestError, match="not both"):
        prompts_for(llm, read(file, raw=True), params, raw=True, all_turns=True)


def test_own_prompts_that_exceed_a_short_context_are_left_out(run: Run, mute: str) -> None:
    done = run("bench", "-m", mute, "-c", 128, "--method", "ngram", "-n", 4, "--repeats", 1, "--ignore-eos")
    assert done.status == 0, done.err
    assert "Left out, as prompt and answer exceed the context: " in done.out
