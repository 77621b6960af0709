"""Block-parallel heads: published files load as they are, and in the engine a block says what a naive one in float64 says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from toys import HIDDEN, V, acceptance, samples, save_head, teach, toy_target

from outrider import LLM, SamplingParams
from outrider.draft import detect
from outrider.draft.dflash import DFlash
from outrider.draft.dflash.layouts import exported, named, read, spread
from outrider.draft.dflash.network import Network, Shape
from outrider.errors import ConfigError, ModelError
from outrider.heads import sample
from outrider.heads.files import Head
from outrider.heads.sample import Outer
from outrider.types import Batch

HEADS, KV, D, INNER, EPS, THETA, TAPS, BLOCK, MASK, WIDE = 4, 2, 24, 96, 1e-5, 5e5, (2, 4, 8), 6, 500, torch.float64
IDS = sorted(random.Random(5).sample(range(V), V // 4))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=40)


# ---- files


def tensors(layers: int = 2, taps: int = len(TAPS), bias: bool = False) -> dict[str, Tensor]:
    """The published names and shapes."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(layers):
        at = f"layers.{i}"
        for name, rows, inputs in (("q", HEADS * D, HIDDEN), ("k", KV * D, HIDDEN), ("v", KV * D, HIDDEN), ("o", HIDDEN, HEADS * D)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, inputs)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {name: torch.randn(shape) * 0.15 + (len(shape) == 1 and "norm" in name) for name, shape in shapes.items()}


SIZES = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": V,
}  # fmt: skip


