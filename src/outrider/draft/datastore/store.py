"""The file of a datastore: the tokens of a corpus, sorted so that the longest match of a text is found in a
few reads.

    header     one line of JSON, padded with spaces to HEADER bytes: the fields of `Header`
    shard      its tokens in reverse order, big-endian, then SPAN end marks; padded to 8 bytes
               the places of these tokens, uint32, sorted by the SPAN tokens from there on; padded to 8 bytes
    shard      …

In reverse order, texts with a common suffix have a common prefix, so their places are adjacent.  Big-endian
tokens compare as their bytes do.  So a look-up is a bisection over slices of a memory map, and reads only the
pages that it touches.
"""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.validate import is_whole
from outrider.errors import ConfigError

FORMAT, VERSION, HEADER = "outrider-datastore", 1, 16384
MOST_TOKENS = 1 << 32  # of a shard: places are uint32
SPAN = 16  # number of tokens that places are sorted by, and of the longest match
BUILTIN = {"builtin-datastore": Path(__file__).parents[2] / "builtin" / "datastore" / "answers.store"}


class Section(NamedTuple):
    """A shard in the file: its number of tokens, and byte offsets of its text, of its places, of its end."""

    tokens: int
    text: int
    places: int
    end: int


@dataclass(frozen=True)
class Header:
    """First line of a datastore.

    width: bytes of a token, 2 or 4; the largest such number marks the end of a document.
    shards: tokens of each.
    """

    vocabulary: int
    tokenizer: str | None
    width: int
    shards: list[int]
    format: str = FORMAT
    version: int = VERSION

    @property
    def sections(self) -> list[Section]:
        found, text = list[Section](), HEADER
        for tokens in self.shards:
            places = text + _padded((tokens + SPAN) * self.width)
            found.append(Section(tokens, text, places, places + _padded(tokens * 4)))
            text = found[-1].end
        return found

    @property
    def is_sound(self) -> bool:
        """Whether every value has its kind.  Those of a damaged file may be anything."""
        return (
            is_whole(self.version)
            and is_whole(self.width)
            and self.width in (2, 4)
            and is_whole(self.vocabulary, 1, end_mark(self.width))
            and isinstance(self.shards, list)
            and all(is_whole(tokens, 0, MOST_TOKENS) for tokens in self.shards)
        )

    @property
    def file_size(self) -> int:
        return self.sections[-1].end if self.shards else HEADER

    def packed(self) -> bytes:
        line = json.dumps(asdict(self)).encode()
        if len(line) >= HEADER:
            raise ConfigError(
                f"a datastore has at most about {HEADER // 10} shards, this one has {len(self.shards)}."
            )
        return line.ljust(HEADER - 1) + b"\n"

    @staticmethod
    def read(path: Path) -> Header:
        """Read and check the header.  Raises ConfigError for another kind of file and an incomplete one."""
        try:
            with open(path, "rb") as file:
                line, size = file.read(HEADER), path.stat().st_size
        except (OSError, ValueError) as error:  # a name with a zero byte, too
            raise ConfigError(
                f"the datastore {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
            ) from error
        try:
            entries = json.loads(line)
        except ValueError:
            entries = None
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            raise ConfigError(f"{str(path)!r} is not a datastore: make one with `outrider datastore build`.")
        if entries.get("version") != VERSION:
            raise ConfigError(
                f"the datastore {str(path)!r} has format version {entries.get('version')!r}, this is version "
                f"{VERSION}: build it again."
            )
        if set(entries) != {f.name for f in fields(Header)} or not (header := Header(**entries)).is_sound:
            raise ConfigError(f"the datastore {str(path)!r} has a damaged header: build it again.")
        if size != header.file_size:
            raise ConfigError(
                f"the datastore {str(path)!r} has {size:,} bytes and should have {header.file_size:,}: build "
                f"it again."
            )
        return header


