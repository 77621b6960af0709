"""The built-in model as it loads by default: tokens, logits and K/V of plain decoding, bit for bit.

Each of 96 prompts runs in one of 16 modes, in rotation, with 128 new tokens: 4 drafters, greedy or sampled, 1
or 8 seats. Plain decoding runs eight prompts at a time; one test shows that this equals one at a time.

The portable kernels round without instructions for it, at thirty times the cost: there 48 prompts, 64 tokens.

With `-m full` each of 200 prompts runs in every mode (3,200 texts, 409,600 tokens), and plain decoding runs
each alone. About twelve minutes on two cores.
"""

from __future__ import annotations

import itertools
import os
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import token_prompts
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.testing import KnownTexts, Scripts, check_idle

# prompts that run by default, and new tokens of each
SAMPLE, TOKENS = (48, 64) if os.environ.get("OUTRIDER_ISA") == "portable" else (96, 128)
TEMPLATES = (
    "{name} has {n} apples and buys {m} more. How many apples does {name} have?",
    "A ticket costs {n} dollars. How much do {m} tickets cost?",
    "A train leaves {city} at {n} o'clock and needs {m} hours. When does it arrive?",
    "There are {n} rows of chairs with {m} chairs each. How many chairs are there?",
    "{name} reads {m} pages a day. How long does a book of {n}0 pages last?",
    "What is {n} plus {m}, and what is {n} times {m}?",
    "Count from {m} to {n}.",
    "Divide {n}{m} marbles among {m} children. How many are left over?",
    "Translate English to German: {name} would like to live in {city}.",
    "Translate English to German: We saw {m} birds and {n} fish at the lake.",
    "Translate English to German: Where is the nearest {thing}?",
    "Translate English to French: My {thing} is older than I am.",
    "Translate German to English: Ich habe gestern {n} Briefe geschrieben.",
    "Translate German to English: {name} wohnt seit {m} Jahren in {city}.",
    "What do you know about {city}?",
    "How do I get from {city} to the sea in {m} days?",
    "Describe a {thing} to somebody who has never seen one.",
    "Why would anybody need {n} {thing}s?",
    "Who was the first person to build a {thing}?",
    "Is it better to mend an old {thing} or to buy a new one?",
    "Hi, I am {name}. How are you today?",
    "I have lost my {thing} somewhere in {city}. What should I do?",
    "Tell me a short story about {name} and a {thing}.",
    "Write a poem of {m} lines about {city} in the rain.",
    "Give me {m} good reasons to get up early.",
    "Name {m} animals that live in the forest.",
    "List {n} words that rhyme with day.",
    "What should I cook for {m} guests on a cold evening?",
    "Write a Python function that adds {n} to every number in a list.",
    "Write a Python function that returns the {m} largest numbers of a list.",
    "Write a Python class for a {thing} with a name and a price.",
    "What does this code print? for i in range({m}): print(i * {n})",
    "Write the Python file tools/{thing}.py",
    "Summarize: {name} walked from {city} to the coast in {m} days. It rained for {n} hours. The {thing} was "
    "lost on the way, and found again by a farmer, who gave it back and asked for nothing.",
    "Summarize: The council of {city} met {m} times this year. It decided to build {n} houses, to plant "
    "trees along the river, and to keep the old {thing} in the museum.",
    "Answer from the context.\nContext: The {thing} in the hall of {city} is {n}0 years old and weighs {m} "
    "tons.\nQuestion: How old is it?",
    "Answer from the context.\nContext: {name} was born in {city} and has {m} sisters."
    "\nQuestion: Where was {name} born?",
    "Can a {thing} be dangerous?",
    "Explain in {m} sentences why the sky is blue.",
    "Repeat after me: {name}, {city}, {thing}, {n}, {m}, {name}, {city}, {thing}, {n}, {m}.",
)
NAMES = ("Anna", "Ben", "Maria", "Tom", "Lena")
CITIES = ("Berlin", "Oslo", "Lisbon", "Kyoto", "Cairo")
THINGS = ("clock", "bridge", "violin", "bicycle", "ladder")

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "draft_chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft_tree": {"method": "draft_model", "num_speculative_tokens": 4, "siblings": 3},
    "script_tree": {"method": "scripted", "num_speculative_tokens": 6, "nodes": 24},
}
SEATS = (1, 8)
MODES = list(itertools.product(DRAFTERS, SAMPLING, SEATS))


def wording(i: int) -> str:
    """Prompt i of 200: every template five times, with other numbers and names."""
    round = i // len(TEMPLATES)
    return TEMPLATES[i % len(TEMPLATES)].format(
        n=12 + 7 * (i % 9) + round,
        m=3 + (i + round) % 6,
        name=NAMES[(i + round) % 5],
        city=CITIES[(i + 2 * round) % 5],
        thing=THINGS[(i + 3 * round) % 5],
    )