def speculators(sizes: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    base = {"speculators_model_type": "dflash", "block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(TAPS)}
    return {**base, "transformer_layer_config": {**SIZES, **(sizes or {})}, **given}


def zlab(inner: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    own = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS], **(inner or {})}
    return {**SIZES, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": own, **given}


class Case(NamedTuple):
    """windows, causal: what its layers see."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    windows: tuple[int, ...] = (0, 0)
    causal: tuple[bool, ...] = (False, False)


def part(w: dict[str, Tensor], offset: bool, t2d: bool) -> dict[str, Tensor]:
    """The same with a quarter of the vocabulary."""
    torch.manual_seed(9)
    ids = torch.tensor(IDS)
    more = {"lm_head.weight": torch.randn(len(IDS), HIDDEN) * 0.3, "d2t": ids - torch.arange(len(IDS)) if offset else ids}
    return {**w, **more, **({"t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)} if t2d else {})}


def cases() -> dict[str, Case]:
    w, sliding = tensors(), {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    both = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    own = {"embed_tokens.weight": torch.randn(V, HIDDEN) * 0.1, "lm_head.weight": torch.randn(V, HIDDEN) * 0.3}
    return {
        "speculators": Case(speculators(), {**w, "verifier_norm.weight": torch.ones(HIDDEN)}),
        "speculators, offsets": Case(speculators(draft_vocab_size=len(IDS)), part(w, True, True)),
        "speculators, ids": Case(speculators(), part(w, False, False), "pytorch_model.bin"),
        "speculators, window": Case(speculators(both, sliding_window_non_causal=False), w, windows=(5, 5), causal=(True, True)),
        "speculators, window both ways": Case(speculators(sliding, sliding_window_non_causal=True), w, windows=(5, 0)),
        "speculators, from the anchor": Case(speculators(sample_from_anchor=True), w),
        "z-lab": Case(zlab(), w, "pytorch_model.bin"),
        "z-lab, as vLLM has it": Case(zlab(), {f"model.{name}": tensor for name, tensor in w.items()}),
        "z-lab, window": Case(zlab(**sliding), w, windows=(5, 0), causal=(True, False)),
        "z-lab, one way": Case(zlab({"causal": True}), w, causal=(True, True)),
        "z-lab, MiMo's window": Case(zlab({"causal": False, "use_swa": True, "swa_window_size": 4}), w, windows=(4, 4)),
        "its own ends, biases": Case(zlab(attention_bias=True), {**tensors(bias=True), **own}),
    }  # fmt: skip


# ---- the naive block


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def turned(x: Tensor, t: int) -> Tensor:
    """One head [D] at position t, halves paired."""
    angle = torch.tensor([t / THETA ** (2 * i / D) for i in range(D // 2)], dtype=WIDE)
    a, b = x[: D // 2], x[D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def naive(case: Case, outer: Outer, taps: Tensor, anchor: int, count: int) -> Tensor:
    """Logits [count, Vd] of a block behind taps [T, 3 * hidden]: row by row, head by head."""
    w = {name.removeprefix("model."): tensor.to(WIDE) for name, tensor in case.tensors.items()}
    embedding, head = w.get("embed_tokens.weight", outer.embedding.to(WIDE)), w.get("lm_head.weight", outer.lm_head.to(WIDE))
    context, end = norm(taps.to(WIDE) @ w["fc.weight"].T, w["hidden_norm.weight"]), len(taps)
    x = embedding[[anchor, *[MASK] * (count - 1)]]
    for i, (window, causal) in enumerate(zip(case.windows, case.causal)):
        at = f"layers.{i}.self_attn"

        def project(name: str, u: Tensor, at: str = at) -> Tensor:
            return u @ w[f"{at}.{name}_proj.weight"].T + w.get(f"{at}.{name}_proj.bias", torch.zeros((), dtype=WIDE))

        u = norm(x, w[f"layers.{i}.input_layernorm.weight"])
        q = project("q", u)
        k, v = (torch.cat([project(name, context), project(name, u)]) for name in "kv")
        rows = []
        for b in range(count):
            p = end + b
            sees = [s for s in range(end + count) if (not window or s > p - window) and (s < end or not causal or s <= p)]
            parts = []
            for h in range(HEADS):
                g = h // (HEADS // KV)
                mine = turned(norm(q[b, h * D : (h + 1) * D], w[f"{at}.q_norm.weight"]), p)
                keys = [turned(norm(k[s, g * D : (g + 1) * D], w[f"{at}.k_norm.weight"]), s) for s in sees]
                weights = torch.stack([mine @ key / math.sqrt(D) for key in keys]).softmax(0)
                parts.append(weights @ v[sees, g * D : (g + 1) * D])
            rows.append(torch.cat(parts))
        x = x + project("o", torch.stack(rows))
        y = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate = y @ w[f"layers.{i}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ head.T


class Said(NamedTuple):
    """One block of one row in the engine: the text that was known, and the logits [levels, Vd]."""

    known: list[int]
    logits: Tensor


@contextmanager
def overheard(drafter: DFlash) -> Iterator[list[Said]]:
    found: list[Said] = []
    look = drafter.look

    def listening(batch: Batch, rows: Sequence[int], levels: Sequence[int]) -> Tensor:
        logits = look(batch, rows, levels)
        found.extend(Said(list(batch.rows[r].tokens), part.clone()) for r, part in zip(rows, logits.split(list(levels))))
        return logits

    drafter.look = listening  # type: ignore[method-assign]
    yield found


def close(got: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(got.to(WIDE), expected, atol=2e-4))


def check(llm: LLM, case: Case, blocks: Sequence[Said]) -> None:
    """Each block against the naive one, on the states that the target has when it reads the text alone."""
    outer, from_anchor = Outer.of(llm.engine.decoder), case.config.get("sample_from_anchor", False)
    for known, logits in blocks:
        states = sample.read(llm.engine.decoder, known[:-1], TAPS).states
        count = len(logits) + (not from_anchor)
        expected = naive(case, outer, torch.cat([states[tap] for tap in TAPS], dim=-1), known[-1], count)
        assert close(logits, expected if from_anchor else expected[1:])


@pytest.mark.parametrize("layout", cases())
def test_every_layout_says_what_a_naive_block_says(layout: str, toy: LLM, tmp_path: Path) -> None:
    """In the engine: prompts in chunks, rows of different lengths side by side, full blocks and cut ones."""
    case = cases()[layout]
    folder = save_head(tmp_path, case.config, case.tensors, case.file)
    assert detect(folder) == "dflash"
    llm = toy.variant({"model": folder})
    drafter: DFlash = llm.engine.drafter  # type: ignore[assignment]
    assert drafter.depth == BLOCK - (not case.config.get("sample_from_anchor", False))
    prompts = [{"prompt_token_ids": [(7 * i + n) % V for i in range(n)]} for n in (3, 70, 20)]
    with overheard(drafter) as blocks:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert {len(said.logits) for said in blocks} >= {1, drafter.depth}
    check(llm, case, random.Random(1).sample(blocks, 3) + [said for said in blocks if len(said.known) > 71][:1])


def test_what_the_prefix_cache_gives_is_built_on(toy: LLM, tmp_path: Path) -> None:
    """A prompt that is cached but for its last token guesses in its very first step."""
    case = cases()["speculators"]
    llm = toy.variant({"model": save_head(tmp_path, case.config, case.tensors)})
    prompt = {"prompt_token_ids": [(11 * i) % V for i in range(33)]}
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    with overheard(llm.engine.drafter) as blocks:  # type: ignore[arg-type]
        again = llm.generate(prompt, params)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert len(blocks[0].known) == 33
    check(llm, case, blocks[:1])


# ---- what a taught head does


@pytest.fixture(scope="module")
def taught(toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(4)
    network, outer = Network.like(toy.engine.target, block=4, mask=MASK), Outer.of(toy.engine.decoder)
    teach(network, network.loss, samples(toy, network.shape.taps), outer, steps=250)
    return save_head(tmp_path_factory.mktemp("taught"), *exported(network.config(), network.state_dict(), "z-lab"))


@pytest.mark.parametrize("nodes", [None, 6])
def test_a_taught_head_is_often_right(nodes: int | None, toy: LLM, taught: str) -> None:
    """Chance is 1 in 512."""
    assert acceptance(toy.engine.checkpoint.name, {"model": taught, "nodes": nodes}) > 0.1


def test_a_shift_by_one_is_seen(toy: LLM, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that begin one token too early say what is known already.  (That the taps are those of their positions, the naive blocks
    say: a toy that goes by its last token hardly needs them.)"""
    right, look = acceptance(toy.engine.checkpoint.name, {"model": taught}), DFlash.look
    monkeypatch.setattr(DFlash, "look", lambda self, batch, *rest: look(self, replace(batch, starts=[s - 1 for s in batch.starts]), *rest))
    assert acceptance(toy.engine.checkpoint.name, {"model": taught}) < right / 3


@pytest.mark.parametrize("markov", [0, 6])
def test_the_network_says_what_the_drafter_says(markov: int, toy: LLM, tmp_path: Path) -> None:
    """The plain torch that is trained, and what runs in the engine."""
    torch.manual_seed(6)
    ids = tuple(IDS)
    network = Network.like(
        toy.engine.target, taps=TAPS, block=BLOCK, mask=MASK, ids=ids, window=5, sliding=(1,), from_anchor=True, markov=markov
    )
    if markov:
        torch.nn.init.normal_(network.markov_head["markov_w2"].weight)
    folder = save_head(tmp_path, *exported(network.config(), network.state_dict(), "speculators", "some/target"))
    llm, outer = toy.variant({"model": folder}), Outer.of(toy.engine.decoder)
    with overheard(llm.engine.drafter) as blocks:  # type: ignore[arg-type]
        llm.generate({"prompt_token_ids": [5, 9, 77, 3]}, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for known, logits in (said for said in blocks if len(said.logits) == BLOCK):
        states = sample.read(toy.engine.decoder, known, TAPS).states
        with torch.no_grad():
            expected = network(torch.cat([states[tap] for tap in TAPS], -1), torch.tensor(known), torch.tensor([len(known) - 1]), outer)[0]
            added = (
                network.markov_head["markov_w2"](network.markov_head["markov_w1"].weight[known[-1]]) if markov else 0
            )  # the text ends there
        assert torch.allclose(logits + added, expected, atol=2e-4)


@pytest.mark.parametrize("prefix", ["", "markov_head."])
def test_a_markov_head_adds_what_the_token_before_says(prefix: str, toy: LLM, tmp_path: Path) -> None:
    """DSpark, two rows at once, one of them with a processor: a guess is the best of its level and the guess before it."""
    table = {f"{prefix}markov_w1.weight": torch.randn(V, 5), f"{prefix}markov_w2.weight": torch.randn(V, 5)}
    case = Case(speculators(speculators_model_type="dspark", markov_head_type="vanilla"), {**tensors(), **table})
    extra = {"confidence_head.proj.weight": torch.zeros(1, HIDDEN)}
    llm = toy.variant({"model": save_head(tmp_path, case.config, {**case.tensors, **extra})})
    assert llm.engine.drafter.depth == BLOCK
    trees: list[tuple[list[int], list[int]]] = []
    propose = llm.engine.drafter.propose

    def listening(batch: Batch, budgets: Any) -> Any:
        draft = propose(batch, budgets)
        trees.extend((list(row.tokens), tree.tokens) for row, tree in zip(batch.rows, draft.trees))
        return draft

    llm.engine.drafter.propose = listening  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": [5, 9, 77, 3]}, {"prompt_token_ids": [8, 2, 1]}]
    params = [SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias=bias) for bias in (None, {3: 0.01})]
    with overheard(llm.engine.drafter) as blocks:  # type: ignore[arg-type]
        llm.generate(prompts, params)
    levels = {tuple(known): logits for known, logits in blocks}
    found = [(known, guesses) for known, guesses in trees if guesses]
    assert len(found) > 4 and {len(guesses) for _, guesses in found} >= {BLOCK}
    for known, guesses in found:
        for logits, before, guess in zip(levels[tuple(known)], [known[-1], *guesses], guesses):
            best = logits + table[f"{prefix}markov_w2.weight"] @ table[f"{prefix}markov_w1.weight"][before]
            assert best[guess] > best.max() - 0.02


def test_drawn_chains_and_trees_say_their_laws(toy: LLM, taught: str) -> None:
    """The law of a level is the same behind every node of it, and all that is drawn is possible under it."""
    for config, rule in (({"nodes": 7}, "traversal"), ({}, "block")):
        llm = toy.variant({"model": taught, "verification": rule, **config})
        trees, verify = [], llm.engine.verify

        def listening(draft: Any, laws: Any, batch: Any, verify: Any = verify, trees: Any = trees) -> Any:
            trees.extend(draft.trees)
            return verify(draft, laws, batch)

        llm.engine.verify = listening
        llm.generate({"prompt_token_ids": [5, 9, 77]}, SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True))
        full = [tree for tree in trees if len(tree.tokens) > 2]
        assert full and all(len(tree.laws) == len(set(tree.law_of)) <= 3 for tree in full)
        for tree in full:
            assert all(float(tree.laws[law][token]) > 0 for token, law in zip(tree.tokens, tree.law_of))
            assert not config or any(parent != i - 1 for i, parent in enumerate(tree.parents))


# ---- what is refused, and what is written


def opened(toy: LLM, tmp_path: Path, config: dict[str, Any], w: dict[str, Tensor], **options: Any) -> DFlash:
    return DFlash(DFlash.Options(model=save_head(tmp_path / "head", config, w), **options), toy.engine.target)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "w", "says"),
    [
        (speculators(), without("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight"),
        (speculators(), {**tensors(), "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, r"\(64, 128\), and \(64, 192\) is needed"),
        (speculators(), {**tensors(), "fc.weight": torch.zeros(48, 192)}, "48 wide, the target 64"),
        (speculators(), {**tensors(), "norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "int32"),
        (speculators(), {**tensors(), "markov_head.gate_proj.weight": torch.zeros(V, 4)}, "DSpark with a gated.*gate_proj"),
        (speculators(), {**tensors(), "markov_w1.weight": torch.zeros(V, 4)}, "markov_w2"),
        (speculators(), {**tensors(), "something.weight": torch.zeros(4)}, "something.weight"),
        (speculators(aux_hidden_state_layer_ids=[2, 4, 9]), tensors(), r"\[2, 4, 9\], and the target has 8"),
        (speculators(mask_token_id=V), tensors(), "mask_token_id is 512, of 512"),
        (speculators(mask_token_id=None), tensors(), "mask_token_id .* whole number"),
        (speculators(block_size="8"), tensors(), "block_size .* whole number"),
        (speculators(block_size=1), tensors(), "guesses nothing"),
        (speculators({"layer_types": ["sliding_attention"] * 2}), tensors(), "sliding_window"),
        (speculators({"hidden_act": "gelu"}), tensors(), "silu"),
        (speculators({"head_dim": 7}), tensors(), "no heads of head_dim 7"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(config: dict[str, Any], w: dict[str, Tensor], says: str, toy: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        opened(toy, tmp_path, config, w)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(file: str, toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, zlab(), tensors(), file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:5000])
    with pytest.raises(ModelError, match="corrupt"):
        DFlash(DFlash.Options(model=folder), toy.engine.target)


def test_options_are_checked(toy: LLM) -> None:
    for options, says in (
        ({"nodes": 0}, "nodes"),
        ({"tap_offset": 2}, "tap_offset"),
        ({"tap_offset": True}, "tap_offset"),
        ({"model": 3}, "model"),
    ):
        with pytest.raises(ConfigError, match=says):
            DFlash.Options(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'tap_offset'"):
        toy.variant({"method": "dflash", "tap_ofset": 1})
    with pytest.raises(ConfigError, match="needs 'model'"):
        toy.variant({"method": "dflash"})


def test_numbers_of_layers_are_read_as_the_file_means_them(toy: LLM, tmp_path: Path) -> None:
    def taps(config: dict[str, Any], offset: int | None = None) -> tuple[int, ...]:
        return read(named(Head.of("head", config, tensors())), 8, offset).taps

    assert taps(speculators()) == taps(zlab()) == TAPS
    assert taps(speculators(), 1 - 1) == TAPS and taps(zlab(), 0) == (1, 3, 7)
    assert taps(zlab({"target_layer_ids": [0, 3, 6]}), 1) == (1, 4, 7)
    assert spread(36, 5) == [1, 9, 17, 25, 33], "as in the published files for 36 layers"
    assert taps({**zlab(), "dflash_config": {"mask_token_id": MASK}}) == (2, 6)
    assert opened(toy, tmp_path, zlab(), tensors()).needs.states == TAPS


def test_more_tokens_than_the_block_has_are_not_guessed(toy: LLM, tmp_path: Path) -> None:
    drafter = opened(toy, tmp_path, zlab(), tensors())
    assert (drafter.size(0), drafter.size(3), drafter.size(50)) == (0, 3, BLOCK - 1)
    tree = DFlash(DFlash.Options(model=str(tmp_path / "head"), nodes=20), toy.engine.target)
    assert (tree.size(0), tree.size(1), tree.size(50)) == (0, 8, 20)


def test_bytes_of_the_published_shape() -> None:
    """Five layers and five taps for a target of 4096: the sum of the published shapes."""
    h, inner, q, kv, d = 4096, 12288, 4096, 1024, 128
    shape = Shape(h, inner, 5, 32, 8, d, 151936, (2, 10, 18, 26, 34), 16, 151669)
    with torch.device("meta"):
        stored = Network(shape).state_dict()
    layer = 2 * q * h + 2 * kv * h + 3 * inner * h + 2 * h + 2 * d
    assert sum(tensor.numel() for tensor in stored.values()) == 5 * layer + 5 * h * h + 2 * h
    assert len(stored) == 5 * 11 + 3


def test_exports_are_read_back(toy: LLM, tmp_path: Path) -> None:
    network = Network.like(toy.engine.target)
    for layout in ("speculators", "z-lab"):
        folder = save_head(tmp_path / layout, *exported(network.config(), network.state_dict(), layout))
        json.loads((tmp_path / layout / "config.json").read_text())
        drafter = DFlash(DFlash.Options(model=folder), toy.engine.target)
        assert detect(folder) == "dflash"
        assert (drafter.layout.taps, drafter.layout.block, drafter.layout.mask) == (network.shape.taps, 8, V - 1)
    small = Network.like(toy.engine.target, ids=tuple(IDS))
    with pytest.raises(ConfigError, match="speculators"):
        exported(small.config(), small.state_dict(), "z-lab")
    with pytest.raises(ConfigError, match="Did you mean 'z-lab'"):
        exported(small.config(), small.state_dict(), "zlab")
