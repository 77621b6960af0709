"""The shape of the code: imports go one way, a method is one file, and nothing grows too long to be read."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import LLM, SamplingParams, draft, verify
from outrider.verify.base import Rule

SRC = Path(outrider.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
KERNELS = sorted(SRC.rglob("*.[ch]"))
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_STEP = 350, 60, 30

# Rooms from the bottom up: a file imports from its own room and from those above it in this list.
ROOMS = [
    "version",
    "errors",
    "core",
    "cache",
    "backends",
    "sampling",
    "checkpoints",
    "models",
    "verify",
    "control",
    "drafting",
    "heads",
    "draft",
    "config",
    "engine",
    "outputs",
    "requests",
    "llm",
    "",
    "testing",
    "bench",
    "inspect",
    "certify",
    "tune",
    "cli",
    "__main__",
]

# Where a method's name may stand outside its own file: what a speculative_config means that names none, and a mix that is shown.
NAMED = {
    ("core/params.py", "suffix"),  # a parameter of OpenAI's, which is refused
    ("config.py", "off"),
    ("draft/__init__.py", "draft_model"),
    ("draft/first.py", "suffix"),
    ("draft/first.py", "recycle"),
    ("draft/union.py", "ngram"),
    ("draft/union.py", "recycle"),
}
FREE = {
    "bench",
    "certify",
    "inspect",
    "tune",
    "cli",
    "serve",
    "train",
}  # they offer methods to people, by name


def module_of(path: Path) -> str:
    """'engine.scheduler' for engine/scheduler.py, 'engine' for its __init__, '' for the package."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of Outrider that a file imports: at its top, inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "outrider")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            if (node.module or "").split(".")[0] == "outrider":
                for name in node.names:
                    below = SRC.joinpath(*str(node.module).split(".")[1:], name.name)
                    inside = below.with_suffix(".py").is_file() or below.is_dir()
                    yield f"{node.module}.{name.name}" if inside else str(node.module)


def short(name: str) -> str:
    return name.removeprefix("outrider").removeprefix(".")


