"""The datastore: its order equals sorting, a look-up equals a search through the corpus, and files that do
not fit are refused.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import ConfigError
from outrider.bench.prompts import PROMPTS, rendered
from outrider.checkpoints.hub import locate, read_tokenizer
from outrider.core.step import Commit
from outrider.core.tree import Budget
from outrider.draft.datastore import Datastore
from outrider.draft.datastore import corpus as building
from outrider.draft.datastore.corpus import build, order
from outrider.draft.datastore.store import HEADER, SPAN, Store, end_mark, fingerprint, path_of
from outrider.drafting.base import Target
from outrider.testing import FakeTarget, drafted_batch, make_row, propose_tree, replay, tiny_tokenizer

VOCABULARY = 1000


def made(
    folder: Path, documents: list[list[int]], vocabulary: int = VOCABULARY, tokenizer: Any = None
) -> str:
    """The datastore of some documents of ids."""
    corpus, file = folder / "corpus.jsonl", str(folder / "store")
    corpus.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in documents))
    build([str(corpus)], file, tokenizer, vocabulary)
    return file


def drafter(file: str, **options: Any) -> Datastore:
    return Datastore(Datastore.Options(datastore=file, **options), FakeTarget())


# ---- order and look-up


@given(
    st.lists(st.sampled_from([[0] * 5, [0] * 11, [1, 0, 1], [2], [1, 2] * 4]), min_size=1, max_size=20),
    st.sampled_from([2, 4]),
)
def test_the_order_equals_sorting(words: list[list[int]], width: int) -> None:
    """Of texts that repeat themselves at length."""
    tokens = [token for word in words for token in word]
    text = np.array(tokens + [end_mark(width)] * SPAN, dtype=f"u{width}")
    found = order(text, len(tokens)).tolist()
    assert sorted(found) == list(range(len(tokens)))
    keys = [text[i : i + SPAN].tolist() for i in found]
    assert keys == sorted(keys)


def search(
    parts: list[list[int]], context: list[int], low: int, high: int, depth: int
) -> tuple[int, list[list[int]]]:
    """The same by looking everywhere; None is the end mark."""
    for length in range(min(high, len(context)), low - 1, -1):
        found = []
        for part in parts:
            for at in range(len(part) - length + 1):
                if part[at : at + length] == context[-length:]:
                    after = part[at + length : at + length + depth]
                    after = after[: after.index(None)] if None in after else after  # type: ignore[arg-type]
                    found.append(after)
        if found:
            return length, found
    return 0, []


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=5),
    context=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    shard=st.integers(3, 40),
    low=st.integers(1, 3),
    high=st.integers(3, SPAN),
    vocabulary=st.sampled_from([5, 70_000]),
)
def test_a_look_up_equals_a_search(
    documents: list[list[int]],
    context: list[int],
    shard: int,
    low: int,
    high: int,
    vocabulary: int,
    tmp_path_factory: Any,
) -> None:
    """In shards of a few tokens, and all places looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "SHARD", shard)
        store = Store(made(tmp_path_factory.mktemp("store"), documents, vocabulary))
    whole: list[Any] = [token for ids in documents for token in (*ids, None)]
    parts = [whole[at : at + shard] for at in range(0, len(whole), shard)]
    assert len(store.shards) == len(parts)
    length, texts = store.find(context, low, high, 10_000, 4)
    expected, after = search(parts, context, low, high, 4)
    assert length == expected
    ended = [text[: text.index(-1)] if -1 in text else text for text in texts]
    assert sorted(ended) == sorted(after)


def test_of_many_places_some_are_looked_at_evenly(tmp_path: Path) -> None:
    store = Store(made(tmp_path, [[1, 2, 3] * 500 + [1, 2, 4] * 500]))
    length, texts = store.find([9, 1, 2], 1, SPAN, 100, 1)
    assert length == 2 and 50 <= len(texts) <= 100
    assert 0.4 < sum(text == [3] for text in texts) / len(texts) < 0.6


