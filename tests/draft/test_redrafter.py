"""ReDrafter: the published layouts, the network against a naive float64 one, and beams as a tree."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import HIDDEN, V, save_head

from outrider import LLM, SamplingParams, draft
from outrider.checkpoints.heads import Head
from outrider.config import SpeculativeOptions
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, Budget, DraftTree
from outrider.draft.redrafter import Network, ReDrafter
from outrider.heads.base import LastState
from outrider.testing import check_tree, make_row, propose_tree

Tensors = dict[str, Tensor]
TEXT = [3, 1, 4, 1, 5]


def network(**given: Any) -> Network:
    """Random, with logits far enough apart that rounding swaps none."""
    torch.manual_seed(3)
    made = Network(HIDDEN, V, **given)
    made.lm_head[-1].weight.data.mul_(8.0)
    return made


# ---- a naive ReDrafter, from the description of the format: float64, one beam at a time


class Naive:
    def __init__(self, tensors: Tensors, embedding: Tensor, f: Tensor) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding, self.f = embedding.double(), f.double()
        self.blocks = sum(name.endswith("linear.weight") for name in tensors)

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        """log q after the pending token and these draft tokens."""
        t, silu = self.t, torch.nn.functional.silu
        s = torch.zeros_like(self.f)
        for token in path:
            e = self.embedding[token]
            s = (
                silu(t["rnn_w.weight"] @ e + t["rnn_u.weight"] @ s + t["rnn_u.bias"])
                if "rnn_u.weight" in t
                else e + s
            )
        y = torch.cat([self.f, s])
        if "input_proj.weight" in t:
            y = t["input_proj.weight"] @ y + t["input_proj.bias"]
        for i in range(self.blocks):
            y = y + silu(t[f"lm_head.{i}.linear.weight"] @ y + t[f"lm_head.{i}.linear.bias"])
        logits = t[f"lm_head.{self.blocks}.weight"] @ y
        fifty = sorted(range(len(logits)), key=lambda token: -logits[token])[:50]
        kept = torch.full_like(logits, float("-inf"))
        kept[fifty] = logits[fifty]
        return kept.log_softmax(-1)

    def beams(self, pending: int, width: int, levels: int) -> dict[tuple[int, ...], float]:
        """Every prefix that beam search keeps at some level, and the log of its probability."""
        beams, met = {(): 0.0}, {}
        for _ in range(levels):
            longer = {}
            for path, score in beams.items():
                for token, more in enumerate(self.log_probs((pending, *path)).tolist()):
                    longer[*path, token] = score + more
            beams = dict(sorted(longer.items(), key=lambda beam: -beam[1])[:width])
            met |= beams
        return met


def greedy(tokens: list[int]) -> Row:
    row = make_row(tokens, len(tokens) - 1)
    row.distribution = SamplingParams(temperature=0.0).distribution
    return row


def state(seed: int = 0) -> Tensor:
    return torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(seed))


def seen(drafter: ReDrafter, row: Row, f: Tensor) -> Row:
    drafter.last_states[row] = LastState(len(row.tokens) - 1, f)
    return row


def prefixes(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Path -> log of the product of confidences."""
    found: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 0.0)}
    for i, (token, parent, likely) in enumerate(zip(tree.tokens, tree.parents, tree.confidence)):
        path, score = found[parent]
        found[i] = (*path, token), score + math.log(likely)
    return dict(value for node, value in found.items() if node != ROOT)


def check(drafter: ReDrafter, tensors: Tensors, levels: int = 4) -> None:
    """The drafter's tree is what the naive beam search meets, with its probabilities."""
    naive = Naive(tensors, drafter.target.decoder.embed(range(V)), state()[0])
    tree = propose_tree(drafter, seen(drafter, greedy(TEXT), state()), levels)
    found, expected = prefixes(tree), naive.beams(TEXT[-1], drafter.options.beam_width, levels)
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(score, abs=1e-3)


# ---- layouts


def converted(name: str) -> str:
    """As TensorRT-LLM calls it; two blocks."""
    return "drafter." + name.replace("lm_head.2", "lm_head").replace("lm_head.0", "layers.0").replace(
        "lm_head.1", "layers.1"
    )


LAYOUTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "reference": ({}, lambda name: name, "model.safetensors"),
    "reference, bin": ({}, lambda name: name, "pytorch_model.bin"),
    "reference, pt": ({}, lambda name: name, "drafter.pt"),
    "one block": ({"layers": 1}, lambda name: name, "model.safetensors"),
    "no rnn": ({"rnn": False}, lambda name: name, "model.safetensors"),
    "narrow": ({"exit_dim": 96}, lambda name: name, "model.safetensors"),
    "no rnn, wide": ({"exit_dim": 160, "rnn": False}, lambda name: name, "pytorch_model.bin"),
    "training checkpoint": ({"exit_dim": 96}, lambda name: f"drafter.{name}", "pytorch_model.bin"),
    "wrapped": ({}, lambda name: f"module.drafter.{name}", "pytorch_model.bin"),
    "plural": (
        {"exit_dim": 96},
        lambda name: name.replace("lm_head", "lm_heads").replace("proj", "projs"),
        "model.safetensors",
    ),
    "converted": ({"exit_dim": 96}, converted, "rank0.safetensors"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_every_layout_equal_a_naive_network(layout: str, llm: LLM, tmp_path: Path) -> None:
    given, rename, file = LAYOUTS[layout]
    net = network(**given)
    tensors = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    stored = {rename(name): tensor for name, tensor in tensors.items()}
    if layout in ("training checkpoint", "converted"):  # the target lies beside it
        stored |= {
            "llm.lm_head.weight": torch.zeros(V, HIDDEN),
            "base_model.lm_head.weight": torch.zeros(V, HIDDEN),
        }
    folder = save_head(tmp_path / "head", net.config(), stored, file)
    assert draft.detect(folder) == "redrafter"
    check(ReDrafter(ReDrafter.Options(model=folder, beam_width=4, nodes=99), llm.engine.target), tensors)


@pytest.mark.parametrize("seed", range(6))
def test_beams_are_searched_among_the_fifty_best_tokens(seed: int, llm: LLM) -> None:
    """Flat logits: without the cut, scores of beams and so the surviving beams would differ."""
    torch.manual_seed(seed)
    net = Network(HIDDEN, V)
    net.lm_head[-1].weight.data.mul_(3.0)
    head = Head.of("flat", net.config(), net.state_dict())
    drafter = ReDrafter(ReDrafter.Options(beam_width=10, nodes=999), llm.engine.target, head)
    check(drafter, dict(net.state_dict()))


def test_more_beams_than_tokens_are_left(llm: LLM) -> None:
    """A first level of 64 beams finds 50 tokens, also at a temperature, and none if all are masked."""
    drafter = drafter_of(llm, beam_width=64, nodes=999)
    for temperature in (0.0, 0.8):
        row = seen(drafter, greedy(TEXT), state())
        row.distribution = SamplingParams(temperature=temperature).distribution
        tree = propose_tree(drafter, row, 1)
        assert len(tree.tokens) == 50
    others = sorted({*range(V)} - {*tree.tokens})
    prompt = {"prompt_token_ids": TEXT}
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=20, allowed_token_ids=others[:3], ignore_eos=True
    )
    llm.use(None)
    plain = llm.generate(prompt, params)[0].outputs[0].token_ids
    llm.engine.use(drafter, SpeculativeOptions.of({"method": "redrafter", "model": "unused"}))
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain


def test_numbered_names_need_their_config(llm: LLM, tmp_path: Path) -> None:
    net = network(rnn=False)
    stored = {name.replace("lm_head.", "0."): tensor for name, tensor in net.state_dict().items()}
    head = Head.of("numbered", net.config(), stored)
    assert draft.detect(save_head(tmp_path / "named", net.config(), stored)) == "redrafter"
    assert draft.detect(save_head(tmp_path / "bare", {}, stored)) != "redrafter"
    check(
        ReDrafter(ReDrafter.Options(beam_width=4, nodes=99), llm.engine.target, head), dict(net.state_dict())
    )


def test_heads_in_few_bits_are_near(llm: LLM) -> None:
    net = network()
    head = Head.of("head", net.config(), net.state_dict())
    many, few = (
        propose_tree(made, seen(made, greedy(TEXT), state()), 1)
        for made in (
            ReDrafter(ReDrafter.Options(quantization=bits), llm.engine.target, head)
            for bits in (None, "int8")
        )
    )
    assert many.tokens[0] == few.tokens[0] and many.confidence[0] == pytest.approx(few.confidence[0], rel=0.1)


