"""Building a datastore from a corpus: read, tokenize, sort.  Memory is bounded by the size of a shard."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.draft.datastore.store import SPAN, Header, end_mark, fingerprint
from outrider.errors import ConfigError, writing

SHARD = 1 << 25  # tokens that are sorted at once: about 1.5 GB of memory
PIECE = 1 << 15  # characters that are tokenized at once, cut at the end of a line
BATCH = 128  # pieces a call of the tokenizer
ARRAY_PART = 1 << 20  # ids of a .npy file that are read at once
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".npy")

Progress = Callable[[str, int, int], None]  # name of the phase, amount done, total
Ids = NDArray[Any]


def build(
    inputs: Sequence[str], output: str, tokenizer: Any, vocabulary: int, progress: Progress = lambda *_: None
) -> Header:
    """Write the datastore of all `inputs` to `output`.

    inputs: .txt, .md and .py files, .jsonl with a "text" or "token_ids" in each line, .npy with one row of
    token ids, or folders of these.  Raises ConfigError that names the file and the line.
    """
    files, target = _files(inputs), Path(output).expanduser()
    width = 2 if vocabulary <= end_mark(2) else 4
    if not target.parent.is_dir() or target.is_dir():
        wrong = f"{output!r} is a folder" if target.is_dir() else f"there is no folder {str(target.parent)!r}"
        raise ConfigError(f"{wrong}: name the file to write the datastore to.")
    with writing(target), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        spool = Path(folder) / "tokens"
        with open(spool, "wb") as sink:
            _spool(files, sink, tokenizer, vocabulary, width, progress)
        count = spool.stat().st_size // width
        if not count:
            raise ConfigError(f"there are no tokens in {', '.join(inputs)}.")
        tokens = np.memmap(spool, f"=u{width}", "r")
        shards = [min(SHARD, count - at) for at in range(0, count, SHARD)]
        header = Header(vocabulary, fingerprint(tokenizer), width, shards)
        with open(Path(folder) / "store", "wb") as sink:
            sink.write(header.packed())
            for i, size in enumerate(header.shards):
                progress("sorting", i * SHARD, count)
                _write_shard(tokens[i * SHARD : i * SHARD + size], sink)
        progress("sorting", count, count)
        os.replace(Path(folder) / "store", target)
    return header


def _files(inputs: Sequence[str]) -> list[Path]:
    """All files of a corpus.  Raises ConfigError for a path that holds none."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(f"there is no file or folder {name!r}.")
        inside = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
        some = [path] if path.is_file() else sorted(inside)
        if not some or some[0].suffix not in SUFFIXES:
            raise ConfigError(f"{name!r} holds no corpus: expected {', '.join(SUFFIXES)}.")
        found += some
    return found


class _Piece(NamedTuple):
    """A part of a document in a file, as text or ids.  size: characters of the file that it takes."""

    content: str | list[int]
    ends_document: bool
    size: int


class _Tokens(NamedTuple):
    """The ids of a piece.  position: about how many bytes of the file were read so far."""

    ids: Ids
    ends_document: bool
    position: int


def _spool(
    files: list[Path], sink: BinaryIO, tokenizer: Any, vocabulary: int, width: int, progress: Progress
) -> None:
    """Write the ids of all documents, with an end mark after each."""
    total, done = sum(file.stat().st_size for file in files), 0
    mark = np.array([end_mark(width)], f"=u{width}").tobytes()
    for file in files:
        for ids, ends_document, position in _tokens(file, tokenizer):
            _check_ids(ids, vocabulary, file)
            sink.write(ids.astype(f"=u{width}").tobytes())
            if ends_document:
                sink.write(mark)
            progress("reading", done + position, total)
        done += file.stat().st_size
        progress("reading", done, total)


def _check_ids(ids: Ids, vocabulary: int, file: Path) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ConfigError(
            f"{file} holds the id {int(ids.min() if ids.min() < 0 else ids.max())}: the ids are 0 … "
            f"{vocabulary - 1}."
        )


def _tokens(file: Path, tokenizer: Any) -> Iterator[_Tokens]:
    """The ids of a file, part by part."""
    if file.suffix == ".npy":
        yield from _array_tokens(file)
        return
    batch, position = list[_Piece](), 0
    for piece in _pieces(file):
        batch.append(piece)
        position += piece.size
        if len(batch) == BATCH:
            yield from _tokenized(batch, tokenizer, file, position)
            batch = []
    yield from _tokenized(batch, tokenizer, file, position)


