"""The files of the package, parsed, for tests of its structure and language."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import outrider

SRC = Path(outrider.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
KERNELS = sorted(SRC.rglob("*.[ch]"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(path: Path) -> str:
    """The path below src/outrider."""
    return str(path.relative_to(SRC))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(tree: ast.AST) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def line_count(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_nodes(tree: ast.Module) -> list[ast.Constant]:
    """The constants that are docstrings of a module, a class or a function."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    values = [node.value for node in first if isinstance(node, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of every line of a docstring or a comment of a Python or C file."""
    text = path.read_text()
    if path.suffix != ".py":
        inside = False
        for number, line in enumerate(text.splitlines(), 1):
            inside |= "/*" in line
            if inside or "//" in line:
                yield number, line
            inside &= "*/" not in line
        return
    for constant in docstring_nodes(parsed(path)):
        for offset, line in enumerate(str(constant.value).splitlines()):
            yield constant.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
