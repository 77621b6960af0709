"""ReDrafter: the published layouts, the network against a naive float64 one, beams as a tree, and what it learns."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import drive, settled, tiny_prompts
from rows import guess, make_row, proper
from torch import Tensor
from toys import HIDDEN, V, acceptance, samples, save_head, teach, toy_target

from outrider import LLM, ConfigError, ModelError, SamplingParams, draft
from outrider.draft.redrafter import ReDrafter
from outrider.draft.redrafter.network import Network
from outrider.heads.files import Head
from outrider.heads.sample import Outer
from outrider.types import NOTHING, ROOT, Batch, Budget, Guesses, Row

Tensors = dict[str, Tensor]
TEXT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    return LLM(target, dtype="float32")


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
        """log q after the pending token and these guesses."""
        t, silu = self.t, torch.nn.functional.silu
        s = torch.zeros_like(self.f)
        for token in path:
            e = self.embedding[token]
            s = silu(t["rnn_w.weight"] @ e + t["rnn_u.weight"] @ s + t["rnn_u.bias"]) if "rnn_u.weight" in t else e + s
        y = torch.cat([self.f, s])
        if "input_proj.weight" in t:
            y = t["input_proj.weight"] @ y + t["input_proj.bias"]
        for i in range(self.blocks):
            y = y + silu(t[f"lm_head.{i}.linear.weight"] @ y + t[f"lm_head.{i}.linear.bias"])
        return (t[f"lm_head.{self.blocks}.weight"] @ y).log_softmax(-1)

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


def state(seed: int = 0) -> Tensor:
    return torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(seed))


def seen(drafter: ReDrafter, row: Row, f: Tensor) -> Row:
    drafter.last[row] = len(row.tokens) - 1, f
    return row


def prefixes(tree: Guesses) -> dict[tuple[int, ...], float]:
    """Path -> log of the product of confidences."""
    found: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 0.0)}
    for i, (token, parent, likely) in enumerate(zip(tree.tokens, tree.parents, tree.confidence)):
        path, score = found[parent]
        found[i] = (*path, token), score + math.log(likely)
    return dict(value for node, value in found.items() if node != ROOT)


def check(drafter: ReDrafter, tensors: Tensors, levels: int = 4) -> None:
    """The drafter's tree is what the naive beam search meets, with its probabilities."""
    naive = Naive(tensors, drafter.target.decoder.embed(range(V)), state()[0])
    tree = guess(drafter, seen(drafter, make_row(TEXT), state()), levels)
    found, expected = prefixes(tree), naive.beams(TEXT[-1], drafter.options.beam_width, levels)
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(score, abs=1e-3)


# ---- layouts


