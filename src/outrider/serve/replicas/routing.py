"""Choice of a replica: the longest cached prefix, weighed against load.

The router has no tokenizer.  It cuts a prompt into blocks of characters and keeps, for each replica, the
blocks that it has sent there:

    prompt   [ block 0 | block 1 | block 2 | rest ]        key i = hash of blocks 0 … i

A turn of a conversation begins with the turns before it, so it goes where its K/V and its drafters' state
are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.serve.messages.billing import unbilled
from outrider.serve.wire import dumps

BLOCK_CHARACTERS = 64
BLOCK_TOKENS = 16  # of text in English; a list of token ids has this many a block, too
OPEN_TOKENS = 128  # prompt tokens whose computation is worth as much as one open sample less in the batch
# fields before the prompt: of its text, and of the pages that it may share
BEFORE = (
    "model",
    "cache_salt",
    "tools",
    "tool_choice",
    "reasoning",
    "reasoning_effort",
    "documents",
    "instructions",
    "thinking",
    "output_config",
    "chat_template",
    "chat_template_kwargs",
)


def blocks_of(body: Mapping[str, Any]) -> list[int]:
    """Keys of the blocks of a request's prompt, of several prompts the first."""
    given = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), "")
    if isinstance(given, list) and "prompt" in body:
        given = given if isinstance(given[0], int) else given[0]
    units: Sequence[Any] = given if isinstance(given, str) else ""
    size = BLOCK_CHARACTERS
    if isinstance(given, list) and given and isinstance(given[0], int):
        units, size = given, BLOCK_TOKENS
    elif isinstance(given, list):
        units = _system(body.get("system")) + "".join(dumps(_unmarked(each)) for each in given)
    keys = [hash(dumps([_unmarked(body.get(name)) for name in BEFORE]))]
    for start in range(0, len(units) - size + 1, size):
        keys.append(hash((keys[-1], repr(units[start : start + size]))))
    return keys[1:]


def _unmarked(given: Any) -> Any:
    """A message, a part of one, or tools without marks of Anthropic's cache: they move between turns."""
    if isinstance(given, list):
        return [_unmarked(each) for each in given]
    if not isinstance(given, dict) or not (
        "cache_control" in given or isinstance(given.get("content"), list)
    ):
        return given
    kept = {key: value for key, value in given.items() if key != "cache_control"}
    return {**kept, "content": _unmarked(kept["content"])} if "content" in kept else kept


def _system(given: Any) -> str:
    """The system prompt of a message, as JSON, without what is new in every request."""
    if given is None:
        return ""
    if not isinstance(given, list):
        return dumps(unbilled(given) if isinstance(given, str) else given)
    texts = [block.get("text") if isinstance(block, dict) else block for block in given]
    return dumps([unbilled(text) if isinstance(text, str) else text for text in texts])


class Prefixes:
    """Blocks that a replica has in its K/V cache, as far as the router can tell; LRU eviction.

    capacity: blocks; None: unlimited, until the size of the cache is known
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: Sequence[int]) -> int:
        """Number of leading blocks that are cached."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the first block becomes the newest: a prefix outlives what follows it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while self.capacity is not None and len(self._keys) > self.capacity:
            self._keys.popitem(last=False)


def work(prefixes: Prefixes, open_samples: int, keys: Sequence[int]) -> tuple[int, int]:
    """Work of a request at a replica in prompt tokens, and its open samples where that is equal.

    open_samples: queued or running there
    """
    missing = len(keys) - prefixes.match(keys)
    return missing * BLOCK_TOKENS + open_samples * OPEN_TOKENS, open_samples