def _array_tokens(file: Path) -> Iterator[_Tokens]:
    """The ids in a .npy file, one document."""
    try:
        ids = np.load(file, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no array of token ids: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"{file} must hold one row of whole numbers, it holds {ids.dtype} {list(ids.shape)}."
        )
    for first in range(0, len(ids), ARRAY_PART):
        end = first + ARRAY_PART
        yield _Tokens(np.asarray(ids[first:end]), end >= len(ids), first)


def _tokenized(batch: list[_Piece], tokenizer: Any, file: Path, position: int) -> Iterator[_Tokens]:
    """The ids of each piece, those of texts in one call of the tokenizer."""
    texts = [piece.content for piece in batch if isinstance(piece.content, str)]
    if texts and tokenizer is None:
        raise ConfigError(f"{file} holds text, and the model has no tokenizer: give token ids.")
    tokenized = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
    for piece in batch:
        ids = next(tokenized) if isinstance(piece.content, str) else piece.content
        yield _Tokens(np.array(ids, dtype=np.int64), piece.ends_document, position)


def _pieces(file: Path) -> Iterator[_Piece]:
    """The pieces of a file: every line of .jsonl is a document, any other file is one document."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        if file.suffix == ".jsonl":
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _Piece(_document(line, file, number), True, len(line))
        else:
            yield from _text_pieces(lines)


def _text_pieces(lines: Iterable[str]) -> Iterator[_Piece]:
    """Pieces of at least PIECE characters of one document."""
    held, size = list[str](), 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= PIECE:
            yield _Piece("".join(held), False, size)
            held, size = [], 0
    yield _Piece("".join(held), True, size)


def _document(line: str, file: Path, number: int) -> str | list[int]:
    """The text or the ids of a line of .jsonl.  Raises ConfigError for another form."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file}, line {number}: no JSON ({error}).") from error
    for key, kind in (("text", str), ("token_ids", list)):
        value = entry.get(key) if isinstance(entry, dict) else None
        if isinstance(value, kind) and (kind is str or all(type(token) is int for token in value)):
            found: str | list[int] = value
            return found
    raise ConfigError(f'{file}, line {number}: expected {{"text": "…"}} or {{"token_ids": […]}}.')


def _write_shard(tokens: Ids, sink: BinaryIO) -> None:
    width = tokens.dtype.itemsize
    text = np.concatenate([tokens[::-1], np.full(SPAN, end_mark(width), tokens.dtype)])
    for part in (text.astype(f">u{width}"), order(text, len(tokens))):
        sink.write(part.tobytes())
        sink.write(b"\0" * (-part.nbytes % 8))


def order(text: Ids, count: int) -> Ids:
    """The places 0 … count - 1 of `text`, uint32, sorted by the SPAN tokens from there on; after its end
    come end marks.  Equal places keep their order.

    Prefix doubling (Manber and Myers 1993).  `places` is sorted by the first h tokens, and `rank[i]` is where
    the group of places that agree with i begins in that order.  The pair (rank[i], rank[i + h]) then sorts by
    2h tokens.  Only groups of several places, `open_groups`, are sorted again.
    """
    size, width, last = len(text), text.dtype.itemsize, len(text) - 1
    h = 8 // width  # tokens in a 64-bit key
    padded = np.concatenate([text, np.full(h, end_mark(width), text.dtype)])
    key = np.zeros(size, np.uint64)
    for i in range(h):
        key = key << np.uint64(8 * width) | padded[i : i + size]
    places = np.argsort(key, kind="stable").astype(np.uint32)
    key = key[places]
    open_groups, rank = np.arange(size, dtype=np.uint32), np.empty(size, np.uint32)
    while True:
        is_first = np.concatenate([[True], key[1:] != key[:-1]])  # of its group
        group_start = np.maximum.accumulate(np.where(is_first, np.arange(len(open_groups)), 0))
        rank[places[open_groups]] = open_groups[group_start]
        is_single = is_first & np.concatenate([is_first[1:], [True]])
        open_groups = open_groups[~is_single]
        if h >= SPAN or not len(open_groups):
            return places[places < count]
        here = places[open_groups]
        behind = np.minimum(here.astype(np.int64) + h, last)
        key = rank[here].astype(np.uint64) << np.uint64(32) | rank[behind]
        resorted = np.argsort(key, kind="stable")
        places[open_groups], key = here[resorted], key[resorted]
        h *= 2
