"""benchmarks/: the grown folder computes what the small one does, and who is asked what."""

from __future__ import annotations

import io
from pathlib import Path

import grow
import pytest
import spec_bench
import spec_figures
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.bench.measure import Measured, Run
from outrider.bench.questions import Question
from outrider.checkpoints.hub import locate, read_tokenizer
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.outputs import CompletionOutput

HIDDEN, MLP, LAYERS, VOCABULARY = 32, 48, 2, 96


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("layers", "mlp"), [(2, 80), (5, 48), (7, 100)])
def test_a_grown_folder_computes_the_same(small: Path, layers: int, mlp: int) -> None:
    large, before = grow.grown(small, layers, mlp), grow.llama(small)
    ids = torch.arange(40).reshape(2, 20)
    assert before(ids).logits.abs().max() > 0.1
    assert grow.difference(before, large, ids) < 1e-4
    heads = HIDDEN * (32 + 16 + 16 + 32)  # q, k, v, o
    assert (
        grow.weights(large)
        == 2 * VOCABULARY * HIDDEN + layers * (heads + 3 * HIDDEN * mlp + 2 * HIDDEN) + HIDDEN
    )


def test_questions_are_spread_over_a_group() -> None:
    """The eight categories of MT-bench are one of Spec-Bench's, in which each has its share."""
    chat = [Question(kind, (f"{kind} {i}",)) for kind in ("writing", "coding") for i in range(4)]
    found = spec_bench.chosen([*chat, *(Question("qa", (str(i),)) for i in range(6))], 2)
    assert {kind: [question.turns[0] for question in group] for kind, group in found.items()} == {
        "multi-turn": ["writing 0", "coding 0"], "question": ["0", "3"],
    }  # fmt: skip


def test_a_long_question_loses_its_middle() -> None:
    tokenizer = read_tokenizer(str(locate("builtin")))
    text = " ".join(f"word{i}" for i in range(300))
    ids = spec_bench.fitted(text, tokenizer, 100)
    assert 90 < len(ids) <= 100
    text = tokenizer.decode(ids)
    assert "word0 " in text and "word299" in text and "word150" not in text
    assert "word0 word1 word2" in tokenizer.decode(spec_bench.fitted("word0 word1 word2", tokenizer, 100))


def test_what_loops_is_left_out_of_the_headline() -> None:
    def answered(tokens: list[int], seconds: float) -> Run:
        times = [0.1, *(0.1 + i * seconds for i in range(1, len(tokens)))]
        return Run("chat", times[-1], Times(), [CompletionOutput(0, "", tokens, token_times=times)])

    loop, free = [1, 2, 3, 4] * 5, list(range(20))
    plain = Measured("plain decoding", [answered(loop, 0.1), answered(free, 0.1)])
    other = Measured("copies", [answered(loop, 0.01), answered([*free[:-1], 5], 0.2)])
    made = spec_bench.figures([plain, other])["copies"]
    assert made["no loops"]["requests"] == 1 and made["no loops"]["decode speed-up"] == 0.5
    assert made["all"]["requests"] == 2 and made["all"]["speed-up"] > made["no loops"]["speed-up"]
    assert made["all"]["answers with the same tokens"] == 1
    assert "slower" in spec_figures.shown_as(made["no loops"]["speed-up"])


def test_layer_skipping_is_left_out_on_a_grown_target() -> None:
    assert {"early exit", "auto", "EAGLE-3, tree"} <= spec_bench.configs("builtin", None).keys()
    assert not {"early exit", "layer skipping"} & spec_bench.configs("builtin-100m", None).keys()
    assert [*spec_bench.configs("builtin", ["auto"])] == ["plain decoding", "auto"]
    with pytest.raises(SystemExit, match="'autos'"):
        spec_bench.configs("builtin", ["autos"])


def test_heads_of_another_target_replace_the_shipped_ones_wherever_a_method_has_a_model() -> None:
    theirs = spec_bench.configs("builtin", None, Path("theirs"))
    models = {label: (config or {}).get("model") for label, config in theirs.items()}
    assert models["EAGLE-3, tree"] == "theirs/eagle3" and models["MTP layer"] == "theirs/mtp"
    assert models["auto"] == models["draft model, chain"] == models["draft model, 4"] == "theirs/draft_model"
    assert models["suffix decoding"] is None and theirs["plain decoding"] is None


def test_a_result_becomes_a_table_for_documents_and_a_picture(tmp_path: Path) -> None:
    def answered(tokens_per_step: int) -> Measured:
        stats = (
            Speculation(20 // tokens_per_step, 16, 8, 20, True, (2, 0, 4))
            if tokens_per_step
            else Speculation()
        )
        times = [0.1 * (1 + i // max(1, tokens_per_step)) for i in range(20)]
        output = CompletionOutput(0, "", [*range(20)], speculation=stats, token_times=times)
        return Measured(f"by {tokens_per_step}", [Run("chat", times[-1], Times(), [output])], "tokens")

    plain, fast, rival = answered(1), answered(4), answered(0)
    plain.method, rival.promise = "plain decoding", ""
    late = Measured("late", [], "", "stopped after 9 s")
    made = spec_bench.figures([plain, fast, rival, late])
    console = Console(width=160, file=io.StringIO())
    spec_figures.headline("title", made, console)
    spec_figures.by_kind("title", made, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split("│")[2].strip() for line in printed.splitlines() if "late" in line] == [late.stopped]
    assert made["by 4"]["all"]["acceptance by depth"] == [0.667, 0.667]
    found = {
        "draft forward / target forward": 0.25,
        "greedy": made,
        "T = 0.8": {"plain decoding": made["plain decoding"]},
    }
    about = {"cores": 2, "cpu": "made", "date": "today", "commit": "abc"}
    result = {"conditions": about, "models": {"builtin": found}}
    tables = spec_figures.markdown(result)
    lines = tables["builtin, engines"].splitlines()
    assert "greedy 1 of 1, T = 0.8 1 of 1" in lines[1] and lines[2].startswith("0.25 of")
    assert lines[4].count("|") == lines[5].count("|") == lines[6].count("|") == 8
    assert lines[6] == "| by 4 | 40 | 4.00× | 4.00 | – | – | – |" and "| by 0 | 10 | 1.00× | – |" in lines[8]
    document = "a\n<!-- builtin, engines -->\nold\n<!-- end -->\nb\n<!-- end -->\n"
    expected = f"a\n<!-- builtin, engines -->\n{tables['builtin, engines']}\n<!-- end -->\nb\n<!-- end -->\n"
    assert spec_figures.filled(document, tables) == expected
    with pytest.raises(ValueError, match="no <!-- builtin, engines -->"):
        spec_figures.filled("a", tables)
    spec_figures.draw(result, tmp_path / "out.svg")
    assert "made" in (tmp_path / "out.svg").read_text()
