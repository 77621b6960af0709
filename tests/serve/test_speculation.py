"""What a request may choose about speculation, and what the answer tells of it, with several drafters."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from served import Served

BODY: dict[str, Any] = {
    "prompt": "one two three one two three one two", "max_tokens": 60, "temperature": 0.5, "seed": 3,
    "return_speculation": True, "ignore_eos": True,
}  # fmt: skip


def ask(server: Served, **given: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**BODY, **given}, headers=KEY)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


KEY = {"Authorization": "Bearer secret"}


def predicted(server: Served) -> dict[str, str]:
    """The text of BODY as a prediction: drafted from, without a choice of the controller."""
    return {"type": "content", "content": ask(server)["choices"][0]["text"]}


def test_a_named_method_drafts_alone_and_the_text_stays(adaptive: Served) -> None:
    plain = ask(adaptive, speculation={"enabled": False})
    for method in ("suffix", "draft_model"):
        found = ask(adaptive, speculation={"method": method})
        assert found["choices"][0]["text"] == plain["choices"][0]["text"]
        assert found["speculation"]["by_method"].keys() <= {method}
    assert plain["speculation"]["by_method"] == {}
    assert plain["speculation"].get("chosen", {}).keys() <= {"off"}


def test_a_method_that_is_not_loaded_is_refused_by_name(adaptive: Served) -> None:
    body = {**BODY, "speculation": {"method": "medusa"}}
    answer = adaptive.post("/v1/completions", body, headers=KEY)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "speculation.method"
    assert error["message"].startswith("speculation.method: draft_method must be one that is loaded (")
    assert "medusa" in error["message"] and "suffix" in error["message"]


def test_statistics_add_up_by_drafter_and_tell_what_was_chosen(adaptive: Served) -> None:
    found = ask(adaptive, prediction=predicted(adaptive))["speculation"]
    by_method = found["by_method"].values()
    assert sum(method["drafted"] for method in by_method) == found["drafted"] > 0
    assert sum(method["accepted"] for method in by_method) == found["accepted"]
    assert sum(found["chosen"].values()) == found["steps"] and found["gain"] > 0


def test_metrics_tell_the_chosen_drafters_and_the_ledger(adaptive: Served) -> None:
    ask(adaptive)
    metrics = adaptive.get("/metrics").text
    for name in ("chosen_total{drafters=", "gain", "ledger_loss_seconds", "ledger_room_seconds"):
        assert f"outrider:spec_decode_{name}" in metrics


def test_a_stream_tells_where_every_token_comes_from(adaptive: Served) -> None:
    body = {**BODY, "return_origins": True, "prediction": predicted(adaptive)}
    whole = ask(adaptive, **body)["choices"][0]
    body |= {"stream": True}
    lines = adaptive.post("/v1/completions", body, headers=KEY).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["outrider"]["tokens"]]
    assert len(tokens) == 60 and tokens[-1][2] == len(text)
    assert all(before[2] <= after[2] for before, after in pairwise(tokens))
    assert all((source is None) == (depth == 0) for source, depth, _ in tokens)
    assert all(after[1] in (0, before[1] + 1) for before, after in pairwise(tokens))
    statistics = chunks[-1]["speculation"]
    assert sum(source is not None for source, _, _ in tokens) == statistics["accepted"] > 0
    trees = [choice["outrider"]["tree"] for choice in choices]
    nodes = [node for tree in trees for node in tree["nodes"]]
    assert "prediction" in {node["source"] for node in nodes}
    for tree in trees:
        accepted = [node["text"] for node in tree["nodes"] if node["accepted"]]
        assert accepted == tree["emitted"][: len(accepted)]
    assert whole["text"] == text and len(whole["outrider"]["tokens"]) == 60
    assert "outrider" not in ask(adaptive)["choices"][0]
