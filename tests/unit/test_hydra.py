"""Hydra's published files load as they are, and what they say in the engine is what a naive forward in float64 says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from toys import HIDDEN, LAYERS, V, acceptance, samples, save_head, teach, toy_target

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.draft import detect
from outrider.draft.hydra import PILE, Hydra, ranks
from outrider.draft.hydra.network import Network
from outrider.heads.sample import Outer, read
from outrider.heads.templates import MEDUSA, paths
from outrider.types import FINAL, Guesses

HEADS, BLOCKS, Q, KV, D, INNER, EPS, THETA = 4, 4, 4, 2, 24, 96, 1e-3, 500.0  # the prefix layer is a layer of the target
CONFIG = {
    "base_model_name_or_path": "toy", "grounded_heads": True, "hidden_state_offset": 0, "hydra_head_arch": "prefix-mlp",
    "hydra_num_heads": HEADS, "hydra_num_layers": BLOCKS, "transformers_version": "4.34.1",
}  # fmt: skip
AT = "prefix_embeding_layer"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return toy_target(tmp_path_factory.mktemp("toy"), head_dim=D, rms_norm_eps=EPS, rope_parameters=rope)


@pytest.fixture(scope="module")
def toy(target: str) -> LLM:
    return LLM(target, dtype="float32")


# ---- the reference's files, from their description


def tensors(arch: str = "prefix-mlp", hidden: int = HIDDEN, vocabulary: int = V) -> dict[str, Tensor]:
    """Names and shapes; a head's blocks after the first are one tensor under several names."""
    torch.manual_seed(5)
    dropout = arch == "prefix-mlp"
    w: dict[str, Tensor] = {"input_embed_fn.weight": torch.zeros(vocabulary, hidden)}
    for i in range(HEADS):
        slots = [1 + 2 * j if dropout else j for j in range(BLOCKS)]
        for part in ("linear", "res_connection"):
            w[f"hydra_mlp.{i}.{slots[0]}.{part}.weight"] = torch.randn(hidden, (i + 2) * hidden) * 0.1
            w[f"hydra_mlp.{i}.{slots[0]}.{part}.bias"] = torch.randn(hidden)
        shared = torch.randn(hidden, hidden) * 0.1, torch.randn(hidden)
        for slot in slots[1:]:
            w[f"hydra_mlp.{i}.{slot}.linear.weight"], w[f"hydra_mlp.{i}.{slot}.linear.bias"] = shared
        at = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
        w[f"{at}.weight"], w[f"{at}.bias"] = torch.randn(vocabulary, hidden) * 0.5, torch.randn(vocabulary)
    return {**w, **prefix_tensors()} if dropout else w


