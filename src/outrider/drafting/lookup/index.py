"""The run index of suffix decoding: where the runs of a text ended, and what followed them."""

from __future__ import annotations

from outrider.backends.select import compiled_library
from outrider.drafting.lookup.index_base import Index
from outrider.drafting.lookup.index_compiled import CompiledIndex
from outrider.drafting.lookup.index_reference import ReferenceIndex


def index_for(capacity: int, longest: int = 1, depth: int = 0) -> Index:
    """An index of a text of at most `capacity` tokens: in C (runs.c) if the library is built."""
    library = compiled_library()
    if library is None:
        return ReferenceIndex(capacity, longest, depth)
    return CompiledIndex(library, capacity, longest, depth)
