"""What is reported beside figures."""

from __future__ import annotations

import sys

import pytest

from outrider.bench.conditions import conditions


def test_the_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/x/structured.py", "--json", "/x/y/a.json", "--out=/x/b", "--model", "org/name", "-n", "1"]
    monkeypatch.setattr(sys, "argv", given)
    assert conditions()["command"] == "structured.py --json a.json --out=b --model org/name -n 1"
