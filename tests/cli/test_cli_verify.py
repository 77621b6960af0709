"""`outrider verify`: healthy engines get their certificate, broken ones are caught with the place shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.certify import run as certify_run
from outrider.certify.certificate import Certificate
from outrider.certify.prompts import PromptSource
from outrider.certify.run import Effort, certify
from outrider.certify.ties import Gap
from outrider.draft.draft_model import DraftModel
from outrider.engine.runner import ForwardOutput, Runner
from outrider.sampling.sampler import Sampler
from outrider.testing import tiny_checkpoint
from outrider.verify import match, rejection

SHORT = ("--minutes", 0, "--samples", 60, "-b", 8, "-n", 24, "--dtype", "float32")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny target with distributions neither flat nor peaked, and a blurred copy as its draft."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_checkpoint(folder / "target", initializer_range=0.45, max_position_embeddings=512)
    draft = Path(shutil.copytree(target, folder / "draft")) / "model.safetensors"
    torch.manual_seed(1)
    weights = load_file(draft)
    save_file(
        {name: w + torch.randn_like(w) * w.std() * 0.05 for name, w in weights.items()},
        draft,
        {"format": "pt"},
    )
    return target, str(draft.parent)


def flat(panel: str) -> str:
    """The text of a panel, in one line."""
    return " ".join(panel.replace("│", " ").split())


def config(pair: tuple[str, str], **more: Any) -> str:
    return json.dumps({"model": pair[1], "num_speculative_tokens": 3, **more})


HEALTHY = (
    {"siblings": 2},
    {"verification": "rejection"},
    {"verification": "rejection", "siblings": 2, "sibling_draws": "independent"},
    {"verification": "block"},
    {"verification": "traversal", "siblings": 2},
)


@pytest.mark.parametrize("keys", HEALTHY, ids=lambda keys: "-".join(map(str, keys.values())))
def test_a_healthy_engine_passes(
    keys: dict[str, Any], run: Run, pair: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "certificate.json"
    result = run("verify", "-m", pair[0], *SHORT, "--speculative-config", config(pair, **keys), "--json", out)
    assert result.status == 0, result.out + result.err
    assert "Lossless" in result.out and "✗" not in result.out
    found = json.loads(out.read_text())
    compared = [check["figures"] for check in found["checks"] if "texts" in check["figures"]]
    texts, tokens = (sum(figures[name] for figures in compared) for name in ("texts", "tokens"))
    assert found["verdict"].startswith(
        f"Lossless: {texts:,} texts of {tokens:,} tokens equal those of plain decoding."
    )
    assert ("That is little" in found["verdict"]) == (tokens < 1000)
    assert found["passed"] and found["exact"] and found["dtype"] == "float32" and found["differences"] == []
    assert (
        found["conditions"].keys() >= {"cpu", "torch", "commit", "command"}
        and json.loads(found["method"])["model"] == pair[1]
    )
    checks = {check["name"]: check for check in found["checks"]}
    same_text = "verification" not in keys
    assert found["promise"] == ("tokens" if same_text else "distribution")
    assert ("distribution" in checks) != same_text and ("T = 0.8, top_p 0.95, batched" in checks) == same_text
    assert (
        checks["greedy, alone"]["figures"]["tokens"] == checks["greedy, batched"]["figures"]["tokens"] >= 16
    )
    assert (
        checks["log-probabilities"]["figures"]["largest difference"] == 0
        and checks["leaks"]["result"] == "none"
    )
    if not same_text:
        distribution = checks["distribution"]["figures"]
        assert (
            distribution["p"] >= distribution["level"] == pytest.approx(distribution["alarm"] / 7)
            and len(distribution["tests"]) == 6
        )
        assert (
            all(test["samples"][0] == test["samples"][1] > 0 for test in distribution["tests"])
            and distribution["combined"]["minimum_detectable"] < 1
        )


def test_kernels_whose_rounding_depends_on_the_batch(
    run: Run, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 in torch: the certificate promises less, and rounding is measured."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    arguments = ("--minutes", 0, "-b", 8, "-n", 24, "--dtype", "float16", "--json", "-")
    result = run("verify", "-m", pair[0], *arguments, "--speculative-config", config(pair))
    found = json.loads(result.out)
    assert (
        result.status == 0
        and not found["exact"]
        and "not exact: rounding depends on the batch" in flat(result.err)
    )
    (about,) = [check["figures"] for check in found["checks"] if check["name"] == "log-probabilities"]
    assert about["largest difference"] < about["limit"] and 1e-4 < about["limit"] < 1
    assert (
        found["verdict"].startswith("No deviation found: ") and "other texts may differ" in found["verdict"]
    )
    assert "Lossless" not in found["verdict"] and "That is little" in found["verdict"]


def test_many_prompts_join_and_grow_longer(run: Run, pair: tuple[str, str], tmp_path: Path) -> None:
    """Where only the prompts end the test, all are asked, more at a time and for longer answers."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"the {i} seas and the rest" for i in range(17)))
    result = run(
        "verify",
        "-m",
        pair[0],
        "--minutes",
        5,
        "-b",
        3,
        "--method",
        "ngram",
        "--json",
        "-",
        "--prompts",
        file,
    )
    assert result.status == 0 and "Lossless" in result.err
    checks = {check["name"]: check["figures"] for check in json.loads(result.out)["checks"]}
    for name in ("greedy, batched", "T = 0.8, batched", "T = 0.8, top_p 0.95, batched"):
        assert checks[name]["texts"] == 17 and checks[name]["joined"] == 1 + 3 + 3 + 1 - 1
        assert checks[name]["tokens"] > 17 * 8, "longer than in the first round"