@pytest.fixture(scope="module")
def engines() -> dict[int, LLM]:
    """One engine for each number of seats."""
    return {seats: LLM("builtin", max_num_seqs=seats) for seats in SEATS}


@pytest.fixture(scope="module")
def prompts(engines: dict[int, LLM]) -> list[list[int]]:
    template = engines[1].get_tokenizer().apply_chat_template
    texts = [wording(i) for i in range(200)]
    assert len(set(texts)) == 200
    return [
        template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]


def params_of(number: int, sampling: str) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number, **SAMPLING[sampling])


class Plain:
    """Plain decoding of prompts by number, so many at a time; remembered."""

    def __init__(self, prompts: list[list[int]], seats: int) -> None:
        self.llm = LLM("builtin", max_num_seqs=seats, enable_prefix_caching=False)
        self.prompts = prompts
        self.known: dict[tuple[int, str], list[int]] = {}
        self.truth = {sampling: KnownTexts() for sampling in SAMPLING}

    def __call__(self, numbers: Sequence[int], sampling: str) -> list[list[int]]:
        new = [i for i in numbers if (i, sampling) not in self.known]
        outputs = self.llm.generate(
            token_prompts([self.prompts[i] for i in new]), [params_of(i, sampling) for i in new]
        )
        for i, output in zip(new, outputs):
            self.known[i, sampling] = output.outputs[0].token_ids
            self.truth[sampling].learn(self.prompts[i], i, output.outputs)
        return [self.known[i, sampling] for i in numbers]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Plain:
    return Plain(prompts, seats=8)


def assert_plain_tokens(
    numbers: Sequence[int], drafter: str, sampling: str, llm: LLM, prompts: list[list[int]], plain: Plain
) -> None:
    """Compare the tokens of these prompts with plain decoding; many draft tokens must have been accepted."""
    expected = plain(numbers, sampling)
    assert all(len(tokens) == TOKENS for tokens in expected)
    config = DRAFTERS[drafter]
    if drafter == "script_tree":
        scripts = Scripts(plain.truth[sampling], llm.engine.target.vocabulary)
        config = {**config, "script": lambda row, budget: scripts.hidden(row, budget, 24)}
    llm.use(config)
    params = [params_of(i, sampling) for i in numbers]
    outputs = llm.generate(token_prompts([prompts[i] for i in numbers]), params)
    emitted = [output.outputs[0].token_ids for output in outputs]
    wrong = [i for i, ours, theirs in zip(numbers, emitted, expected) if ours != theirs]
    assert not wrong, f"the tokens of prompts {wrong} differ"
    accepted = sum(output.speculation.accepted for output in outputs)
    assert accepted > (80 if drafter == "script_tree" else 4) * len(numbers) * TOKENS / 128
    check_idle(llm)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", range(len(MODES)), ids=["-".join(map(str, mode)) for mode in MODES])
def test_tokens_are_those_of_plain_decoding(
    mode: int, engines: dict[int, LLM], prompts: list[list[int]], plain: Plain
) -> None:
    drafter, sampling, seats = MODES[mode]
    numbers = range(mode, SAMPLE, len(MODES))
    assert_plain_tokens(numbers, drafter, sampling, engines[seats], prompts, plain)


@pytest.fixture(scope="module")
def plain_alone(prompts: list[list[int]]) -> Plain:
    return Plain(prompts, seats=1)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES, ids=["-".join(map(str, mode)) for mode in MODES])
def test_tokens_of_every_prompt_in_every_mode(
    mode: tuple[str, str, int], engines: dict[int, LLM], prompts: list[list[int]], plain_alone: Plain
) -> None:
    drafter, sampling, seats = mode
    assert_plain_tokens(range(len(prompts)), drafter, sampling, engines[seats], prompts, plain_alone)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_plain_decoding_is_the_same_alone_and_among_eight(
    sampling: str, engines: dict[int, LLM], prompts: list[list[int]], plain: Plain
) -> None:
    numbers = range(0, SAMPLE, 12)
    expected = plain(numbers, sampling)
    llm = engines[1]
    llm.use(None)
    outputs = llm.generate(
        token_prompts([prompts[i] for i in numbers]), [params_of(i, sampling) for i in numbers]
    )
    assert [output.outputs[0].token_ids for output in outputs] == expected


# ---- the numbers behind the tokens


def chain(decoder: Decoder, pool: Pool, table: array[int], start: int, tokens: Sequence[int]) -> Tensor:
    return decoder.forward(StepInput.of_chain(table, start, tokens), pool)


