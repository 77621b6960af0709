"""Trainer of the built-in models: packing, loss weights, schedule, exact resumption."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.builtin import corpus, evaluate, prose, tasks
from recipes.builtin.model import Shape, build, export
from recipes.builtin.train import Settings, Trainer, loss_weights, rate_factor

SHAPE = Shape(hidden=32, layers=2, heads=2, kv_heads=1, mlp=32, vocabulary=400, head_size=16, context=1024)
SETTINGS = Settings(rows=3, micro=2, length=64, warmup=400, validate_tokens=400, validation_rows=1)
STEP = SETTINGS.rows * SETTINGS.length


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A corpus of generated tasks with a small tokenizer."""
    out = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    texts = [tasks.document(rng) for _ in range(120)]
    (out / "train.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    (out / "held.json").write_text(json.dumps({"prose": texts[:8]}))
    corpus.train_tokenizer(out, SHAPE.vocabulary, 20)
    corpus.build_prose(out, SETTINGS.length)
    corpus.build_shard(out, 0, SETTINGS.length)
    return out


def trainer(run: Path, folder: Path, teacher=None, **changes) -> Trainer:
    return Trainer(run, folder, SHAPE, Settings(**{**vars(SETTINGS), **changes}), teacher)


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.model.parameters()]


def test_digits_are_single_tokens(folder):
    tokenizer = corpus.load_tokenizer(folder)
    assert [
        len(t.strip("Ġ")) for t in tokenizer.encode("2748 + 19").tokens if any(c.isdigit() for c in t)
    ] == [1] * 6
    assert tokenizer.decode(tokenizer.encode("Grüße, 12 + 3 = 15\n").ids) == "Grüße, 12 + 3 = 15\n"


def test_packing_keeps_every_token_and_whole_documents():
    rng = random.Random(1)
    documents = [[rng.randrange(10, 99) for _ in range(rng.randint(1, 90))] for _ in range(200)]
    rows = list(corpus.pack(documents, 64))
    assert all(len(row) == 64 for row in rows)
    kept = sorted(int(x) for row in rows for x in row if x != corpus.PAD_ID)
    assert kept == sorted(x for d in documents for x in d)
    texts = [" " + " ".join(map(str, row)) + " " for row in rows]
    whole = [d for d in documents if len(d) <= 64]
    assert all(any(f" {' '.join(map(str, d))} " in t for t in texts) for d in whole)


def test_shards_are_reproducible(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    corpus.build_shard(tmp_path, 0, SETTINGS.length, 50)
    assert np.array_equal(np.load(tmp_path / "tasks-00000.npy"), np.load(folder / "tasks-00000.npy")[:50])


def test_prose_rows_come_once_an_epoch(folder):
    stream = corpus.Stream(folder, SETTINGS.length)
    count = len(stream.prose)
    first, second = stream.prose_rows(0, count), stream.prose_rows(count, count)
    assert sorted(map(bytes, first)) == sorted(map(bytes, second)) == sorted(map(bytes, stream.prose))
    assert not np.array_equal(first, second)


def test_prompts_weigh_less_and_padding_nothing():
    bos, end, pad, user, assistant, _ = range(len(prose.SPECIAL))
    rows = np.array([[bos, user, 50, end, assistant, 60, end, bos, 70, end, pad]])
    assert loss_weights(rows, 0.25)[0].tolist() == [0, 0.25, 0.25, 0.25, 1, 1, 1, 0, 1, 1, 0]


def test_rate_warms_up_stays_and_decays():
    assert rate_factor(49, 100, None, 1) == 0.5
    assert rate_factor(10**9, 100, None, 1) == 1
    assert [rate_factor(t, 100, 1000, 200) for t in (1000, 1100, 1200)] == [1, 0.5, 0]


def test_resumed_run_equals_one_that_was_not_stopped(folder, tmp_path):
    whole = trainer(tmp_path / "whole", folder)
    assert whole.constant(6 * STEP)
    assert whole.decay(3 * STEP)
    for steps in (2, 5, 6):  # a new object each time, as after a kill
        assert trainer(tmp_path / "parts", folder).constant(steps * STEP)
    stopped = trainer(tmp_path / "parts", folder)
    assert not stopped.decay(3 * STEP, seconds=-1)
    resumed = trainer(tmp_path / "parts", folder)
    assert resumed.decay(3 * STEP)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed)))
    assert whole.counts == resumed.counts


