"""The Triton kernels compile for CUDA devices, without one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted import needs_triton

SUPPORT = Path(__file__).parents[1] / "support"
KERNELS = Path(__file__).parents[2] / "src" / "outrider" / "backends" / "triton"
NAMES = {
    "_linear",
    "_rms_norm",
    "_silu_mul",
    "_rope_store",
    "_sum_split",
    "_add_splits",
    "_cut",
    "_best",
    "_score",
    "_walk",
}


def printed(script: str, capability: int, cache: Path) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "OUTRIDER_OVERLAP": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SUPPORT / script), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_keys_of_paths_and_of_tables_are_summed_in_one_layout(capability: int, tmp_path: Path) -> None:
    lines = printed("triton_layouts.py", capability, tmp_path).splitlines()
    assert len(lines) == 6 and all(line.endswith(" same") for line in lines), lines


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    """For Hopper it waits for the kernel before; `compile_triton.py` tries that."""
    assert {*printed("compile_triton.py", capability, tmp_path).split()} == NAMES


def launches() -> Iterator[tuple[str, ast.FunctionDef, ast.Call]]:
    """Every `kernel[grid](...)` with its kernel."""
    for path in sorted(KERNELS.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name in functions:
                    yield name, functions[name], node


def called(node: ast.AST) -> set[str]:
    """Names of the functions that are called in a statement."""
    functions: list[Any] = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {function.attr if isinstance(function, ast.Attribute) else function.id for function in functions}


def test_every_kernel_waits_for_the_one_before_and_is_launched_before_its_end() -> None:
    """A kernel may load, store or return only behind the wait, in every program (`overlap.py`)."""
    found = set()
    for name, kernel, launch in launches():
        body = [part for part in kernel.body if not isinstance(getattr(part, "value", None), ast.Constant)]
        wait = next(i for i, part in enumerate(body) if called(part) & {"overlap", "wait_for_last"})
        assert isinstance(body[wait], ast.Expr) and called(body[0]) & {"overlap", "start_next"}, name
        for part in body[:wait]:
            before = {"start_next", "prefetch", "program_id", "arange", "to"}
            assert called(part) <= before and not any(isinstance(n, ast.Return) for n in ast.walk(part)), name
        assert any(not given.arg and called(given.value) == {"launch_options"} for given in launch.keywords)
        found.add(name)
    assert found == NAMES
