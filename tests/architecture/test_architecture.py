"""The structure of the package: imports go down, a method is one file, files and functions are short."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import FILES, KERNELS, SRC, docstring_nodes, functions, line_count, named, parsed

import outrider
from outrider import LLM, SamplingParams, draft, testing, verify
from outrider.verify.base import Rule

LONGEST_FILE, LONGEST_HEAD, LONGEST_FUNCTION, LONGEST_STEP = 350, 300, 50, 30
# The public names, and commands, whose --help must not wait for torch.  Only remove entries.
TYPE_CHECKING = {
    "__init__.py",
    *(f"cli/{name}.py" for name in ["arguments", "bench", "chat", "flags", "generate", "models", "verify"]),
}

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
    "parallel",
    "verify",
    "control",
    "drafting",
    "heads",
    "draft",
    "online",
    "config",
    "engine",
    "outputs",
    "progress",
    "requests",
    "warm_up",
    "llm",
    "news",
    "async_llm",
    "",
    "testing",
    "bench",
    "inspect",
    "certify",
    "tune",
    "train",
    "serve",
    "cli",
    "__main__",
]

# Where a method's name may occur outside its own file: defaults of speculative_config, and parts of a mix.
NAMED = {
    ("core/params.py", "suffix"),  # a parameter of OpenAI's, which is refused
    ("core/params.py", "prediction"),  # a parameter
    ("requests.py", "prediction"),  # the same parameter
    ("core/params.py", "grammar"),  # of other programs, which is refused
    ("core/structured.py", "grammar"),  # a field in vLLM's names
    ("config.py", "off"),
    ("control/evidence.py", "off"),
    ("control/sums.py", "off"),  # what a request chose, in its summary
    ("draft/__init__.py", "draft_model"),
    ("draft/first.py", "suffix"),
    ("draft/first.py", "recycle"),
    ("draft/union/__init__.py", "ngram"),
    ("draft/union/__init__.py", "recycle"),
}
OTHER_MEANING = "auto"  # of a dtype, a device, …
# Rooms that offer methods to users, by name.
FREE = {"bench", "certify", "inspect", "tune", "cli", "serve", "train"}


def module_of(path: Path) -> str:
    """'engine.scheduler' for engine/scheduler.py, 'engine' for its __init__, '' for the package."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room_of(module: str) -> str:
    """The room of a module; every `__main__` is an entry point, above all rooms."""
    return "__main__" if module.endswith("__main__") else module.split(".")[0]


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


