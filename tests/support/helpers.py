"""What several test folders share: tiny random checkpoints with a tokenizer, drafter scripts, and a driver for ragged batches."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, CompletionOutput, RequestOutput, SamplingParams
from outrider.backends.cpu import structs
from outrider.backends.cpu.structs import LINEARS, VECTORS
from outrider.config import SpeculativeOptions
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget, DraftTree
from outrider.draft import method

VOCABULARY = 300
BOS, END, PAD = 0, 1, 2

# ---- tiny checkpoints


def tiny_tokenizer() -> Any:
    """300 byte-level tokens: three special ones, ASCII, some halves of UTF-8 characters, and pairs of common letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter = bytes_to_unicode()
    octets = [0x0A, *range(0x20, 0x7F), 0xC3, 0xE2, *range(0x80, 0x90)]
    words = ["<|bos|>", "<|end|>", "<|pad|>", *(letter[b] for b in octets)]
    merges = [(a, b) for a, b in itertools.product([letter[ord(c)] for c in " etaoinshrdlu"], repeat=2)]
    merges = merges[: VOCABULARY - len(words)]
    words += [a + b for a, b in merges]
    words += [f"<|spare {i}|>" for i in range(VOCABULARY - len(words))]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def tiny_checkpoint(
    folder: Path, family: str = "Llama", seed: int = 0, eos: Sequence[int] = (END,), **config: Any
) -> str:
    """Saves a random float32 model of the family.  Its weights are large, so that what it says depends on all it sees."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.25,
        "bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    settings = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    model = getattr(transformers, f"{family}ForCausalLM")(settings).to(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are 1 in a fresh model, where forgetting one would go unnoticed
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    return str(folder)


def tiny_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Ragged random prompts: ids, without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(5, VOCABULARY) for _ in range(rng.randint(3, longest))] for _ in range(count)]


# ---- putting a drafter to work


def install(llm: LLM, name: str, **options: Any) -> None:
    """The example drafter of a method, under the given keys of speculative_config that every method has."""
    speculation = SpeculativeOptions.of({"method": name, **options})
    llm.engine.use(method(name).example(llm.engine.target_for(speculation)), speculation)


def settled(llm: LLM) -> None:
    """Nothing is in flight, no slot is lost, and neither engine nor drafter remembers a row."""
    llm.engine.check()
    assert not llm.engine.busy
    assert not llm._loop.tickets, "a finished request is still known"
    for name, value in vars(llm.engine.drafter).items():
        if isinstance(value, Mapping):
            assert not any(isinstance(key, Row) for key in value), (
                f"the drafter remembers a finished row in {name!r}"
            )


@contextmanager
def ending_at(llms: Sequence[LLM], ids: Sequence[int]) -> Iterator[None]:
    """Lets these engines end their texts at other ids than the generation_config.json of their checkpoint says."""
    before = [llm.engine.ending for llm in llms]
    try:
        for llm in llms:
            llm.engine.ending = frozenset(ids)
        yield
    finally:
        for llm, old in zip(llms, before):
            llm.engine.ending = old


# ---- measuring


def in_memory(llm: LLM) -> int:
    """Bytes of all weights of a decoder; a tied head is the embedding."""
    decoder: Any = llm.engine.decoder
    linears = [
        decoder.embedding,
        decoder.lm_head,
        *(getattr(layer, name) for layer in decoder.layers for name in LINEARS),
    ]
    matrices = list({id(matrix): matrix for matrix in linears}.values())
    vectors = [decoder.norm, *(getattr(layer, name) for layer in decoder.layers for name in VECTORS)]
    biases = [matrix.bias for matrix in matrices]
    return sum(
        tensor.nbytes
        for tensor in [*(matrix.data for matrix in matrices), *vectors, *biases]
        if tensor is not None
    )


# ---- running


def said(outputs: Sequence[CompletionOutput]) -> list[tuple[list[int], str, str | None, int | str | None]]:
    """All of an output that speculation must not change."""
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in outputs]


def counted(outputs: Sequence[CompletionOutput]) -> None:
    """The figures that an output reports fit its tokens: every step emits what it accepted and one token more."""
    for output in outputs:
        stats = output.speculation
        assert stats.emitted == len(output.token_ids)
        assert stats.accepted == stats.emitted - stats.steps
        assert stats.accepted <= stats.drafted


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """One prompt alone."""
    return llm.generate({"prompt_token_ids": list(prompt)}, params)[0]


def prompts_of(ids: Sequence[Sequence[int]]) -> list[Mapping[str, Any]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in ids]


def drive(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    aborts: Mapping[int, int] | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[RequestOutput]:
    """Runs ragged traffic: two prompts at once, one more joins every second step, and prompt i is aborted as soon as its
    first sample has aborts[i] tokens."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests: list[Any] = []
    done: dict[int, RequestOutput] = {}
    for step in itertools.count():
        while len(requests) < min(len(prompts), 2 + step // 2):
            i = len(requests)
            requests.append(llm._request({"prompt_token_ids": list(prompts[i])}, each[i], streaming=False))
            llm._admit(requests[-1:])
        if len(done) == len(prompts):
            return [done[i] for i in range(len(prompts))]
        llm.engine.step()
        llm.engine.check()
        if on_step:
            on_step()
        for i, request in enumerate(requests):
            if i not in done and (
                request.finished or (aborts and len(request.rows[0].output) >= aborts.get(i, 1 << 30))
            ):
                done[i] = llm._leave(request)
    raise AssertionError


# ---- scripts: trees around a known continuation


class Truth:
    """What plain decoding said, by (prompt, seed, sample): scripts look the future up here."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    def learn(self, prompt: Sequence[int], seed: int, outputs: Sequence[CompletionOutput]) -> None:
        for output in outputs:
            self.known[tuple(prompt), seed, output.index] = [*prompt, *output.token_ids]

    def ahead(self, row: Row, count: int) -> list[int]:
        """The next tokens of the row, as far as they are known."""
        whole = self.known.get((tuple(row.tokens[: row.prompt]), row.seed, row.index), [])
        at = len(row.tokens)
        return whole[at : at + count] if whole[:at] == row.tokens else []


Script = Callable[[Row, Budget], DraftTree]


def _guesses(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(tokens, parents, [0.5] * len(tokens))


def _dice(row: Row) -> random.Random:
    return random.Random(len(row.tokens) * 31 + row.index)


class Scripts:
    """Adversarial trees over a vocabulary, each a Script.  The right path, where there is one, comes from `truth`."""

    def __init__(self, truth: Truth, vocabulary: int = VOCABULARY) -> None:
        self.truth, self.vocabulary = truth, vocabulary

    def right(self, row: Row, budget: Budget) -> DraftTree:
        """A chain that is all right."""
        ahead = self.truth.ahead(row, budget.depth)
        return _guesses(ahead, list(range(-1, len(ahead) - 1)))

    def wrong(self, row: Row, budget: Budget) -> DraftTree:
        """A tree with two children a node, all of them wrong at their depth."""
        ahead = self.truth.ahead(row, budget.depth + 1) or [0]
        parents = [(i - 2) // 2 if i >= 2 else -1 for i in range(min(14, budget.nodes))]
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        tokens = [(ahead[min(d, len(ahead) - 1)] + 1 + i) % self.vocabulary for i, d in enumerate(depths)]
        return _guesses(tokens, parents)

    def wide(self, row: Row, budget: Budget) -> DraftTree:
        """24 siblings at the root, the right one somewhere among them, then three below each."""
        random_streams, ahead = _dice(row), self.truth.ahead(row, 2)
        top = random_streams.sample(range(self.vocabulary), 24)
        top = top if set(ahead[:1]) <= set(top) else [*top[:11], ahead[0], *top[12:]]
        tokens, parents = list(top), [-1] * len(top)
        for i in range(len(top)):
            below = [*random_streams.sample(range(self.vocabulary), 2), *ahead[1:]]
            random_streams.shuffle(below)
            tokens += below
            parents += [i] * len(below)
        return _guesses(tokens, parents)

    def deep(self, row: Row, budget: Budget) -> DraftTree:
        """One chain as deep as the budget: right for five tokens, wrong at the sixth, then right again and of no use."""
        ahead = self.truth.ahead(row, budget.depth)
        tokens = [(t + 1) % self.vocabulary if i == 5 else t for i, t in enumerate(ahead)]
        return _guesses(tokens, list(range(-1, len(tokens) - 1)))

    def hidden(self, row: Row, budget: Budget, nodes: int = 40) -> DraftTree:
        """The right path in a bush grown at random: wrong nodes carry right tokens, and siblings lie between the right ones."""
        random_streams, ahead = _dice(row), self.truth.ahead(row, budget.depth)
        tokens: list[int] = []
        parents: list[int] = []
        tip, reached = -1, 0
        while len(tokens) < nodes:
            if reached < len(ahead) and random_streams.random() < 2.0 * len(ahead) / nodes:
                parent, token, right = tip, ahead[reached], True
            else:
                parent, right = random_streams.randrange(-1, len(tokens)), False
                token = (
                    random_streams.choice(ahead)
                    if ahead and random_streams.random() < 0.5
                    else random_streams.randrange(self.vocabulary)
                )
            if (parent, token) in set(zip(parents, tokens)):
                if not right:
                    continue
                tip, reached = (
                    next(i for i, pair in enumerate(zip(parents, tokens)) if pair == (parent, token)),
                    reached + 1,
                )
                continue
            tokens.append(token)
            parents.append(parent)
            if right:
                tip, reached = len(tokens) - 1, reached + 1
        return _guesses(tokens, parents)

    def huge(self, row: Row, budget: Budget) -> DraftTree:
        """The same with 100 nodes: more than one machine word of ancestors."""
        return self.hidden(row, budget, 100)

    def messy(self, row: Row, budget: Budget) -> DraftTree:
        """The right chain among repeated siblings, ids that do not exist and parents that come too late: all to be cleaned away."""
        ahead = self.truth.ahead(row, budget.depth)
        tokens, parents, tip = [-5, self.vocabulary, 7, 7], [-1, -1, 0, 90], -1
        for token in ahead:
            tokens += [token, token, self.vocabulary + 3, (token + 1) % self.vocabulary]
            parents += [tip, tip, tip, tip]
            tip = len(tokens) - 4
        return _guesses(tokens, parents)


def walk(step_input: StepInput, table: array[int], row: int) -> list[int]:
    """The slots that the C kernels visit for one row of a built step, read at the addresses that they get."""
    rows = structs.view(step_input).rows
    assert (c_void_p * step_input.length).from_address(rows.tables)[row] == table.buffer_info()[0]
    context, depth = ((c_int64 * step_input.length).from_address(at)[row] for at in (rows.seen, rows.depths))
    paths = (c_int32 * (step_input.length * rows.path)).from_address(rows.paths or 0)
    slots = [*table[:context], *paths[row * rows.path : row * rows.path + depth]]
    assert slots == step_input.key_slots(row)
    return slots


def requests_of(step_input: StepInput) -> list[tuple[array[int], int, int]]:
    """(slot table, first row, rows) of every request of a step."""
    bounds = zip(step_input.slot_tables, step_input.query_start, step_input.query_start[1:])
    return [(table, first, end - first) for table, first, end in bounds]


# ---- LoRA adapters


def write_adapter(
    folder: Path,
    model: str,
    seed: int = 0,
    projections: str = "q k v o gate up down",
    binary: bool = False,
    **config: Any,
) -> dict[str, tuple[Any, Any]]:
    """Saves a random adapter for a tiny checkpoint as PEFT does; module name -> (A, B)."""
    import re

    from safetensors.torch import load_file, save_file

    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "base_model_name_or_path": model,
        **config,
    }
    torch.manual_seed(seed)
    matrices: dict[str, tuple[Any, Any]] = {}
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(f".{projection}_proj" for projection in projections.split())):
            patterns = settings.get("rank_pattern", {}).items()
            rank = next(
                (rank for pattern, rank in patterns if re.search(rf"(^|\.)({pattern})$", module)),
                settings["r"],
            )
            outputs, inputs = weight.shape
            matrices[module] = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) * 0.25
    tensors = {
        f"base_model.model.{m}.lora_{x}.weight": t for m, pair in matrices.items() for x, t in zip("AB", pair)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")
    return matrices
