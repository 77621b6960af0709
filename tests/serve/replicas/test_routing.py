"""Choice of a replica: prefixes, load, and conversations on a simulated trace."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from outrider.serve.replicas.routing import (
    BLOCK_CHARACTERS,
    BLOCK_TOKENS,
    OPEN_TOKENS,
    Prefixes,
    blocks_of,
    work,
)


@dataclass
class Place:
    """A replica without a process."""

    open: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)


def chosen(places: list[Place], keys: list[int]) -> Place:
    return min(places, key=lambda place: work(place.prefixes, place.open, keys))


def turns(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Messages of a conversation after a common system prompt."""
    made = [{"role": "system", "content": "You are a patient assistant. " * 12}]
    for _ in range(count):
        for role, length in (("user", 200), ("assistant", 600)):
            made.append({"role": role, "content": "".join(rng.choices("abcdefgh ", k=length))})
    return made


def test_turns_of_a_conversation_share_their_blocks() -> None:
    messages = turns(3, random.Random(0))
    keys = [blocks_of({"messages": messages[:end]}) for end in (2, 4, 6)]
    for shorter, longer in pairwise(keys):
        assert shorter == longer[: len(shorter)] and len(longer) > len(shorter) > 0


def test_what_changes_the_prompt_changes_all_blocks() -> None:
    body: dict[str, Any] = {"messages": turns(1, random.Random(0))}
    for field_, value in (
        ("model", "adapter"),
        ("tools", [{"type": "function"}]),
        ("instructions", "Be brief"),
        ("system", "Be brief"),
    ):
        assert not {*blocks_of(body)} & {*blocks_of({**body, field_: value})}


def test_a_system_prompt_has_blocks_without_what_is_new_in_every_request() -> None:
    def keys(cch: str, whole: bool) -> list[int]:
        billed, text = f"x-anthropic-billing-header: cch={cch};", "You are patient. " * 50
        texts = [f"{billed}\n{text}"] if whole else [billed, text]
        system = [{"type": "text", "text": each} for each in texts]
        given = texts[0] if whole else system
        return blocks_of({"system": given, "messages": [{"role": "user", "content": "Hello"}]})

    for whole in (True, False):
        assert keys("a" * 5, whole) == keys("b" * 9, whole) and len(keys("a", whole)) > 10
    for odd in (5, [5], [{"text": 5}], {}):
        assert isinstance(blocks_of({"system": odd, "messages": [{}]}), list)


def test_marks_of_a_cache_that_move_between_turns_change_no_block() -> None:
    """Clients of Anthropic's API mark the last block of a conversation, which is another one in each turn."""

    def turn(role: str, text: str, marked: bool) -> dict[str, Any]:
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        result = {"type": "tool_result", "content": [{"type": "text", "text": text, **mark}]}
        return {"role": role, "content": [result, {"type": "text", "text": text, **mark}]}

    words = ["a b c " * 60, "d e f " * 60, "g h i " * 60]
    tools = [{"name": "f", "cache_control": {"type": "ephemeral"}}]
    first = {"tools": tools, "messages": [turn("user", words[0], True)]}
    later = [turn("assistant", words[1], False), turn("user", words[2], True)]
    second = {"tools": [{"name": "f"}], "messages": [turn("user", words[0], False), *later]}
    keys = blocks_of(first)
    assert len(keys) > 8 and blocks_of(second)[: len(keys)] == keys


def test_prompts_of_text_and_of_tokens_have_blocks() -> None:
    text = "a" * (3 * BLOCK_CHARACTERS + 5)
    assert len(blocks_of({"prompt": text})) == 3
    assert blocks_of({"prompt": [text, "other"]}) == blocks_of({"prompt": text})
    ids = list(range(3 * BLOCK_TOKENS + 5))
    assert len(blocks_of({"prompt": ids})) == 3 and blocks_of({"prompt": [ids]}) == blocks_of({"prompt": ids})
    assert len(blocks_of({"input": text})) == 3
    for odd in ({}, {"prompt": 5}, {"messages": "x"}, {"prompt": []}, {"prompt": [[]]}, {"input": {"a": 1}}):
        assert isinstance(blocks_of(odd), list)


def test_the_longest_prefix_wins_until_its_replica_is_busy() -> None:
    near, far = Place(), Place()
    keys = list(range(100, 140))
    near.prefixes.add(keys)
    saved = len(keys) * BLOCK_TOKENS
    while near.open * OPEN_TOKENS < saved:
        assert chosen([far, near], keys) is near
        near.open += 1
    near.open += 1
    assert chosen([far, near], keys) is far


def test_without_prefixes_the_load_is_even() -> None:
    places = [Place() for _ in range(4)]
    for _ in range(40):
        chosen(places, []).open += 1
    assert {place.open for place in places} == {10}


def test_the_oldest_blocks_leave_first_and_the_tail_of_a_prefix_before_its_head() -> None:
    prefixes = Prefixes(capacity=6)
    prefixes.add([1, 2, 3])
    prefixes.add([4, 5, 6, 7])
    assert prefixes.match([4, 5, 6, 7]) == 4
    assert prefixes.match([1, 2, 3]) == 2


def test_other_salts_and_documents_have_other_blocks() -> None:
    body = {"messages": turns(1, random.Random(2))}
    bodies = [body, {**body, "cache_salt": "a"}, {**body, "cache_salt": "b"}, {**body, "documents": [{}]}]
    first = {blocks_of(one)[0] for one in bodies}
    assert len(first) == 4 and blocks_of(bodies[1]) == blocks_of({**bodies[1]})


def test_a_trace_of_conversations_finds_most_of_what_is_cached() -> None:
    """At least 80 % of the blocks that an endless single replica would have, with an even load."""
    rng = random.Random(1)
    places, endless = [Place(prefixes=Prefixes(2000)) for _ in range(3)], Prefixes()
    talks = [(turns(6, rng), 1) for _ in range(40)]
    open_: list[Place] = []
    hits = possible = 0
    served = {id(place): 0 for place in places}
    while talks:
        at = rng.randrange(min(12, len(talks)))  # a dozen users at a time
        messages, turn = talks.pop(at)
        keys = blocks_of({"messages": messages[: 2 * turn]})
        place = chosen(places, keys)
        hits += place.prefixes.match(keys)
        possible += endless.match(keys)
        place.prefixes.add(keys)
        endless.add(keys)
        place.open += 1
        served[id(place)] += 1
        open_.append(place)
        if len(open_) > 6:
            open_.pop(0).open -= 1
        if turn < 6:
            talks.insert(at, (messages, turn + 1))
    assert hits / possible >= 0.8
    assert min(served.values()) > 0.2 * sum(served.values())