def random_tree(
    rng: random.Random, nodes: int, vocabulary: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """(tokens, parents, path of nodes to each)."""
    tokens, parents, paths = [], [], []
    for i in range(nodes):
        parent = rng.choice([-1, i - 1, rng.randrange(-1, i)]) if i else -1
        tokens.append(rng.randrange(vocabulary))
        parents.append(parent)
        paths.append([*(paths[parent] if parent >= 0 else ()), i])
    return tokens, parents, paths


def compare(decoder: Decoder, tokens: Sequence[int], rng: random.Random) -> int:
    """A draft tree after `tokens`, verified in one forward, against decoding each path token by token.

    The tree's request lies in scattered slots, its prefix was computed in chunks, its last known tokens come
    with the tree, and another request runs beside it.  Residuals, logits and the K/V of a committed path are
    compared bit for bit.
    """
    size, length, vocabulary = len(tokens) + 80, len(tokens), decoder.spec.vocabulary
    nodes = rng.randint(8, 40)
    draft_tree, _, paths = random_tree(rng, nodes, vocabulary)

    table, scattered = array("i", range(size)), array("i", rng.sample(range(2 * size), size))
    beside = array("i", range(2 * size, 3 * size))
    alone, together = decoder.pool(size), decoder.pool(3 * size)

    roots = [chain(decoder, alone, table, i, tokens[i : i + 1]) for i in range(length)]  # plain decoding
    last = rng.randint(1, 6)  # known tokens that come with the tree
    at = 0
    while at < length - last:
        step = rng.randint(1, length - last - at)
        chain(decoder, together, scattered, at, tokens[at : at + step])
        at += step
    step_input = StepInput()
    company = rng.randint(0, 9)
    if company:
        step_input.chain(beside, 0, [rng.randrange(vocabulary) for _ in range(company)])
    step_input.chain(scattered, at, tokens[at:])
    for i, path in enumerate(paths):
        step_input.node(scattered, length, [int(scattered[length + node]) for node in path], draft_tree[i])
    x = decoder.forward(step_input.build(), together)
    rows = range(company, company + last + nodes)
    logits = decoder.logits(x, list(rows))

    singles: dict[int, Tensor] = {}
    inner = {node for path in paths for node in path[:-1]}
    for leaf in sorted(set(range(nodes)) - inner):  # one token at a time along each branch
        for depth, node in enumerate(paths[leaf]):
            singles[node] = chain(decoder, alone, table, length + depth, [draft_tree[node]])
    assert len(singles) == nodes
    expected = [*roots[at:], *(singles[node] for node in range(nodes))]
    assert torch.equal(torch.cat(expected), x[company:]), "residuals differ"
    for row, one in zip(logits, expected):
        assert torch.equal(decoder.logits(one, [0])[0], row), "logits differ"

    path = paths[leaf]  # what `alone` holds now: commit it here too
    together.move(
        [int(scattered[length + node]) for node in path],
        [int(scattered[length + depth]) for depth in range(len(path))],
    )
    whole = length + len(path)
    assert torch.equal(alone.data[:, :, table[:whole]], together.data[:, :, scattered[:whole]]), "K/V differs"
    assert torch.isfinite(logits).all() and logits.std() > 0
    return last + nodes


@pytest.mark.parametrize("number", [0, 33, 66, 99, 132, 165, 198])
def test_logits_are_bit_equal_in_chunks_batches_and_trees(
    number: int, engines: dict[int, LLM], prompts: list[list[int]], plain: Plain
) -> None:
    """The built-in model, on texts of its own."""
    text = [*prompts[number], *plain([number], "sampled")[0]]
    rng = random.Random(number)
    rows = sum(compare(engines[1].engine.decoder, text[: rng.randint(8, len(text))], rng) for _ in range(2))
    assert rows >= 18


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen3"])
def test_bits_of_small_models(model: str, request: pytest.FixtureRequest) -> None:
    """Random float32 models, one with a window of eight tokens, which is shorter than a path."""
    llm = LLM(request.getfixturevalue(model))
    rng = random.Random(1)
    for _ in range(15):
        compare(llm.engine.decoder, [rng.randrange(300) for _ in range(rng.randint(7, 90))], rng)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("builtin", "bfloat16"), ("builtin", "float32"), ("llama", "auto"), ("mistral", "auto")],
)
def test_bits_of_the_torch_kernels(
    model: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the engine's self-test promises bit-exactness for the torch kernels, they keep the promise."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    llm = LLM(model if model == "builtin" else request.getfixturevalue(model), dtype=dtype)
    if not llm.engine.exact:
        pytest.skip("not promised on this processor")
    rng, vocabulary = random.Random(2), llm.engine.decoder.spec.vocabulary
    for _ in range(4):
        compare(llm.engine.decoder, [rng.randrange(vocabulary) for _ in range(rng.randint(7, 90))], rng)


def test_bits_can_differ(
    engines: dict[int, LLM], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above notices one node that sees one wrong slot."""
    node, seen_one = StepInput.node, itertools.count()

    def spoilt(self: StepInput, table: array[int], seen: int, path: Sequence[int], token: int) -> None:
        wrong = [int(table[0]), *path[1:]] if len(path) > 1 and next(seen_one) == 0 else path
        node(self, table, seen, wrong, token)

    monkeypatch.setattr(StepInput, "node", spoilt)
    with pytest.raises(AssertionError, match="residuals differ"):
        compare(engines[1].engine.decoder, prompts[0], random.Random(0))