def test_prompts_are_the_models_own_words() -> None:
    prompts = PromptSource([[1, 2, 3], [4, 5, 6, 7, 8]], max_tokens=4, extend=True, seed=0)
    assert prompts.take(2) == [[1, 2, 3], [5, 6, 7, 8]], "a prompt that is too long loses its beginning"
    assert prompts.take(1) == []
    prompts.add_text(list(range(100, 160)))
    cut = prompts.take(20)
    assert len(cut) == 20 and {len(ids) for ids in cut} == {2, 3, 4}
    assert all(ids == list(range(ids[0], ids[0] + len(ids))) and ids[0] >= 100 for ids in cut)
    assert all(len(a) <= len(b) for a, b in zip(prompts.shortest(5), prompts.shortest(5)[1:]))
    assert PromptSource([[1]], 4, False, 0).take(3) == [[1]]


def test_prompts_of_ones_own(run: Run, questions: Path, tmp_path: Path) -> None:
    """Only these are asked, and what does not fit is counted."""
    arguments = ("--minutes", 0.01, "-b", 2, "-n", 4, "--method", "ngram", "--json", "-")
    result = run("verify", "--prompts", questions, *arguments)
    assert result.status == 0, result.err
    assert "exceed the context: 1" in result.err
    found = json.loads(result.out)
    assert found["checks"][0]["figures"]["texts"] == 3 and found["settings"]["prompts"] == str(questions)


def test_a_rule_that_loses_is_measured_and_fails_unless_expected(run: Run, pair: tuple[str, str]) -> None:
    lossy = config(
        pair, verification="typical", lossless=False, posterior_threshold=0.01, posterior_alpha=0.01
    )
    arguments = ("verify", "-m", pair[0], *SHORT, "--speculative-config", lossy)
    result = run(*arguments)
    assert result.status == 1 and "marked as not lossless" in result.out
    assert "distributions differ" in result.out
    expected = run(*arguments, "--expect-lossy")
    assert expected.status == 0 and "not lossless, as expected" in expected.out
    assert expected.out.count("✓") == 1, "nothing leaked; of the rest nothing was promised"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "/no/model", "--method", "ngram"), "/no/model"),
        ((), "nothing to verify"),
        (("--method", "ngarm"), "Did you mean 'ngram'"),
        (("--speculative-config", "{"), "no JSON"),
        (("--speculative-config", '{"method": "ngram", "verification": "matsch"}'), "Did you mean 'match'"),
        (("--speculative-config", '{"method": "ngram", "verification": "typical"}'), '"lossless": False'),
        (("-md", "/no/draft"), "/no/draft"),
        (("--method", "ngram", "--expect-lossy"), "--expect-lossy"),
        (("--method", "ngram", "--prompts", "/no/prompts"), "/no/prompts"),
        (("--method", "ngram", "--json", "/no/such/folder/x"), "/no/such/folder/x"),
        (("--method", "ngram", "-b", 1), "batch-size"),
    ],
)
def test_wrong_arguments_are_refused_before_testing(
    run: Run, arguments: tuple[Any, ...], message: str
) -> None:
    result = run("verify", *arguments)
    assert result.status == 2 and message in result.err and not result.out


# ---- engines broken on purpose


def verdict(
    config: dict[str, Any], pair: tuple[str, str], exact: bool = True, samples: int = 60
) -> Certificate:
    llm = LLM(pair[0], max_num_seqs=8, dtype="float32")
    llm.engine.exact = exact
    prompts = [[5 + 7 * i % 90, 20 + i, 40 + i % 3] for i in range(16)]
    return certify(llm, llm.variant(config), PromptSource(prompts, 200, False, 0), Effort(0, 16, samples))


def drafting(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "num_speculative_tokens": 3, **more}


def failed(made: Certificate) -> set[str]:
    return {check.name for check in made.checks if not check.passed}


def test_the_controls_pass(pair: tuple[str, str]) -> None:
    """What the broken ones are compared with."""
    for config in (drafting(pair[0]), drafting(pair[1], verification="rejection")):
        made = verdict(config, pair)
        assert made.passed, made.checks