def converted(name: str) -> str:
    """As TensorRT-LLM calls it; two blocks."""
    return "drafter." + name.replace("lm_head.2", "lm_head").replace("lm_head.0", "layers.0").replace("lm_head.1", "layers.1")


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
    "plural": ({"exit_dim": 96}, lambda name: name.replace("lm_head", "lm_heads").replace("proj", "projs"), "model.safetensors"),
    "converted": ({"exit_dim": 96}, converted, "rank0.safetensors"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_what_a_naive_network_says(layout: str, llm: LLM, tmp_path: Path) -> None:
    given, rename, file = LAYOUTS[layout]
    net = network(**given)
    tensors = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    stored = {rename(name): tensor for name, tensor in tensors.items()}
    if layout in ("training checkpoint", "converted"):  # the target lies beside it
        stored |= {"llm.lm_head.weight": torch.zeros(V, HIDDEN), "base_model.lm_head.weight": torch.zeros(V, HIDDEN)}
    folder = save_head(tmp_path / "head", net.config(), stored, file)
    assert draft.detect(folder) == "redrafter"
    check(ReDrafter(ReDrafter.Options(model=folder, beam_width=4, nodes=99), llm.engine.target), tensors)


def test_numbered_names_need_their_config(llm: LLM, tmp_path: Path) -> None:
    net = network(rnn=False)
    stored = {name.replace("lm_head.", "0."): tensor for name, tensor in net.state_dict().items()}
    head = Head.of("numbered", net.config(), stored)
    assert ReDrafter.claims(head) == 2
    assert ReDrafter.claims(Head.of("numbered", {}, stored)) == 0
    check(ReDrafter(ReDrafter.Options(beam_width=4, nodes=99), llm.engine.target, head), dict(net.state_dict()))


def test_heads_in_few_bits_are_near(llm: LLM) -> None:
    net = network()
    head = Head.of("head", net.config(), net.state_dict())
    many, few = (
        guess(made, seen(made, make_row(TEXT), state()), 1)
        for made in (ReDrafter(ReDrafter.Options(quantization=bits), llm.engine.target, head) for bits in (None, "int8"))
    )
    assert many.tokens[0] == few.tokens[0] and many.confidence[0] == pytest.approx(few.confidence[0], rel=0.1)


@pytest.mark.parametrize(("given", "extra"), [({}, 0), ({"exit_dim": 4096}, 4096 * 8192 + 4096), ({"rnn": False, "layers": 1}, 0)])
def test_the_size_is_that_of_the_format(given: dict[str, Any], extra: int) -> None:
    """For Vicuna 7B, in weights."""
    h, vocabulary = 4096, 32000
    with torch.device("meta"):
        made = Network(h, vocabulary, **given)
    width, layers = given.get("exit_dim", 2 * h), given.get("layers", 2)
    recurrent = 2 * h * h + h if given.get("rnn", True) else 0
    assert sum(p.numel() for p in made.parameters()) == extra + layers * (width * width + width) + vocabulary * width + recurrent


# ---- the tree


def drafter_of(llm: LLM, net: Network | None = None, **options: Any) -> ReDrafter:
    net = net or network()
    return ReDrafter(ReDrafter.Options(**options), llm.engine.target, Head.of("head", net.config(), net.state_dict()))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_limit_keeps_the_likeliest_prefixes(temperature: float, llm: LLM) -> None:
    """Beams that cannot come back are dropped on the way, and nothing changes by it."""
    row = make_row(TEXT)
    row.law = SamplingParams(temperature=temperature).law
    whole, small = (drafter_of(llm, beam_width=6, nodes=nodes) for nodes in (99, 7))
    every, some = (guess(made, seen(made, row, state()), 4) for made in (whole, small))
    scores = prefixes(every)
    assert len(every.tokens) == 24 and len(some.tokens) == 7
    assert sorted(prefixes(some).values()) == pytest.approx(sorted(scores.values())[-7:])
    assert prefixes(some).keys() <= scores.keys()


def test_noise_ranks_the_beams(llm: LLM) -> None:
    """The first level at a temperature: the best of log q plus the noise of the row's next position."""
    from outrider.sampling.noise import gumbel, key_of

    row, drafter = make_row(TEXT), drafter_of(llm, beam_width=5, nodes=99)
    row.law = SamplingParams(temperature=0.8).law
    logits = Naive(dict(network().state_dict()), llm.engine.decoder.embed(range(V)), state()[0]).log_probs((TEXT[-1],)) / 0.8
    best = (logits + gumbel(key_of(row.seed, row.index, len(TEXT)), V)).topk(5).indices.tolist()
    assert guess(drafter, seen(drafter, row, state()), 1).tokens == best


def test_rows_do_not_see_each_other(llm: LLM) -> None:
    """Different budgets, a row without a state, one that may not guess: each gets what it gets alone."""
    drafter = drafter_of(llm, beam_width=4, nodes=20)
    rows = [seen(drafter, make_row([7, 8, i]), state(i)) for i in range(5)]
    del drafter.last[rows[1]]
    budgets = [Budget(4, 16), Budget(4, 16), Budget(2, 5), Budget(0, 0), Budget(1, 4)]
    together = drafter.propose(Batch(rows, [2] * 5, [1] * 5, [True] * 5), budgets).trees
    for row, budget, tree in zip(rows, budgets, together):
        assert tree == drafter.propose(Batch([row], [2], [1], [True]), [budget]).trees[0]
        proper(tree, budget)
    assert [bool(tree.tokens) for tree in together] == [True, False, True, False, True]
    stale = drafter.propose(Batch(rows[:1], [1], [1], [True]), budgets[:1]).trees[0]
    assert stale == NOTHING


def test_drawn_guesses_say_their_laws(llm: LLM) -> None:
    """Every law is the head's own behind the path; a small tree still reaches its levels."""
    drafter = drafter_of(llm, beam_width=4, nodes=8)
    drafter.drawn = True
    row = seen(drafter, make_row(TEXT), state())
    row.law, row.table = SamplingParams(temperature=0.7).law, array("i")  # type: ignore[assignment]
    tree = guess(drafter, row, 4)
    naive = Naive(dict(network().state_dict()), llm.engine.decoder.embed(range(V)), state()[0])
    paths = dict(zip(range(len(tree.tokens)), prefixes(tree)))
    assert len(tree.tokens) == 8 and max(map(len, paths.values())) == 4
    for node, parent in enumerate(tree.parents):
        law = (naive.log_probs((TEXT[-1], *(paths[parent] if parent != ROOT else ()))) / 0.7).softmax(-1)
        drawn = tree.law(node)
        assert drawn is not None and (drawn - law).abs().max() < 1e-4


# ---- learning, and the engine


@pytest.fixture(scope="module")
def learned(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    net = Network(HIDDEN, V, layers=1)
    torch.manual_seed(0)
    teach(net, net.loss, samples(llm, net_states()), Outer.of(llm.engine.decoder), steps=200)
    return save_head(tmp_path_factory.mktemp("learned"), net.config(), dict(net.state_dict()))


def net_states() -> tuple[int, ...]:
    return ReDrafter.needs.states


def test_what_it_learned_is_accepted(target: str, learned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 4 far above chance, which is 1/512; trees give more tokens a step; and one token too early nothing fits."""
    chain = {"model": learned, "beam_width": 1, "num_speculative_tokens": 4}
    right = acceptance(target, chain)
    assert right > 0.3
    tree = {"model": learned, "beam_width": 6, "nodes": 24, "num_speculative_tokens": 4}
    assert acceptance(target, tree) * 24 > right * 4
    from outrider.draft.redrafter.beams import Beams

    said = Beams.said.fget  # type: ignore[attr-defined]

    def early(self: Beams) -> list[int]:
        return [self.row.tokens[-2]] if self.tree.frontier == [ROOT] else said(self)

    monkeypatch.setattr(Beams, "said", property(early))
    assert acceptance(target, chain) < 0.3 * right


def test_the_state_is_that_of_the_last_computed_token(target: str, learned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = acceptance(target, {"model": learned, "beam_width": 1})
    observe = ReDrafter.observe

    def late(self: ReDrafter, commit: Any) -> None:
        before = dict(self.last)
        observe(self, commit)
        for row, (end, _) in self.last.items():
            if row in before:
                self.last[row] = end, before[row][1]

    monkeypatch.setattr(ReDrafter, "observe", late)
    assert acceptance(target, {"model": learned, "beam_width": 1}) < 0.8 * right


@pytest.mark.parametrize("family", ["Phi", "OPT", "Gemma2"])
def test_targets_that_transformers_runs(family: str, checkpoint: Any) -> None:
    tied = {"hidden_activation": "gelu_pytorch_tanh"} if family == "Gemma2" else {}
    llm = LLM(str(checkpoint(family, **tied)), max_num_seqs=3)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    prompts = tiny_prompts(4)
    expected = [out.outputs[0].token_ids for out in drive(llm, prompts, params)]
    llm.engine.use(ReDrafter.example(llm.engine.target), llm_options())
    got = drive(llm, prompts, params)
    settled(llm)
    assert [out.outputs[0].token_ids for out in got] == expected
    assert sum(out.outputs[0].speculation.drafted for out in got) > 0


def llm_options() -> Any:
    from outrider.config import SpeculativeOptions

    return SpeculativeOptions.of({"method": "redrafter", "model": "given"})


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beam_width": 0}, "beam_width must be a whole number in 1 … 64, got 0"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_length": 1}, "beam_length must be a whole number in 2"),
        ({"nodes": True}, "nodes must be a whole number"),
        ({"quantization": "int3"}, "quantization of the head"),
        ({"beam_widht": 3}, "Did you mean 'beam_width'"),
        ({}, "needs 'model'"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], says: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=says):
        llm.use({"method": "redrafter", **options})


def test_beam_length_counts_the_token_it_begins_with(llm: LLM, learned: str) -> None:
    llm.use({"method": "redrafter", "model": learned, "beam_length": 3, "beam_width": 2})
    assert llm.engine.controller.most == 2 and llm.engine.drafter.size(2) == 4
    llm.use({"model": learned, "beam_length": 3, "num_speculative_tokens": 6})
    assert llm.engine.controller.most == 6 and llm.engine.drafter.size(6) == 8
    with pytest.raises(ConfigError, match="judges chains"):
        llm.use({"model": learned, "verification": "block"})
    llm.use({"model": learned, "verification": "block", "beam_width": 1})
    llm.use(None)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop("rnn_u.bias"), "no tensor 'rnn_u.bias'"),
        (lambda t: t.pop("rnn_u.weight"), "no tensor 'rnn_u.weight'"),
        (lambda t: (t.pop("rnn_u.weight"), t.pop("rnn_u.bias"), t.pop("rnn_w.weight")), "no tensor 'rnn_u.bias'"),
        (lambda t: t.pop("lm_head.0.linear.bias"), "no tensor 'lm_head.0.linear.bias'"),
        (lambda t: t.pop("lm_head.2.weight"), "no tensor 'lm_head.2.weight'"),
        (lambda t: t.update({"lm_head.2.weight": torch.zeros(V, 64)}), r"is \(512, 64\), and \(512, 128\) is needed"),
        (lambda t: t.update({"rnn_w.weight": torch.zeros(64, 64, dtype=torch.int32)}), "torch.int32"),
    ],
)
def test_damaged_heads_are_refused(damage: Any, says: str, llm: LLM, tmp_path: Path) -> None:
    net = network()
    tensors = dict(net.state_dict())
    damage(tensors)
    folder = save_head(tmp_path / "head", net.config(), tensors)
    with pytest.raises(ModelError, match=says):
        llm.use({"method": "redrafter", "model": folder})


@pytest.mark.parametrize("given", [{"hidden": 32}, {"vocabulary": 500}, {"hidden": 32, "rnn": False}])
def test_a_head_for_another_target_is_refused(given: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    net = Network(**{"hidden": HIDDEN, "vocabulary": V, **given})
    folder = save_head(tmp_path / "head", net.config(), dict(net.state_dict()))
    with pytest.raises(ModelError, match=r"does not fit the target: its .* is \(.*\), and \(.*\) is needed"):
        llm.use({"model": folder})


def test_a_truncated_file_is_refused(llm: LLM, learned: str, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        whole = (Path(learned) / name).read_bytes()
        (folder / name).write_bytes(whole if name == "config.json" else whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt or truncated"):
        llm.use({"method": "redrafter", "model": str(folder)})