# ---- drafting


def test_most_frequent_continuations_are_drafted(tmp_path: Path) -> None:
    file = made(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7, 2, 8]])
    tree = propose_tree(drafter(file), make_row([9, 1, 2]), 10)
    assert (tree.tokens, tree.parents) == ([3, 4, 6, 5], [-1, 0, -1, 0])
    assert tree.confidence == pytest.approx([0.75 * 3 / 4, 0.875 * 2 / 3, 0.75 / 4, 0.875 / 3])
    assert propose_tree(drafter(file, num_draft=2), make_row([9, 1, 2]), 10).tokens == [3, 4]
    assert propose_tree(drafter(file, min_token_prob=0.4), make_row([9, 1, 2]), 10).tokens == [3]
    assert propose_tree(drafter(file), make_row([9, 1, 2]), 1).tokens == [3, 6]


def test_no_match_gives_no_draft(tmp_path: Path) -> None:
    file = made(tmp_path, [[1, 2, 3, 4]])
    for tokens in ([2], [5, 5], [4, 2], [3, 4]):
        assert propose_tree(drafter(file), make_row(tokens), 10).tokens == []
    assert propose_tree(drafter(file, min_token_span=1), make_row([9, 2]), 10).tokens == [3, 4]
    assert propose_tree(drafter(file), make_row([1, 2]), 0).tokens == []


def test_a_corpus_that_misleads_is_not_believed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpus, text = (rng.integers(0, 20, 4000).tolist() for _ in range(2))
    method, row = drafter(made(tmp_path, [corpus])), make_row(text[:10])
    sizes = replay(method, row, text[10:900], 10)
    assert sum(sizes[:10]) > 10
    assert sum(sizes[400:]) < 0.7 * len(sizes[400:])
    method.forget(row, "finished")
    assert not method.lengths


def test_the_end_of_a_text_is_no_failure(tmp_path: Path) -> None:
    """A draft token that was right and ended the text is not among the accepted ones."""
    method, row = drafter(made(tmp_path, [[1, 2, 3, 4]])), make_row([9, 1, 2])
    before = [*method.memory.values]
    batch = drafted_batch(method, row, Budget(2, 2))
    batch[0].emitted, batch[0].closing, row.finish_reason = [3], [0], "length"
    method.observe(Commit(batch))
    assert method.memory.values == before
    row.finish_reason, batch[0].emitted, batch[0].closing = None, [7], []
    method.observe(Commit(batch))
    assert method.memory.values != before


# ---- reading a corpus