def test_noise_of_the_wrong_position(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Greedy texts cannot tell; seeded ones can, and the place is shown."""

    def pick(self: ForwardOutput, row: int, node: int, path: Sequence[int]) -> int:
        return self.sampler.pick(self.batch[row].row, (), self.logits, self.at(row, node))

    monkeypatch.setattr(ForwardOutput, "pick", pick)
    monkeypatch.setattr(Runner, "_set_verified", lambda self, batch, queries: {})
    result = run(
        "verify", "-m", pair[0], *SHORT, "--speculative-config", config((pair[0], pair[0])), "--json", "-"
    )
    message = flat(result.err)
    assert result.status == 1 and "✗" in message
    for words in ("plain decoding emits", "this one is a bug", "On these kernels every difference is a bug"):
        assert words in message
    found = json.loads(result.out)
    wrong = {check["name"] for check in found["checks"] if not check["passed"]}
    assert any(name.startswith("T = 0.8") for name in wrong) and not any(
        name.startswith("greedy") for name in wrong
    )
    first = found["differences"][0]
    assert first["position"] == len(first["prompt"]) + len(first["text"]) and not first["explained"]
    assert first["plain"] != first["speculative"] and first["gap"] > 0 and first["best"][0] == first["plain"]
    assert f"Position {first['position']}" in message


def test_verify_finds_an_unverified_token(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    walk = match.Match.walk

    def careless(self: Any, tree: Any, target: Any) -> tuple[list[int], list[int]]:
        path, message = walk(self, tree, target)
        following = [i for i in range(tree.size) if tree.parents[i] == (path[-1] if path else -1)]
        if not following:
            return path, message
        message = [*message[:-1], tree.tokens[following[0]]]
        return [*path, following[0]], [*message, target.pick(following[0], message)]

    monkeypatch.setattr(match.Match, "walk", careless)
    monkeypatch.setattr(match.Match, "kernel", "")
    made = verdict(drafting(pair[1]), pair)
    assert {"greedy, alone", "greedy, batched"} <= failed(made) and made.differences[0].gap is not None
    assert "not proven" in made.verdict.lower()
    made = verdict(drafting(pair[1]), pair, exact=False)
    assert not made.passed, "rounding does not explain everything, whatever the kernels"
    assert sum(difference.gap is not None for difference in made.differences) < len(made.differences), (
        "the rest is not looked at"
    )


def test_verify_finds_a_wrong_residual(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token comes from p instead of the residual: only the distribution differs."""
    monkeypatch.setattr(rejection.Rejection, "kernel", "")  # the mutation is one of the reference
    monkeypatch.setattr(rejection, "residual", lambda p, q, scale=1.0: (p, 1.0))
    made = verdict(drafting(pair[1], verification="rejection"), pair, samples=400)
    assert failed(made) == {"distribution"} and "distributions differ" in next(
        c.result for c in made.checks if c.name == "distribution"
    )


def test_log_probabilities_that_drift(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens, wrong log-probabilities: by a few bits on exact kernels, beyond rounding on others."""
    real = LLM.variant

    def drifting(by: float) -> None:
        def variant(self: LLM, config: Any) -> LLM:
            made = real(self, config)
            sampler = made.engine.runner.sampler = Sampler(made.engine.decoder.backend)
            values = sampler.values
            monkeypatch.setattr(sampler, "values", lambda *given: values(*given) + by)
            return made

        monkeypatch.setattr(LLM, "variant", variant)

    drifting(1e-6)
    assert failed(verdict(drafting(pair[1]), pair)) == {"log-probabilities"}
    assert verdict(drafting(pair[1]), pair, exact=False).passed
    drifting(1e-2)
    assert failed(verdict(drafting(pair[1]), pair, exact=False)) == {"log-probabilities"}


def test_ties_within_rounding_are_reported_and_pass(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text differs by a tie, as `look` finds on a GPU: the certificate counts them and passes."""
    walk = match.Match.walk

    def other(self: Any, tree: Any, target: Any) -> tuple[list[int], list[int]]:
        path, message = walk(self, tree, target)
        return path, [*message[:-1], message[-1] ^ bool(tree.size)]

    def tie(*given: Any) -> Gap:
        return Gap((1, 2), 1e-4, 1e-4, 2e-4, False)

    monkeypatch.setattr(match.Match, "walk", other)
    monkeypatch.setattr(match.Match, "kernel", "")
    monkeypatch.setattr(certify_run, "look", tie)
    made = verdict(drafting(pair[1]), pair, exact=False)
    assert (
        made.passed
        and made.ties == len(made.differences) > 0
        and f"{made.ties} ties within rounding" in made.verdict
    )


def test_verify_finds_a_drafter_that_keeps_ended_rows(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModel, "forget", lambda self, row, reason: None)
    made = verdict(drafting(pair[1]), pair)
    assert failed(made) == {"leaks"} and "'cursors'" in made.checks[-1].result