def prefix_tensors() -> dict[str, Tensor]:
    w, at = {f"{AT}.embed_tokens.weight": torch.zeros(V, HIDDEN), f"{AT}.norm.weight": torch.rand(HIDDEN) + 0.5}, f"{AT}.layers.0"
    shapes = {"q": (Q * D, HIDDEN), "k": (KV * D, HIDDEN), "v": (KV * D, HIDDEN), "o": (HIDDEN, Q * D)}
    w |= {f"{at}.self_attn.{name}_proj.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    w |= {f"{at}.mlp.{name}_proj.weight": torch.randn(INNER, HIDDEN) * 0.2 for name in ("gate", "up")}
    w[f"{at}.mlp.down_proj.weight"] = torch.randn(HIDDEN, INNER) * 0.2
    w |= {f"{at}.{name}_layernorm.weight": torch.rand(HIDDEN) + 0.5 for name in ("input", "post_attention")}
    return w | {f"{at}.self_attn.rotary_emb.inv_freq": torch.ones(D // 2)}


def once(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is shared is stored once, as `safetensors.torch.save_model` does."""
    kept: dict[int, str] = {}
    return {name: tensor for name, tensor in sorted(w.items()) if kept.setdefault(tensor.data_ptr(), name) == name}


# ---- a naive forward


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w


def prefixed(w: dict[str, Tensor], f: Tensor) -> Tensor:
    """P_t of the states f_0 … f_t, [t + 1, hidden] in float64: the block and the norm."""
    at, n, half = f"{AT}.layers.0", len(f), D // 2
    u = norm(f, w[f"{at}.input_layernorm.weight"])
    q, k, v = (
        (u @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(n, heads, D).transpose(0, 1)
        for name, heads in (("q", Q), ("k", KV), ("v", KV))
    )
    angle = torch.arange(n)[:, None] / THETA ** (torch.arange(half).double() / half)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    q, k, v = turned(q), turned(k).repeat_interleave(Q // KV, 0), v.repeat_interleave(Q // KV, 0)
    scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    x = f + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
    y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
    gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
    x = x + (gate * gate.sigmoid() * (y @ w[f"{at}.mlp.up_proj.weight"].T)) @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, w[f"{AT}.norm.weight"])[-1]


def naive(w: dict[str, Tensor], f: Tensor, embedded: Tensor) -> Tensor:
    """[V]: what the head says that reads f_0 … f_t, and the embeddings of x_t+1 and what was guessed, [1 + i, hidden]."""
    w = {name: tensor.double() for name, tensor in w.items()}
    i, dropout = len(embedded) - 1, f"{AT}.norm.weight" in w
    p = prefixed(w, f.double()) if dropout else f[-1].double()
    z = torch.cat([p, embedded.double().flatten()])

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    at = f"hydra_mlp.{i}.{int(dropout)}"
    bent = linear(f"{at}.linear", z)
    x = linear(f"{at}.res_connection", z) + bent * bent.sigmoid()
    for _ in range(BLOCKS - 1):  # the same every time
        bent = linear(f"hydra_mlp.{i}.{3 if dropout else 1}.linear", x)
        x = x + bent * bent.sigmoid()
    return linear(f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}", x)


# ---- the engine, overheard

Heard = dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor]


def overhear(llm: LLM) -> Heard:
    """(tokens of the row, what is guessed behind them) -> the head's logits, of everything that is guessed from now on."""
    heard: Heard = {}
    choose = llm.engine.drafter.choose  # type: ignore[attr-defined]
    best, law = choose.best, choose.law

    def note(row: Any, path: Sequence[int], logits: Tensor) -> None:
        key = tuple(row.tokens), tuple(path)
        assert key not in heard or torch.equal(heard[key], logits), "the same question got two answers"
        heard[key] = logits.clone()

    def hearing_best(row: Any, paths: Sequence[Sequence[int]], logits: Tensor, k: int) -> Any:
        for path, said in zip(paths, logits):
            note(row, path, said)
        return best(row, paths, logits, k)

    def hearing_law(row: Any, path: Sequence[int], logits: Tensor) -> Any:
        note(row, path, logits)
        return law(row, path, logits)

    choose.best, choose.law = hearing_best, hearing_law
    return heard


def judged(toy: LLM, w: dict[str, Tensor], heard: Heard, most: int = 24, state: int = FINAL) -> None:
    """What was said is what the naive forward says, over states that the target computes anew."""
    model, outer = toy.engine.decoder, Outer.of(toy.engine.decoder)
    keys = sorted(heard, key=lambda key: (len(key[1]), key))
    for tokens, path in keys[:: max(1, len(keys) // most)]:
        f = read(model, tokens, (state,)).states[state][:-1]
        expected = naive(w, f, outer.embedding[[tokens[-1], *path]])
        assert torch.allclose(heard[tokens, path].double(), expected, atol=2e-3, rtol=1e-4), (len(tokens), path)
    assert {len(path) for _, path in keys} == set(range(HEADS)), "every head should have been asked"


def prompts(count: int = 3, length: int = 30) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * i + 13 * j * j + 5) % V for j in range(length + 9 * i)]} for i in range(count)]


def engine(target: str, folder: str, **options: Any) -> LLM:
    named = {"method": "hydra", "model": folder, "tree": "mc_sim_7b_63", "nodes": 40}
    speculation = {**named, **{key: options.pop(key) for key in list(options) if key in (*named, "verification", "quantization")}}
    return LLM(target, dtype="float32", speculative_config=speculation, **options)


LAYOUTS = ["prefix-mlp .pt", "prefix-mlp safetensors", "prefix-mlp stored once", "mlp .pt", "mlp safetensors"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_network(toy: LLM, target: str, tmp_path: Path, layout: str) -> None:
    arch = layout.split()[0]
    w = tensors(arch)
    if layout.endswith("once"):
        folder = save_head(tmp_path, CONFIG, {})
        stored = once(w)
        assert sum("hydra_mlp" in name for name in stored) == 6 * HEADS
        save_file(stored, tmp_path / "model.safetensors")
    else:
        folder = save_head(tmp_path, {**CONFIG, "hydra_head_arch": arch}, w, "hydra_lm_head.pt" if ".pt" in layout else "model.safetensors")
    assert detect(folder) == "hydra"
    llm = engine(target, folder)
    heard = overhear(llm)
    llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    judged(toy, w, heard)
    assert llm.engine.drafter.depth == HEADS
    assert (llm.engine.drafter.slot_bytes == 0) == (arch == "mlp")


@pytest.mark.parametrize("arch", ["prefix-mlp", "mlp"])
def test_alignment_holds_under_every_condition(toy: LLM, target: str, tmp_path: Path, arch: str) -> None:
    """Chunks of prompts, rows beside each other, prefix hits, forks, rows that lose their cache: always the same answers."""
    w = tensors(arch)
    folder = save_head(tmp_path, {**CONFIG, "hydra_head_arch": arch}, w, "hydra_lm_head.pt")
    slot = toy.engine.decoder.slot_bytes + engine(target, folder).engine.drafter.slot_bytes
    llm = engine(target, folder, nodes=12, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=112, kv_cache_memory_bytes=128 * slot)
    heard, params = overhear(llm), SamplingParams(temperature=0.5, seed=3, max_tokens=40, n=2, ignore_eos=True)
    first = llm.generate(prompts(), params)
    assert llm.engine.scheduler.preemptions > 0
    again = llm.generate(prompts()[:1], params)  # the answers to questions that were asked before are compared in `overhear`
    assert [o.token_ids for o in again[0].outputs] == [o.token_ids for o in first[0].outputs]
    assert again[0].num_cached_tokens
    judged(toy, w, heard, 48)
    drafter: Any = llm.engine.drafter
    assert not drafter.last and not drafter.piles, "finished rows should be forgotten"


def test_samples_share_the_prompt(target: str, tmp_path: Path) -> None:
    """The K/V of a prompt is there by the time at which the other samples fork."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"))
    known: list[int] = []
    observe = llm.engine.drafter.observe
    llm.engine.drafter.observe = lambda commit: (known.append(sum(commit.batch.known)), observe(commit))  # type: ignore[method-assign]
    llm.generate(prompts(1, 60), SamplingParams(temperature=0.5, seed=1, n=3, max_tokens=4, ignore_eos=True))
    assert known[0] == 60 and max(known[1:]) <= 3


def test_drawn_guesses_say_their_laws(toy: LLM, target: str, tmp_path: Path) -> None:
    w = tensors()
    llm = engine(target, save_head(tmp_path, CONFIG, w, "hydra_lm_head.pt"), verification="traversal", nodes=16)
    heard, checked, propose = overhear(llm), 0, llm.engine.drafter.propose

    def proposing(batch: Any, budgets: Any) -> Any:
        nonlocal checked
        draft = propose(batch, budgets)
        for row, tree in zip(batch.rows, draft.trees):
            said: list[list[int]] = []
            for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
                before = said[parent] if parent >= 0 else []
                said.append([*before, token])
                law = tree.law(i)
                assert law is not None
                assert torch.allclose(law, (heard[tuple(row.tokens), tuple(before)].double() / 0.7).softmax(-1), atol=1e-7)
                checked += 1
        return draft

    llm.engine.drafter.propose = proposing  # type: ignore[method-assign]
    llm.generate(prompts(2), SamplingParams(temperature=0.7, seed=2, max_tokens=8, ignore_eos=True))
    assert checked > 100
    judged(toy, w, heard)


def test_states_of_an_earlier_layer(toy: LLM, target: str, tmp_path: Path) -> None:
    w = tensors()
    llm = engine(target, save_head(tmp_path, {**CONFIG, "hidden_state_offset": 2}, w, "hydra_lm_head.pt"))
    heard = overhear(llm)
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    judged(toy, w, heard, state=LAYERS - 2)


def test_few_bits_say_nearly_the_same(toy: LLM, target: str, tmp_path: Path) -> None:
    """int8: logits of the first head within a tenth of their spread."""
    w = tensors()
    llm = engine(target, save_head(tmp_path, CONFIG, w, "hydra_lm_head.pt"), quantization="int8")
    heard, outer = overhear(llm), Outer.of(toy.engine.decoder)
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    tokens = next(tokens for tokens, path in heard if not path)
    f = read(toy.engine.decoder, tokens, (FINAL,)).states[FINAL][:-1]
    expected, said = naive(w, f, outer.embedding[[tokens[-1]]]), heard[tokens, ()].double()
    assert 0 < (said - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


def test_the_whole_published_tree_is_guessed(target: str, tmp_path: Path) -> None:
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"), nodes=63)
    trees: list[Guesses] = []
    observe = llm.engine.drafter.observe
    llm.engine.drafter.observe = lambda commit: (trees.extend(commit.draft.trees), observe(commit))  # type: ignore[method-assign]
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tree = trees[1]
    found, below = ranks(tree), list[tuple[int, ...]]()
    for i, parent in enumerate(tree.parents):
        below.append((*(below[parent] if parent >= 0 else ()), found[i]))
    assert sorted(below) == sorted(paths(MEDUSA["mc_sim_7b_63"])) and len(below) == 63


def test_states_do_not_pile_up(target: str, tmp_path: Path) -> None:
    """A row that declines to guess reads them now and then, so that its pages can be shared."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"))
    drafter: Any = llm.engine.drafter
    most, observe = 0, drafter.observe

    def observing(commit: Any) -> None:
        nonlocal most
        observe(commit)
        most = max([most, *(pile.count for pile in drafter.piles.values())])

    drafter.observe = observing
    (out,) = llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, speculate=False))
    assert out.speculation.drafted == 0 and most == PILE - 1
    whole = {"prompt_token_ids": out.prompt_token_ids + list(out.outputs[0].token_ids)[:-1]}
    (again,) = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1))
    assert (again.num_cached_tokens or 0) >= 30 + 200 - PILE - 32


