"""What is built in stays small enough for one wheel."""

from __future__ import annotations

import zlib
from pathlib import Path

import outrider

BUILTIN = Path(outrider.__file__).parent / "builtin"
LARGEST = 40_000_000  # bytes of a wheel; the code is less than a hundredth of it
BLOCK, EVERY = 1 << 16, 16


def compressed(data: bytes) -> float:
    """Estimated bytes of the built-in weights in a wheel, from one compressed block."""
    sample = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK * EVERY)]
    return len(data) * sum(len(zlib.compress(block)) for block in sample) / max(1, sum(map(len, sample)))


def test_the_models_fit_into_a_wheel() -> None:
    sizes = {
        str(path.relative_to(BUILTIN)): compressed(path.read_bytes())
        for path in BUILTIN.rglob("*")
        if path.is_file()
    }
    assert sum(sizes.values()) < LARGEST, sorted(sizes.items(), key=lambda item: -item[1])[:5]