def test_killed_process_resumes_to_the_same_weights(folder, tmp_path):
    """Kill -9 after some steps; the run that goes on equals one that was not killed."""
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1:3];"
        "import torch; torch.set_num_threads(1);"
        "from test_recipe_training import trainer, STEP;"
        "trainer(Path(sys.argv[3]), Path(sys.argv[4]), checkpoint_seconds=0).constant(10**6 * STEP)"
    )
    here = Path(__file__).parent
    words = [str(here), str(here.parents[1]), str(tmp_path / "killed"), str(folder)]
    with subprocess.Popen([sys.executable, "-c", script, *words]) as process:
        log = tmp_path / "killed/log.jsonl"
        while not (log.exists() and '"step": 3' in log.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    resumed = trainer(tmp_path / "killed", folder)
    resumed.load("constant.pt")
    end = resumed.counts.tokens + 2 * STEP
    assert resumed.counts.step >= 1 and resumed.constant(end)
    whole = trainer(tmp_path / "whole", folder)
    assert whole.constant(end)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed)))


def test_kill_while_saving_keeps_the_old_checkpoint(folder, tmp_path, monkeypatch):
    run = trainer(tmp_path / "run", folder)
    run.constant(2 * STEP)
    before = (tmp_path / "run/constant.pt").read_bytes()

    def killed(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        run.constant(3 * STEP)
    assert (tmp_path / "run/constant.pt").read_bytes() == before
    monkeypatch.undo()
    assert trainer(tmp_path / "run", folder).constant(3 * STEP)


def test_constant_phase_goes_on_after_a_decay(folder, tmp_path):
    run = tmp_path / "run"
    trainer(run, folder).constant(2 * STEP)
    trainer(run, folder).decay(2 * STEP)
    longer = trainer(run, folder)
    longer.constant(4 * STEP)
    direct = trainer(tmp_path / "direct", folder)
    direct.constant(4 * STEP)
    assert all(torch.equal(a, b) for a, b in zip(weights(longer), weights(direct)))
    assert longer.decay(2 * STEP) and longer.counts.decay_start == 4 * STEP


def test_other_shape_in_the_same_folder_is_refused(folder, tmp_path):
    trainer(tmp_path, folder)
    with pytest.raises(ValueError, match="seed; use a new folder"):
        trainer(tmp_path, folder, seed=2)


def test_loss_falls_and_validation_is_logged(folder, tmp_path):
    run = trainer(tmp_path, folder)
    before = run.validate()
    run.constant(30 * STEP)
    after = run.validate()
    assert all(after[k] < before[k] - 0.3 for k in after), (before, after)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("validation" in line for line in lines)
    assert any(line.get("tokens_per_second", 0) > 0 for line in lines)


def test_teacher_draws_the_student_to_its_distribution(folder, tmp_path):
    teacher = trainer(tmp_path / "teacher", folder)
    teacher.constant(20 * STEP)
    student = trainer(tmp_path / "student", folder, teacher.model, teacher_weight=1.0)
    ids = torch.from_numpy(student.stream.task_rows(0, 2).astype(np.int64))

    @torch.no_grad()
    def divergence() -> float:
        p = student._logits(teacher.model, ids).log_softmax(-1)
        q = student._logits(student.model, ids).log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = divergence()
    student.constant(20 * STEP)
    assert divergence() < before / 2


def test_export_and_evaluation(folder, tmp_path, monkeypatch, capsys):
    export(build(SHAPE, 0), folder / "tokenizer.json", tmp_path / "target")
    (tmp_path / "corpus").mkdir()
    for held in folder.glob("val-*.npy"):
        np.save(tmp_path / "corpus" / held.name, np.load(held)[:20])
    rows = {text: turn for _, turn, text in evaluate.questions(1, "values")}
    tokenizer = corpus.load_tokenizer(folder)

    def perfect(prompts):
        texts = [tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
        return [rows[t].answer for t in texts]

    good = evaluate.score(perfect, tmp_path / "target", 1, "values")
    assert good["accuracy"] == 1 and not good["wrong"]
    bad = evaluate.score(
        lambda prompts: ["no no no no no no no"] * len(prompts), tmp_path / "target", 1, "values"
    )
    assert bad["accuracy"] == 0 and bad["repeated_4_grams"] > 0.5
    monkeypatch.setattr(evaluate, "MAX_TOKENS", 3)
    monkeypatch.setattr(tasks, "KINDS", {k: tasks.KINDS[k] for k in ("addition", "memory")})
    evaluate.evaluate(tmp_path, 2)
    report = json.loads((tmp_path / "target-eval.json").read_text())
    assert set(report["values"]["kinds"]) == set(report["wordings"]["kinds"]) == {"addition", "memory"}
    assert 5 < report["loss"]["prose"] < 7  # an untrained model of 400 entries: about ln 400
    assert "addition" in capsys.readouterr().out