def test_its_own_tree_follows_what_was_right(target: str, tmp_path: Path) -> None:
    """A random head is hardly ever right, and what it learns is put back with `memory`."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"), tree="own", nodes=6)
    before = llm.engine.drafter.memory.worth[0][0]
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert llm.engine.drafter.memory.worth[0][0] < 0.6 * before
    assert engine(target, str(tmp_path), nodes=6).engine.drafter.memory is None


# ---- shapes


@pytest.mark.parametrize("arch", ["prefix-mlp", "mlp"])
def test_the_published_names_and_bytes(arch: str) -> None:
    """Hydra's names; of a head for Vicuna 13B the bytes that its shapes give, on the meta device."""
    prefix = {"intermediate_size": INNER, "num_attention_heads": Q, "num_key_value_heads": KV, "head_dim": D}
    network = Network(HIDDEN, V, HEADS, BLOCKS, prefix if arch == "prefix-mlp" else None)
    unread = ("embed_tokens", "input_embed_fn", "rotary_emb")
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == {
        name: tensor.shape for name, tensor in tensors(arch).items() if not any(part in name for part in unread)
    }
    h, inner, v = 5120, 13824, 32000
    with torch.device("meta"):
        wide = {"intermediate_size": inner, "num_attention_heads": 40, "num_key_value_heads": 40}
        large = Network(h, v, HEADS, BLOCKS, wide if arch == "prefix-mlp" else None)
    mlps = sum(2 * (h * (i + 2) * h + h) + h * h + h for i in range(HEADS))  # a shared block counts once
    layer = 4 * h * h + 3 * h * inner + 3 * h
    assert sum(p.numel() for p in large.parameters()) == mlps + HEADS * (v * h + v) + (layer if arch == "prefix-mlp" else 0)


