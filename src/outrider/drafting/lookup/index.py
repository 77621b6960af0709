"""Where the runs of a text ended, and what followed them: the index of suffix decoding (runs.c; runs_reference.py without a compiler)."""

from __future__ import annotations

from outrider.backends.select import compiled_library
from outrider.drafting.lookup.index_base import Index
from outrider.drafting.lookup.index_compiled import Compiled
from outrider.drafting.lookup.index_reference import Plain


def index_for(capacity: int, longest: int = 1, depth: int = 0) -> Index:
    """An index for a text of at most `capacity` tokens: in C where the kernels are built, otherwise in Python."""
    library = compiled_library()
    if library is None:
        return Plain(capacity, longest, depth)
    return Compiled(library, capacity, longest, depth)