class Store:
    """A datastore, mapped into memory."""

    def __init__(self, name: str) -> None:
        self.header = Header.read(path := path_of(name))
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        width = self.header.width
        # the text of a shard is a part of it
        self.tokens = np.frombuffer(self.map, f">u{width}", self.header.file_size // width)
        self.shards = [_Shard(self.map, width, section) for section in self.header.sections]

    def find(
        self, context: Sequence[int], low: int, high: int, places: int, depth: int
    ) -> tuple[int, list[list[int]]]:
        """Return the length of the longest match of the end of `context`, of low … high tokens, and what
        followed it.

        At most about `places` occurrences are read, evenly spaced.  Each gives `depth` tokens, -1 after
        the end of its document.
        """
        width = self.header.width
        suffix = np.array(context[: -high - 1 : -1]).astype(f">u{width}").tobytes()
        nearest = [shard.nearest(suffix) for shard in self.shards]
        length = max((agreed for agreed, _ in nearest), default=0)
        if length < low:
            return 0, []
        match, matches = suffix[: length * width], list[tuple[_Shard, range]]()
        for shard, (agreed, at) in zip(self.shards, nearest):
            if agreed == length:
                matches.append((shard, shard.part(match, at)))
        step = max(1, -(-sum(len(part) for _, part in matches) // places))
        starts, occurrences = list[int](), list[int]()  # tokens of the file: where its shard begins, itself
        for shard, part in matches:
            for i in part[::step]:
                starts.append(shard.first)
                occurrences.append(shard.first + shard.places[i])
        return length, self._texts_after(np.array(occurrences), np.array(starts), depth)

    def _texts_after(
        self, occurrences: NDArray[np.int64], starts: NDArray[np.int64], depth: int
    ) -> list[list[int]]:
        """The `depth` tokens that followed each occurrence, -1 after the end of its document.

        starts: the first token of the shard of each.  Shards hold their text in reverse order.
        """
        first = starts[:, None]
        at = occurrences[:, None] - np.arange(1, depth + 1)
        # places of a damaged file may be beyond its end
        tokens = self.tokens[np.clip(at, first, len(self.tokens) - 1)].astype(np.int64)
        tokens[(at < first) | (tokens == end_mark(self.header.width))] = -1
        texts: list[list[int]] = tokens.tolist()
        return texts


class _Shard:
    """A shard in the mapped file.  first: offset of its text in the file, in tokens."""

    def __init__(self, map: mmap.mmap, width: int, section: Section) -> None:
        self.map, self.width, self.size = map, width, section.tokens
        self.text, self.first = section.text, section.text // width
        self.places = memoryview(map)[section.places : section.places + 4 * self.size].cast("I")

    def _slices(self, length: int) -> Callable[[int], bytes]:
        """Return a function: index in the order -> the first `length` bytes at that place."""
        map, places, text, width = self.map, self.places, self.text, self.width
        return lambda i: map[(at := text + width * places[i]) : at + length]

    def nearest(self, suffix: bytes) -> tuple[int, int]:
        """Return (tokens of the longest common prefix of `suffix` and any place; index of such a place)."""
        slices = self._slices(len(suffix))
        place, best = bisect_left(range(self.size), suffix, key=slices), (0, 0)
        for at in (place - 1, place):
            if 0 <= at < self.size:
                same = next((j for j, (a, b) in enumerate(zip(slices(at), suffix)) if a != b), len(suffix))
                best = max(best, (same // self.width, at))
        return best

    def part(self, suffix: bytes, at: int) -> range:
        """The part of the order whose places begin with `suffix`.  Index `at` is in it."""
        slices, all_places = self._slices(len(suffix)), range(self.size)
        begin = bisect_left(all_places, suffix, hi=at, key=slices)
        return range(begin, bisect_right(all_places, suffix, lo=at, key=slices))


def path_of(name: str) -> Path:
    """The path of a built-in datastore or a file."""
    return BUILTIN.get(name) or Path(os.path.expanduser(name))


def end_mark(width: int) -> int:
    return int((1 << 8 * width) - 1)


def fingerprint(tokenizer: Any) -> str | None:
    """A hash of the vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def _padded(size: int) -> int:
    return -(-size // 8) * 8
