"""What deploy/ has for other programs: a dashboard, an image and a unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, forked

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"outrider:\w+")


def expressions(part: Any) -> Iterator[str]:
    """The queries of a dashboard."""
    if isinstance(part, dict):
        if "expr" in part:
            yield part["expr"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from expressions(each)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(adaptive: Served) -> None:
    body = {"prompt": "a b c a b c a b", "max_tokens": 60, "temperature": 0}
    key = {"headers": {"Authorization": "Bearer secret"}}
    while not adaptive.metric("spec_decode_num_accepted_tokens_total"):
        assert adaptive.post("/v1/completions", body, **key).status_code == 200
    text = adaptive.get("/metrics").text
    samples = {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    families = set(re.findall(r"(?m)^# TYPE (\S+) \w+$", text))
    labels = {name: set[str]() for name in families}
    for sample in samples:
        name, _, given = sample.partition("{")
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", given))
    queries = list(expressions(json.loads((DEPLOY / "grafana.json").read_text())))
    assert len(queries) > 30
    for query in queries:
        for name in METRIC.findall(query):
            assert name in labels, query
        for asked, name in re.findall(r"sum by \((\w+)\) \(rate\((outrider:\w+)\[", query):
            assert not labels[name] or asked in labels[name], query


def docker(instruction: str) -> str:
    """The last instruction of this name in the Dockerfile, with its lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith(instruction + " ")][-1]


def test_the_health_check_of_the_image_tells_a_server_from_none(server: Served) -> None:
    command = docker("HEALTHCHECK").partition(" CMD ")[2]
    for port, healthy in ((server.url.rpartition(":")[2], True), ("1", False)):
        ran = subprocess.run(["sh", "-c", command], env={**os.environ, "PORT": port}, capture_output=True)
        assert (ran.returncode == 0) == healthy, ran.stderr


def test_the_image_starts_the_server_with_the_arguments_of_its_user(tmp_path: Path) -> None:
    program = tmp_path / "outrider"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    entry, default = (json.loads(docker(name).partition(" ")[2]) for name in ("ENTRYPOINT", "CMD"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    for given in (default, ["a model", "--seed", "3"]):
        ran = subprocess.run(
            [*entry, *given], env={"PATH": path, "PORT": "81"}, capture_output=True, text=True
        )
        assert ran.stdout.split("|")[:-1] == ["serve", "--host", "0.0.0.0", "--port", "81", *given]


def test_the_image_copies_what_its_context_has() -> None:
    allowed = {
        line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"(?m)^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text())
    assert {name for names in copied for name in names.split()} == allowed
    assert all((DEPLOY.parent / name).exists() for name in allowed)


def command_of_unit() -> list[str]:
    text = (DEPLOY / "outrider.service").read_text().replace("\\\n", " ")
    found = re.search(r"(?m)^ExecStart=(.*)$", text)
    assert found is not None
    return found[1].split()


def test_the_command_of_the_unit_asks_for_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    program, serve, *options = command_of_unit()
    assert (Path(program).name, serve) == ("outrider", "serve")
    given = [option.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for option in options]
    with forked(*given) as running:
        assert running.get("/v1/models").status_code == 401
        assert running.get("/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "outrider.service"
    text = (DEPLOY / "outrider.service").read_text()
    unit.write_text(text.replace(command_of_unit()[0], "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
