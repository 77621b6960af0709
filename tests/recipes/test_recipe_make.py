"""The command of the recipe: stages from documents to an exported pair, and their resumption."""

import json
import random
import sys

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from recipes.builtin import corpus, heads, make, model, prose, tasks

SHAPE = model.Shape(hidden=32, layers=1, heads=2, kv_heads=1, mlp=32, vocabulary=400, head_size=16)


def call(monkeypatch, out, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(out), *words])
    make.main()


@pytest.fixture
def small(monkeypatch):
    """Small vocabulary and shapes, and documents in place of the public data sets."""
    rng = random.Random(0)
    texts = [tasks.document(rng) for _ in range(150)]
    monkeypatch.setattr(prose, "documents", lambda data: (texts[8:], {"prose": texts[:8]}))
    monkeypatch.setattr(make, "VOCABULARY", SHAPE.vocabulary)
    monkeypatch.setattr(make, "TOKENIZER_TASKS", 20)
    monkeypatch.setattr(model, "TARGET", SHAPE)
    monkeypatch.setattr(model, "DRAFT", SHAPE)


def test_stages_make_a_pair_and_resume(small, monkeypatch, tmp_path):
    call(monkeypatch, tmp_path, "--data", "unused", "--shards", "0", "data", "tokenizer", "corpus")
    corpus.build_shard(tmp_path / "corpus", 0, 1024, 20)
    train = ("--rows", "3", "--micro", "2", "--tokens", "6e3", "--decay", "3e3")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, tmp_path, *train, "--minutes", "-1", "target")
    assert stopped.value.code == 3
    call(monkeypatch, tmp_path, *train, "target", "draft")
    log = (tmp_path / "target-run/log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [1, 2, 3]
    for name in ("target", "draft"):
        assert LlamaForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == SHAPE.vocabulary
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|bos|><|user|>Hello<|end|><|assistant|>"
    call(monkeypatch, tmp_path, *train, "tokenizer", "target", "draft")
    assert (tmp_path / "target-run/log.jsonl").read_text() == log
    monkeypatch.setattr(heads, "SIZES", {"medusa": {"heads": 1, "own": False}, "eagle": {"inner": 32}})
    train = ("--prompts", "24", "--head-steps", "2", "heads")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, tmp_path, "--minutes", "0", *train)
    assert stopped.value.code == 3
    call(monkeypatch, tmp_path, *train)
    for name in ("medusa", "eagle"):
        assert json.loads((tmp_path / f"heads/{name}/training.json").read_text())["steps"] == 2
    with pytest.raises(SystemExit, match=r"prompts-24\.jsonl, not from 25 prompts"):
        call(monkeypatch, tmp_path, "--prompts", "25", "heads")
    assert len([*(tmp_path / "heads/cache").glob("answers-*")]) == 1, "all heads share the answers"


def test_errors_name_what_is_missing(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="--data"):
        call(monkeypatch, tmp_path, "data")
    for stage in ("draft", "heads"):
        with pytest.raises(SystemExit, match="run stage target first"):
            call(monkeypatch, tmp_path, stage)
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "targets")
    assert "unknown stage targets" in capsys.readouterr().err