def cycles(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of a graph after everything that needs nothing in it is taken away, again and again."""
    left = {name: others - {name} for name, others in needs.items()}
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    return left


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_go_down(path: Path) -> None:
    here = ROOMS.index(room_of(module_of(path)))
    for name in imports(parsed(path)):
        assert ROOMS.index(room_of(short(name))) <= here, f"{named(path)} imports {name}, a room above it"


def test_no_files_import_each_other() -> None:
    left = cycles({module_of(path): {short(name) for name in imports(parsed(path))} for path in FILES})
    assert not left, f"these import each other: {left}"


def test_hidden_imports_count() -> None:
    inside = "def f():\n    from outrider.engine.engine import Engine\n    import outrider.llm"
    assert list(imports(ast.parse(inside))) == ["outrider.engine.engine", "outrider.llm"]
    for_types = "if TYPE_CHECKING:\n    from outrider.llm import LLM"
    assert list(imports(ast.parse(for_types))) == ["outrider.llm"]


def test_a_circle_is_found() -> None:
    """The layout that this one replaced: kernels and models, heads and draft, types and cache imported each other."""
    old = {
        "types": {"cache"},
        "cache": {"types"},
        "kernels": {"models"},
        "models": {"kernels"},
        "llm": {"types"},
    }
    assert cycles(old).keys() == {"types", "cache", "kernels", "models", "llm"}
    assert not cycles({"core": set(), "cache": {"core"}, "llm": {"cache", "core"}})


# ---- one file a method


def docstrings(tree: ast.Module) -> set[int]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {id(node.value) for node in first if isinstance(node, ast.Expr)}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_method_is_named_outside_its_own_file(path: Path) -> None:
    """Neither drafters nor verification rules: the folder is the registry."""
    where = path.relative_to(SRC)
    if where.parts[0] in FREE:
        return
    tree = parsed(path)
    skip = docstrings(tree)
    own = {where.stem, where.parts[1]} if where.parts[0] == "draft" and len(where.parts) > 1 else set()
    said = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip
    }
    wrong = {
        name for name in said & set(draft.names()) if name not in own and (str(where), name) not in NAMED
    }
    assert not wrong, f"{where} knows {wrong}"


def test_every_exception_is_in_use() -> None:
    for file, name in NAMED:
        assert f'"{name}"' in (SRC / file).read_text()


@pytest.mark.parametrize("name", draft.names())
def test_a_drafter_is_complete(name: str) -> None:
    method = draft.method(name)
    assert method.__module__.split(".")[:3] == ["outrider", "draft", name]
    assert dataclasses.is_dataclass(method.Options) and method.Options.__dataclass_params__.frozen
    assert "Options" in vars(method), "its own keys, not those of another method"
    assert method.propose is not draft.Drafter.propose
    assert inspect.getdoc(importlib.import_module(f"outrider.draft.{name}"))
    method.Options()  # every key has a default


@pytest.mark.parametrize("name", verify.names())
def test_a_rule_is_complete(name: str) -> None:
    rule = verify.rule(name)
    assert rule.__module__ == f"outrider.verify.{name}"
    assert list(inspect.signature(rule()).parameters) == ["batch", "picker"]
    assert rule.walk is not Rule.walk
    assert dataclasses.is_dataclass(rule.Options) and inspect.getdoc(importlib.import_module(rule.__module__))


NEW_METHOD = '''
"""Guesses that the last token comes again."""
from dataclasses import dataclass
from outrider.drafting.base import Drafter
from outrider.core.types import Draft, DraftTree

class Again(Drafter):
    @dataclass(frozen=True)
    class Options:
        """strength: of the belief."""
        strength: float = 0.5

    def propose(self, batch):
        said = [[step.row.tokens[-1]] * step.budget.depth for step in batch]
        return Draft([DraftTree.chain(tokens, [self.options.strength] * len(tokens)) for tokens in said])
'''


def test_a_new_method_is_one_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into the folder, it has a name, keys of its own and the same text as plain decoding, without another line."""
    (tmp_path / "again.py").write_text(NEW_METHOD)
    monkeypatch.setattr(draft, "__path__", [*draft.__path__, str(tmp_path)])
    draft.methods.cache_clear()
    try:
        assert "again" in draft.names()
        prompt, params = (
            {"prompt_token_ids": [5, 6, 7]},
            SamplingParams(temperature=0.8, seed=1, max_tokens=30),
        )
        plain = LLM(str(tiny)).generate(prompt, params)[0].outputs[0]
        llm = LLM(
            str(tiny), speculative_config={"method": "again", "strength": 0.9, "num_speculative_tokens": 2}
        )
        guessed = llm.generate(prompt, params)[0].outputs[0]
        assert guessed.token_ids == plain.token_ids
        assert guessed.speculation.drafted > 0
        with pytest.raises(outrider.ConfigError, match="Did you mean 'strength'"):
            LLM(str(tiny), speculative_config={"method": "again", "strenght": 0.9})
    finally:
        monkeypatch.undo()
        draft.methods.cache_clear()
    assert "again" not in draft.names()


# ---- short enough to be read


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def lines(node: Any) -> int:
    return int(node.end_lineno) - int(node.lineno) + 1


@pytest.mark.parametrize("path", [*FILES, *KERNELS], ids=named)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", FILES, ids=named)
def test_functions_are_short(path: Path) -> None:
    long = {
        f"{node.name}: {lines(node)}" for node in functions(parsed(path)) if lines(node) > LONGEST_FUNCTION
    }
    assert not long


def test_the_step_fits_on_a_screen() -> None:
    (step,) = (node for node in functions(parsed(SRC / "engine" / "engine.py")) if node.name == "step")
    assert lines(step) <= LONGEST_STEP


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    tree = parsed(path)
    assert not tree.body or ast.get_docstring(tree) or path.name == "version.py"


# ---- what users see


def test_public_names_exist_and_are_explained() -> None:
    assert sorted(set(outrider.__all__)) == sorted(outrider.__all__)
    for name in outrider.__all__:
        thing = getattr(outrider, name)
        assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), (
            f"{name} has only what dataclass wrote"
        )


def test_public_methods_are_explained() -> None:
    for name in ("generate", "stream", "abort", "use"):
        assert inspect.getdoc(getattr(LLM, name))
