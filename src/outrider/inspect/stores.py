"""Datastores for `outrider models`, from their headers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft.datastore.store import Header, path_of
from outrider.errors import ConfigError


@dataclass(frozen=True)
class StoreCard:
    """tokenizer: fingerprint of the tokenizer of fitting targets, None if only the vocabulary is known."""

    name: str
    tokens: int
    vocabulary: int
    tokenizer: str | None
    bytes: int


def store_card(name: str) -> StoreCard | None:
    """None if `name` is not a datastore."""
    try:
        header = Header.read(path_of(name))
    except ConfigError:
        return None
    return StoreCard(name, sum(header.shards), header.vocabulary, header.tokenizer, header.file_size)