# ---- what it learns


@pytest.fixture(scope="module", params=["prefix-mlp", "mlp"])
def taught(request: pytest.FixtureRequest, toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    network, outer = Network.like(toy.engine.target, request.param, heads=3, layers=2, dropout=0.0), Outer.of(toy.engine.decoder)
    network.start(outer)
    teach(network.train(), network.loss, samples(toy, (FINAL,)), outer, steps=200)
    return save_head(tmp_path_factory.mktemp("taught"), network.config(), network.state_dict(), "hydra_lm_head.pt")


def test_a_taught_head_is_mostly_right(target: str, taught: str) -> None:
    """Chance is 1/512.  A chain, the published tree and its own."""
    assert acceptance(target, {"model": taught, "tree": "chain"}) > 0.3
    for tree in ("mc_sim_7b_63", "own"):
        assert acceptance(target, {"model": taught, "tree": tree, "nodes": 12}) > 0.08


def test_a_shift_is_caught(target: str, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token before the one that was said from the state."""
    propose = Hydra.propose

    def shifted(self: Hydra, batch: Any, budgets: Any) -> Any:
        for row in batch.rows:
            row.tokens[-2:] = reversed(row.tokens[-2:])
        try:
            return propose(self, batch, budgets)
        finally:
            for row in batch.rows:
                row.tokens[-2:] = reversed(row.tokens[-2:])

    monkeypatch.setattr(Hydra, "propose", shifted)
    assert acceptance(target, {"model": taught, "tree": "chain"}) < 0.1


def test_the_loss_is_the_teachers(toy: LLM) -> None:
    """Per head and position: cross entropy of what it says with the target's law of the token that it guesses."""
    torch.manual_seed(1)
    network = Network.like(toy.engine.target, heads=2, layers=2).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    sample, outer = read(toy.engine.decoder, [5, 9, 400, 3, 77, 12], (FINAL,)), Outer.of(toy.engine.decoder)
    p = network.prefix_embeding_layer(sample.states[FINAL])
    total = 0.0
    for i in range(2):
        each = []
        for t in range(len(sample.tokens) - 1 - i):
            z = torch.cat([p[t], *outer.embedding[sample.tokens[t + 1 : t + 2 + i]]])
            said = network.hydra_lm_head[i](network.hydra_mlp[i](z))
            each.append(-(sample.logits[t + 1 + i].softmax(-1) * F.log_softmax(said, -1)).sum())
        total += float(torch.stack(each).mean())
    assert float(network.loss(sample, outer)) == pytest.approx(total, rel=1e-5)


# ---- what cannot be used


def refused(toy: LLM, folder: Path, config: dict[str, Any], w: dict[str, Tensor], file: str = "hydra_lm_head.pt") -> str:
    with pytest.raises(ModelError) as caught:
        Hydra(Hydra.Options(model=save_head(folder, config, w, file)), toy.engine.target)
    return str(caught.value)


@pytest.mark.parametrize("arch", ["cross-attn", "eagle-attn", "mpl"])
def test_other_archs_are_refused_by_name(toy: LLM, tmp_path: Path, arch: str) -> None:
    said = refused(toy, tmp_path, {**CONFIG, "hydra_head_arch": arch}, {"attn.self_attn.q_proj.weight": torch.zeros(4, 4)})
    assert repr(arch) in said and "prefix-mlp" in said


@pytest.mark.parametrize(
    "name",
    ["hydra_mlp.2.1.res_connection.bias", "hydra_mlp.0.1.linear.weight", "hydra_lm_head.1.1.weight", "hydra_lm_head.3.1.bias",
     f"{AT}.norm.weight", f"{AT}.layers.0.input_layernorm.weight", f"{AT}.layers.0.self_attn.q_proj.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_named(toy: LLM, tmp_path: Path, name: str) -> None:
    w = tensors()
    del w[name]
    assert ".".join(name.split(".")[:2]) in refused(toy, tmp_path, CONFIG, w)


def test_a_prefix_layer_that_is_missing_is_not_left_out(toy: LLM, tmp_path: Path) -> None:
    w = {name: tensor for name, tensor in tensors().items() if not name.startswith(AT)}
    assert "q_proj" in refused(toy, tmp_path, CONFIG, w)


def test_a_head_for_another_target_is_refused(toy: LLM, tmp_path: Path) -> None:
    said = refused(toy, tmp_path / "narrow", {**CONFIG, "hydra_head_arch": "mlp"}, tensors("mlp", hidden=32))
    assert "(32,)" in said and "(64,)" in said
    said = refused(toy, tmp_path / "words", {**CONFIG, "hydra_head_arch": "mlp"}, tensors("mlp", vocabulary=V + 8))
    assert f"({V + 8},)" in said and f"({V},)" in said


def test_wrong_kinds_are_refused(toy: LLM, tmp_path: Path) -> None:
    w = tensors("mlp")
    ungrounded = {name: tensor for name, tensor in w.items() if "res_connection" not in name}
    assert "not grounded" in refused(toy, tmp_path / "a", {"hydra_head_arch": "mlp"}, ungrounded)
    w["hydra_lm_head.0.weight"] = w["hydra_lm_head.0.weight"].to(torch.int32)
    assert "int32" in refused(toy, tmp_path / "b", {"hydra_head_arch": "mlp"}, w)
    assert "hidden_state_offset" in refused(toy, tmp_path / "c", {**CONFIG, "hidden_state_offset": 99}, tensors())
    two = {**tensors(), f"{AT}.layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    assert "more than one layer" in refused(toy, tmp_path / "d", CONFIG, two)


@pytest.mark.parametrize("file", ["model.safetensors", "hydra_lm_head.pt"])
def test_a_truncated_file_is_refused(toy: LLM, tmp_path: Path, file: str) -> None:
    folder = save_head(tmp_path, CONFIG, tensors(), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt"):
        Hydra(Hydra.Options(model=folder), toy.engine.target)


def test_options_are_checked(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'chain'"):
        Hydra.Options(tree="chains")
    with pytest.raises(ConfigError, match="nodes"):
        Hydra.Options(nodes=0)
    with pytest.raises(ConfigError, match="'model'"):
        LLM(target, speculative_config={"method": "hydra"})
    folder = save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt")
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 5 .* 4 heads"):
        LLM(target, speculative_config={"model": folder, "num_speculative_tokens": 5})
    assert LLM(target, speculative_config={"model": folder, "num_speculative_tokens": 2}).engine.controller.levels(1) == 2
