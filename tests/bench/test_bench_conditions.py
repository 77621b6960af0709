"""What is reported beside figures."""

from __future__ import annotations

import sys

import pytest

from outrider.bench.conditions import conditions


def test_the_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/x/structured.py", "--json", "/x/y/a.json", "--out=/x/b", "--model", "org/name", "-n", "1"]
    monkeypatch.setattr(sys, "argv", given)
    assert conditions()["command"] == "structured.py --json a.json --out=b --model org/name -n 1"


@pytest.mark.parametrize(("feature", "has"), [("avx512_bf16", True), ("bf16", True), ("avx512f", False)])
def test_bfloat16_in_hardware_on_x86_64_and_arm64(
    feature: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.conditions.processor", lambda: frozenset((feature,)))
    assert conditions()["bf16 in hardware"] is has
