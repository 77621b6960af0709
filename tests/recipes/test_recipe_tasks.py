"""Task generators: right references, strict checkers, disjoint splits, deterministic draws."""

import random
import re

import pytest

from recipes.builtin import prompts, tasks
from recipes.builtin.tasks import check, lexicon
from recipes.builtin.tasks import draw as draw_module
from recipes.builtin.tasks.code import run_function
from recipes.builtin.tasks.functions import EXAMPLES

COUNT = 25


def draw(kind: str, split: str, count: int = COUNT, seed: int = 3) -> list[tasks.Task]:
    rng = random.Random(seed)
    return [tasks.make(kind, rng, split) for _ in range(count)]


def shifted(text: str) -> str:
    """The text with every letter and digit replaced by the next one."""
    return re.sub(
        r"[0-9A-Za-z]", lambda m: "0" if m[0] == "9" else "a" if m[0] in "zZ" else chr(ord(m[0]) + 1), text
    )


def last_word_shifted(text: str) -> str:
    head, word, tail = re.fullmatch(r"(.*?)([A-Za-z0-9]+)([^A-Za-z0-9]*)", text, re.DOTALL).groups()
    return head + shifted(word) + tail


@pytest.mark.parametrize("split", tasks.SPLITS)
@pytest.mark.parametrize("kind", tasks.KINDS)
def test_reference_passes_and_corrupted_answer_fails(kind, split):
    for task in draw(kind, split):
        for turn in task.turns:
            assert turn.check(turn.answer), turn
            assert not turn.check(""), turn
            assert not turn.check(shifted(turn.answer)), turn
            if kind != "story":  # a story may end in many ways
                assert not turn.check(last_word_shifted(turn.answer)), turn


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_splits_are_disjoint(kind):
    train, values, wordings = (draw(kind, split, 150) for split in tasks.SPLITS)

    def collect(group: list[tasks.Task], field: str) -> set[str]:
        return {x for task in group for x in getattr(task, field)}

    assert collect(values, "keys") and not collect(train, "keys") & collect(values, "keys")
    assert collect(wordings, "wordings") and not collect(train, "wordings") & collect(wordings, "wordings")
    assert not collect(values, "wordings") & collect(wordings, "wordings")


@pytest.mark.parametrize("kind", [k for k in tasks.KINDS if k != "capitals"])
def test_training_has_no_held_out_words(kind):
    held = {w for group in (lexicon.NAMES, lexicon.CITIES, lexicon.THINGS) for w in group.held}
    for task in draw(kind, "train", 100):
        for turn in task.turns:
            found = held & set(re.findall(r"\w+", f"{turn.prompt} {turn.answer}"))
            assert not found, (found, turn)


def test_draws_depend_on_the_seed_alone():
    def texts(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [tasks.document(rng) for _ in range(60)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_document_has_the_chat_format():
    rng = random.Random(4)
    texts = [tasks.document(rng) for _ in range(40)]
    assert any("<|system|>" in text for text in texts)
    for text in texts:
        text = text.replace("| ", "").replace(" |", "").replace("|-", "-").replace("-|", "-")  # tables
        assert re.fullmatch(
            r"<\|bos\|>(<\|system\|>[^|]+<\|end\|>)?(<\|user\|>[^|]+<\|end\|><\|assistant\|>[^|]+<\|end\|>)+",
            text,
        ), text


@pytest.mark.parametrize(
    "text, right",
    [
        ("12 + 7 = 19", True),
        ("12 + 7 = 18", False),
        ("10 + 3 - 7 = 6", True),
        ("9 * 8 + 4 = 76", True),
        ("28 / 6 = 4 rest 4", True),
        ("28 / 6 = 4 rest 3", False),
        ("12 / 4 = 3", True),
        ("x = 4", True),
        ("1 + 1 = 2\n2 + 2 = 5", False),
    ],
)
def test_equations_are_checked(text, right):
    assert check.equations_hold(text) == right


def test_wrong_working_fails():
    turn = tasks.make("addition", random.Random(0)).turns[0]
    lines = turn.answer.split("\n")
    assert not turn.check("\n".join(["1 + 1 = 3", *lines]))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_functions_do_not_change_with_the_names_of_their_arguments(example):
    given = run_function(example.source(), example.name, example.tests)
    assert given is not None
    other = [f"argument_{i}" for i in range(len(example.arguments))]
    assert run_function(example.source("other", other), "other", example.tests) == given


def test_running_code_is_bounded():
    assert run_function("def f(x):\n    while True:\n        x += 1", "f", [(1,)]) is None
    assert run_function("import os\ndef f(x):\n    return x", "f", [(1,)]) is None
    assert run_function("def f(x):\n    return missing", "f", [(1,)]) is None


def test_questions_for_benchmarks_have_held_out_wordings():
    asked = list(prompts.held_out(1, 0))
    assert [question["category"] for question in asked] == list(tasks.KINDS)
    assert asked == list(prompts.held_out(1, 0)) != list(prompts.held_out(1, 1))
    add = next(question["turns"][0] for question in asked if question["category"] == "addition")
    assert re.search(r"Add \d+ and \d+\.|What do you get if you add \d+ to \d+\?", add)


@pytest.mark.parametrize("kind", ["addition", "extraction", "smalltalk"])
def test_training_has_more_wordings_than_the_generators(kind):
    templates = {wording for task in draw(kind, "train", 400) for wording in task.wordings}
    more = {wording for extra in draw_module._more_wordings().values() for wording in extra}
    assert templates & more and templates - more


def test_some_words_of_training_tasks_are_replaced():
    names = {
        word
        for task in draw("memory", "train", 200)
        for word in re.findall(r"is ([A-Z]\w+)", task.turns[0].prompt)
    }
    known = {*lexicon.NAMES.train, *lexicon.CITIES.train}
    assert names & known and names - known