def test_texts_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at lines into pieces, a document after another; folders are searched."""
    monkeypatch.setattr(building, "PIECE", 10)
    monkeypatch.setattr(building, "BATCH", 2)
    tokenizer, folder = tiny_tokenizer(), tmp_path / "corpus" / "deep"
    folder.mkdir(parents=True)
    lines = ["the rain\n", "in the north\n", "\n", "and a tree\n"]
    (folder / "a.txt").write_text("".join(lines))
    (folder / "b.jsonl").write_text('{"text": "one"}\n\n{"token_ids": [5, 6]}\n')
    np.save(folder / "c.npy", np.array([7, 8, 9], np.int16))
    (folder / "ignored.bin").write_text("no")
    seen: list[tuple[str, int, int]] = []
    file = str(tmp_path / "store")
    build([str(tmp_path / "corpus")], file, tokenizer, 300, lambda *what: seen.append(what))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    expected = [
        *encode(lines[0] + lines[1]),
        *encode(lines[2] + lines[3]),
        65535,
        *encode("one"),
        65535,
        5,
        6,
        65535,
        7,
        8,
        9,
        65535,
    ]
    store = Store(file)
    first = HEADER // 2
    assert store.tokens[first : first + len(expected)][::-1].tolist() == expected
    assert store.header.tokenizer == fingerprint(tokenizer)
    assert [what for what, _, _ in seen] == sorted(what for what, _, _ in seen)
    assert all(0 <= done <= total for _, done, total in seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"], "nothing is left behind"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 'line 2: expected {"text"'),
        ("a.jsonl", b'{"token_ids": [1, "2"]}\n', "line 1: expected"),
        ("a.jsonl", b'{"token_ids": [1, true]}\n', "line 1: expected"),
        ("a.jsonl", b"[1, 2]\n", "line 1: expected"),
        ("a.jsonl", b"{\n", "line 1: no JSON"),
        ("a.jsonl", b'{"token_ids": [1, 1000]}\n', "holds the id 1000: the ids are 0 … 999"),
        ("a.jsonl", b'{"token_ids": [-3, 4]}\n', "holds the id -3"),
        ("a.jsonl", b"", "no tokens"),
        ("a.txt", b"words", "the model has no tokenizer"),
        ("a.npy", b"words", "no array of token ids"),
        ("a.bin", b"words", "holds no corpus"),
    ],
)
def test_a_bad_corpus_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build([str(tmp_path / name)], str(tmp_path / "store"), None, VOCABULARY)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left behind"


def test_unreadable_inputs_are_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="one row of whole numbers"):
        build([str(tmp_path / "a.npy")], str(tmp_path / "store"), None, VOCABULARY)
    with pytest.raises(ConfigError, match="no file or folder"):
        build([str(tmp_path / "none")], str(tmp_path / "store"), None, VOCABULARY)
    with pytest.raises(ConfigError, match="no folder"):
        build([str(tmp_path / "a.npy")], str(tmp_path / "none" / "store"), None, VOCABULARY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no corpus"):
        build([str(tmp_path / "empty")], str(tmp_path / "store"), None, VOCABULARY)


# ---- refusing a file


def test_files_that_are_no_datastore(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        drafter(str(tmp_path / "none"))
    for content in (b"", b"{}", b"\xff\x00 binary", b'{"format": "other"}', b"[]"):
        (tmp_path / "store").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a datastore"):
            drafter(str(tmp_path / "store"))


@pytest.mark.parametrize("change", ["cut", "longer", "version", "width"])
def test_a_damaged_datastore_is_refused(change: str, tmp_path: Path) -> None:
    file = Path(made(tmp_path, [[1, 2, 3]]))
    drafter(str(file))
    content = file.read_bytes()
    header = json.loads(content[:HEADER])
    if change == "cut":
        file.write_bytes(content[:-1])
    elif change == "longer":
        file.write_bytes(content + b"0")
    else:
        header[change] = 7
        file.write_bytes(json.dumps(header).encode().ljust(HEADER) + content[HEADER:])
    with pytest.raises(ConfigError, match="build it again"):
        drafter(str(file))


@pytest.mark.parametrize("value", ["x", None, -1, [], {}, [[0, 0]], [-1], ["a"], 1.5, True, 1 << 40])
@pytest.mark.parametrize("key", ["vocabulary", "width", "shards", "version"])
def test_every_number_of_a_header_is_checked(key: str, value: Any, tmp_path: Path) -> None:
    file = Path(made(tmp_path, [[1, 2, 3] * 4]))
    content = file.read_bytes()
    header = json.loads(content[:HEADER]) | {key: value}
    file.write_bytes(json.dumps(header).encode().ljust(HEADER) + content[HEADER:])
    with pytest.raises(ConfigError, match="store' has "):
        Store(str(file))


def test_places_beyond_the_text_draft_something(tmp_path: Path) -> None:
    """Of a damaged file, which drafts badly: no step may fail for it."""
    file = Path(made(tmp_path, [[1, 2, 3] * 4]))
    content = bytearray(file.read_bytes())
    places = Store(str(file)).header.sections[0].places
    content[places:] = b"\xff" * (len(content) - places)
    file.write_bytes(content)
    store = Store(str(file))
    store.shards[0].nearest = lambda suffix: (1, 0)  # type: ignore[method-assign]
    store.shards[0].part = lambda suffix, at: range(3)  # type: ignore[method-assign]
    length, texts = store.find([1, 2], 1, 4, places=8, depth=2)
    assert length == 1 and all(0 <= token <= VOCABULARY or token == -1 for text in texts for token in text)


def test_a_datastore_of_another_vocabulary_or_tokenizer(tmp_path: Path) -> None:
    def target(vocabulary: int, tokenizer: Any) -> Target:
        return FakeTarget(vocabulary=vocabulary, checkpoint=SimpleNamespace(tokenizer=tokenizer))

    tokenizer = tiny_tokenizer()
    bare, named = made(tmp_path, [[1, 2]]), tmp_path / "named"
    named.mkdir()
    fine = Datastore.Options(datastore=made(named, [[1, 2]], 300, tokenizer))
    with pytest.raises(ConfigError, match="vocabulary of 1000, the target one of 999"):
        Datastore(Datastore.Options(datastore=bare), target(999, tokenizer))
    with pytest.raises(ConfigError, match="vocabulary of 300, the target one of 320"):
        Datastore(fine, target(320, None))
    Datastore(fine, target(320, tokenizer))  # the same ids, padded
    other = tiny_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        Datastore(fine, target(300, other))


def test_a_datastore_must_be_named() -> None:
    with pytest.raises(ConfigError, match="outrider datastore build"):
        Datastore(Datastore.Options(), FakeTarget())


# ---- the built-in one


def test_the_built_in_datastore_is_for_the_built_in_target() -> None:
    tokenizer = read_tokenizer(str(locate("builtin")))
    target = FakeTarget(vocabulary=8192, checkpoint=SimpleNamespace(tokenizer=tokenizer))
    options = Datastore.Options(**Datastore.demo["REST"])
    assert Datastore(options, target).store.header.tokenizer == fingerprint(tokenizer)
    target.checkpoint.tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match="'builtin-datastore' was made with another tokenizer"):
        Datastore(options, target)


def test_the_built_in_datastore_is_small_and_in_order() -> None:
    store = Store("builtin-datastore")
    (count,) = store.header.shards
    assert 100_000 < count < 270_000
    assert len(zlib.compress(path_of("builtin-datastore").read_bytes(), 9)) < 1 << 20
    (section,) = store.header.sections
    text = store.tokens[section.text // 2 :][: count + SPAN].astype(np.uint16)
    assert (
        text[count:].tolist() == [end_mark(2)] * SPAN
        and text[text != end_mark(2)].max() < store.header.vocabulary
    )
    spans = np.lib.stride_tricks.sliding_window_view(text, SPAN)[:count]
    expected, found = order(text, count), np.array(store.shards[0].places)
    assert (spans[expected] == spans[found]).all() and (np.sort(found) == np.arange(count)).all()


def test_the_built_in_datastore_has_not_seen_the_demo() -> None:
    """The last tokens of its prompts, as a document begins with them, are in no document."""
    store, tokenizer = Store("builtin-datastore"), read_tokenizer(str(locate("builtin")))
    turn = rendered(PROMPTS[-1], tokenizer)["prompt_token_ids"][-2:]
    assert store.find(turn, 2, SPAN, 64, 1)[0] == 2, "that is how a document's answer begins"
    for prompt in PROMPTS:
        ids = rendered(prompt, tokenizer)["prompt_token_ids"]
        assert store.find(ids, min(SPAN, len(ids)), SPAN, 64, 1) == (0, []), prompt


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("datastore", 5),
        ("datastore", ""),
        ("max_token_span", SPAN + 1),
        ("min_token_span", 0),
        ("min_token_span", 17),
        ("num_draft", True),
        ("min_token_prob", -0.1),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got"):
        Datastore.Options(**{name: value})