@pytest.mark.parametrize(
    ("given", "extra"), [({}, 0), ({"exit_dim": 4096}, 4096 * 8192 + 4096), ({"rnn": False, "layers": 1}, 0)]
)
def test_the_size_is_that_of_the_format(given: dict[str, Any], extra: int) -> None:
    """For Vicuna 7B, in weights."""
    h, vocabulary = 4096, 32000
    with torch.device("meta"):
        made = Network(h, vocabulary, **given)
    width, layers = given.get("exit_dim", 2 * h), given.get("layers", 2)
    recurrent = 2 * h * h + h if given.get("rnn", True) else 0
    assert (
        sum(p.numel() for p in made.parameters())
        == extra + layers * (width * width + width) + vocabulary * width + recurrent
    )


# ---- the tree


def drafter_of(llm: LLM, net: Network | None = None, **options: Any) -> ReDrafter:
    net = net or network()
    return ReDrafter(
        ReDrafter.Options(**options), llm.engine.target, Head.of("head", net.config(), net.state_dict())
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_limit_keeps_the_likeliest_prefixes(temperature: float, llm: LLM) -> None:
    """Beams that cannot come back are dropped on the way, and nothing changes by it."""
    row = make_row(TEXT, len(TEXT) - 1)
    row.distribution = SamplingParams(temperature=temperature).distribution
    whole, small = (drafter_of(llm, beam_width=6, nodes=nodes) for nodes in (99, 7))
    every, some = (propose_tree(made, seen(made, row, state()), 4) for made in (whole, small))
    scores = prefixes(every)
    assert len(every.tokens) == 24 and len(some.tokens) == 7
    assert sorted(prefixes(some).values()) == pytest.approx(sorted(scores.values())[-7:])
    assert prefixes(some).keys() <= scores.keys()


def test_noise_ranks_the_beams(llm: LLM) -> None:
    """The first level at a temperature: the best of log q plus the noise of the row's next position."""
    from outrider.core.noise import gumbel, key_of

    row, drafter = make_row(TEXT, len(TEXT) - 1), drafter_of(llm, beam_width=5, nodes=99)
    row.distribution = SamplingParams(temperature=0.8).distribution
    logits = (
        Naive(dict(network().state_dict()), llm.engine.decoder.embed(range(V)), state()[0]).log_probs(
            (TEXT[-1],)
        )
        / 0.8
    )
    best = (logits + gumbel(key_of(row.seed, row.index, len(TEXT)), V)).topk(5).indices.tolist()
    assert propose_tree(drafter, seen(drafter, row, state()), 1).tokens == best


def test_rows_are_independent(llm: LLM) -> None:
    """Different budgets, a row without state and one without budget: each gets what it gets alone."""
    drafter = drafter_of(llm, beam_width=4, nodes=20)
    rows = [seen(drafter, greedy([7, 8, i]), state(i)) for i in range(5)]
    del drafter.last_states[rows[1]]
    budgets = [Budget(4, 16), Budget(4, 16), Budget(2, 5), Budget(0, 0), Budget(1, 4)]
    steps = [RowStep(row, 2, 1, budget=budget) for row, budget in zip(rows, budgets)]
    together = drafter.propose(Batch(steps)).trees
    for step, tree in zip(steps, together):
        assert tree == drafter.propose(Batch([step])).trees[0]
        check_tree(tree, step.budget)
    assert [bool(tree.tokens) for tree in together] == [True, False, True, False, True]
    stale = drafter.propose(Batch([RowStep(rows[0], 1, 1, budget=budgets[0])])).trees[0]
    assert stale == EMPTY_TREE


def test_sampled_drafts_carry_their_distributions(llm: LLM) -> None:
    """Every q is the head's own after the path; a small tree still reaches its depth."""
    drafter = drafter_of(llm, beam_width=4, nodes=8)
    drafter.target = replace(drafter.target, needs_probs=True)
    row = seen(drafter, greedy(TEXT), state())
    row.distribution = SamplingParams(temperature=0.7).distribution
    tree = propose_tree(drafter, row, 4)
    naive = Naive(dict(network().state_dict()), llm.engine.decoder.embed(range(V)), state()[0])
    paths = dict(zip(range(len(tree.tokens)), prefixes(tree)))
    assert len(tree.tokens) == 8 and max(map(len, paths.values())) == 4
    for node, parent in enumerate(tree.parents):
        distribution = (
            naive.log_probs((TEXT[-1], *(paths[parent] if parent != ROOT else ()))) / 0.7
        ).softmax(-1)
        drawn = tree.distribution(node)
        assert drawn is not None and (drawn - distribution).abs().max() < 1e-4