def test_imports_go_down() -> None:
    wrong = [
        f"{named(path)} imports {name}, a room above it"
        for path in FILES
        for name in imports(parsed(path))
        if ROOMS.index(room_of(short(name))) > ROOMS.index(room_of(module_of(path)))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_package_itself_imports_for_type_checking() -> None:
    """Its public names load when they are first used; elsewhere such an import would hide a circle."""
    wrong = [
        f"{named(path)}:{node.lineno}"
        for path in FILES
        if named(path) not in TYPE_CHECKING
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other() -> None:
    left = cycles({module_of(path): {short(name) for name in imports(parsed(path))} for path in FILES})
    assert not left, f"these import each other: {left}"


def test_imports_inside_functions_and_for_type_checking_count() -> None:
    inside = "def f():\n    from outrider.engine.engine import Engine\n    import outrider.llm"
    assert list(imports(ast.parse(inside))) == ["outrider.engine.engine", "outrider.llm"]
    for_types = "if TYPE_CHECKING:\n    from outrider.llm import LLM"
    assert list(imports(ast.parse(for_types))) == ["outrider.llm"]


def test_circular_imports_are_found() -> None:
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


def test_no_method_is_named_outside_its_own_file() -> None:
    """Neither drafters nor verification rules: the folder is the registry."""
    wrong = [f"{named(path)} names {name!r}" for path in FILES for name in sorted(named_methods(path))]
    assert not wrong, "\n".join(wrong)


def named_methods(path: Path) -> set[str]:
    """Names of methods in the strings of a file, other than its own, docstrings and `NAMED`."""
    where = path.relative_to(SRC)
    if where.parts[0] in FREE:
        return set()
    own = {where.stem, where.parts[1]} if where.parts[0] == "draft" and len(where.parts) > 1 else set()
    docstrings = {id(node) for node in docstring_nodes(parsed(path))}
    strings = {
        node.value
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }
    methods = {*draft.names()} - own - {OTHER_MEANING}
    return {name for name in strings & methods if (named(path), name) not in NAMED}


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
"""Drafts the last token again."""
from dataclasses import dataclass
from outrider.drafting.base import Drafter
from outrider.core.tree import Draft, DraftTree

class Again(Drafter):
    @dataclass(frozen=True)
    class Options:
        """strength: the confidence of every draft token."""
        strength: float = 0.5

    def propose(self, batch):
        chains = [[step.row.tokens[-1]] * step.budget.depth for step in batch]
        return Draft([DraftTree.chain(tokens, [self.options.strength] * len(tokens)) for tokens in chains])
'''


def test_a_new_method_is_one_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder is a method: it has a name and keys of its own, and emits the plain output."""
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
        drafted = llm.generate(prompt, params)[0].outputs[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.speculation.drafted > 0
        with pytest.raises(outrider.ConfigError, match="Did you mean 'strength'"):
            LLM(str(tiny), speculative_config={"method": "again", "strenght": 0.9})
    finally:
        monkeypatch.undo()
        draft.methods.cache_clear()
    assert "again" not in draft.names()


# ---- tests


def test_names_of_test_files_are_unique() -> None:
    """Without packages pytest collects only one of two files of a name."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# ---- short enough to be read


def test_files_are_short() -> None:
    sizes = {named(path): len(path.read_text().splitlines()) for path in [*FILES, *KERNELS]}
    long = {name: size for name, size in sizes.items() if size > LONGEST_FILE}
    assert not long, long


def test_a_head_is_one_short_file() -> None:
    sizes = {
        name: len((SRC / "draft" / f"{name}.py").read_text().splitlines()) for name in draft.head_methods()
    }
    assert max(sizes.values()) <= LONGEST_HEAD, sizes


def test_functions_are_short() -> None:
    long = {
        (named(path), node.name)
        for path in FILES
        for node in functions(parsed(path))
        if line_count(node) > LONGEST_FUNCTION
    }
    assert not long, sorted(long)


def test_the_step_fits_on_a_screen() -> None:
    (step,) = (node for node in functions(parsed(SRC / "engine" / "engine.py")) if node.name == "step")
    assert line_count(step) <= LONGEST_STEP


def test_text_files_name_their_encoding() -> None:
    """Python 3.11 takes that of the locale otherwise."""
    wrong = [f"{named(path)}:{node.lineno}" for path in FILES for node in unencoded(parsed(path))]
    assert not wrong, "\n".join(wrong)


PATH_CALLS = (("read_text", 0), ("write_text", 1))  # with so many arguments none is an encoding


def unencoded(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text by the locale's encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name, texts = ast.unparse(node.func).split(".")[-1], [ast.unparse(given) for given in node.args]
        of_path = isinstance(node.func, ast.Attribute) and (name, len(texts)) in PATH_CALLS
        if of_path or (name in ("open", "NamedTemporaryFile") and {"'r'", "'w'", "'a'"} & {*texts}):
            yield node


# ---- what users see


def test_public_names_exist_and_are_explained() -> None:
    assert sorted(set(outrider.__all__)) == sorted(outrider.__all__)
    for name in outrider.__all__:
        thing = getattr(outrider, name)
        assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), (
            f"{name} has only what dataclass wrote"
        )


def test_every_name_of_outrider_testing_has_a_docstring() -> None:
    for name in testing.__all__:
        assert name == "Script" or inspect.getdoc(getattr(testing, name)), name


def test_public_methods_are_explained() -> None:
    for name in ("generate", "stream", "abort", "use"):
        assert inspect.getdoc(getattr(LLM, name))
