"""Prediction layers: every layout loads and equals naive float64 layers, level by level, node by node."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import INNER, naive, norm, sized, stored, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import HIDDEN, LAYERS, V, acceptance, read, samples, save_head, teach

from outrider import LLM, SamplingParams
from outrider.core.step import FINAL, Batch
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Draft, DraftTree
from outrider.draft import detect
from outrider.draft.mtp import Mtp, Network
from outrider.errors import ConfigError
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights
from outrider.train.methods.mtp import Mtp as Trained

STEPS = 40  # of training


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["deepseek", "mimo", "ernie", "speculators"])
def test_every_layout_is_the_same_layer(toy: LLM, tmp_path: Path, kind: str, file: str) -> None:
    w = tensors(bias=kind == "mimo", qk_norm=kind == "speculators")
    folder = save_head(tmp_path, *stored(w, kind), file)
    assert detect(folder) == "mtp"
    drafter = Mtp(Mtp.Options(model=folder), toy.engine.target)
    ids, f, outer = [5, 9, 400, 3, 77, 12, 8], torch.randn(7, HIDDEN), TargetWeights.of(toy.engine.decoder)
    step_input, pool = StepInput(), drafter.net.stack.pool(64)
    step_input.chain(array("i", range(1, 40)), 0, ids)
    out = drafter.net.forward(step_input.build(), pool, drafter.net.from_states(f))
    expected = naive(w, 0, outer.embedding[ids], f, paired=kind == "ernie")
    assert torch.allclose(out.double(), expected, atol=1e-4)
    last = toy.engine.decoder.norm if kind == "ernie" else w["layers.0.norm.weight"]
    assert torch.allclose(
        drafter.net.logits(out).double(), norm(expected, last.double()) @ outer.lm_head.double().T, atol=1e-3
    )
    assert drafter.net.taps == ((LAYERS,) if kind in ("mimo", "ernie") else (FINAL,))
    again = expected if kind in ("mimo", "ernie") else norm(expected, last.double())
    assert torch.allclose(drafter.net.from_output(out).double(), again, atol=1e-4)


# ---- level by level


def expected_distribution(toy: LLM, w: dict[str, Tensor], text: list[int], path: list[int]) -> Tensor:
    """Logits after the text and a draft path, with every layer run over everything at once.

    Layer k combines the output of layer k - 1 at t with token t + k + 1.  After the last layer, that layer
    continues at t + 1 with its own output.
    """
    decoder, outer, layers = (
        toy.engine.decoder,
        TargetWeights.of(toy.engine.decoder),
        len({name.split(".")[1] for name in w}),
    )
    known = [*text, *path]
    g = output = read(decoder, text[:-1], (FINAL,)).states[FINAL].double()
    for level in range(len(path) + 1):
        k = min(level, layers - 1)
        g = output if level < layers else torch.cat([g, output[-1:]])
        output = norm(
            naive(w, k, outer.embedding[known[k + 1 : k + 1 + len(g)]], g),
            w[f"layers.{k}.norm.weight"].double(),
        )
    return (output[-1] @ outer.lm_head.double().T).softmax(-1)


def listened(llm: LLM) -> list[tuple[list[int], DraftTree]]:
    """Record the row's tokens and the tree of every draft from now on."""
    drafter, heard = llm.engine.drafter, list[tuple[list[int], DraftTree]]()
    propose = drafter.propose

    def listening(batch: Batch) -> Draft:
        draft = propose(batch)
        heard.extend((list(row.tokens), tree) for row, tree in zip(batch.rows, draft.trees) if tree.tokens)
        return draft

    drafter.propose = listening  # type: ignore[method-assign]
    return heard


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tree", ["chain", "dynamic", "mc_sim_7b_63"])
def test_drafts_equal_those_of_naive_layers(toy: LLM, tmp_path: Path, layers: int, tree: str) -> None:
    """Prefill in chunks of 5, two samples of a prompt, a shared prefix, and a prompt of two tokens."""
    w = tensors(layers)
    folder = save_head(tmp_path, *stored(w, "deepseek"))
    shape = {"chain": {}, "dynamic": {"top_k": 2, "nodes": 7}}.get(tree, {"nodes": 7})
    config = {"method": "mtp", "model": folder, "tree": tree, **shape, "num_speculative_tokens": layers + 1}
    llm = LLM(
        toy.engine.options.model,
        dtype="float32",
        max_num_batched_tokens=24,
        max_num_seqs=4,
        speculative_config=config,
    )
    heard = listened(llm)
    long = [(i * 37) % V for i in range(40)]
    for prompts, n in (([long, [7, 9]], 1), ([[*long[:33], 5, 6]], 2)):
        llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(max_tokens=7, temperature=0.0, n=n),
            use_tqdm=False,
        )
    llm.engine.check()
    assert len(heard) > 10
    most = max(len(tree.tokens) for _, tree in heard)
    assert most == layers + 1 if tree == "chain" else most > layers + 1
    for text, drafted in heard[:: max(1, len(heard) // 6)]:
        paths: dict[int, list[int]] = {ROOT: []}
        for node, (token, parent) in enumerate(zip(drafted.tokens, drafted.parents)):
            distribution = expected_distribution(toy, w, text, paths[parent])
            assert drafted.confidence[node] == pytest.approx(float(distribution[token]), abs=2e-3)
            assert int((distribution > distribution[token] + 1e-6).sum()) < (
                1 if tree == "chain" else 2 if tree == "dynamic" else 4
            )
            paths[node] = [*paths[parent], token]


# ---- in the target's own checkpoint


def own(folder: Path, target: str, w: dict[str, Tensor], kind: str, **config: Any) -> str:
    """A copy of a target that ships these layers."""
    extra, layers = stored(w, kind)
    whole = load_file(Path(target) / "model.safetensors")
    keep = {key: value for key, value in extra.items() if key == "num_nextn_predict_layers"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((Path(target) / "config.json").read_text()), **keep, **config})
    )
    save_file(
        {**whole, **{name: tensor.clone() for name, tensor in layers.items()}}, folder / "model.safetensors"
    )
    return str(folder)


def test_the_targets_own_layers(toy: LLM, tmp_path: Path) -> None:
    """Rotations, heads and eps are those of the target's config; its own loader does not mind the layers."""
    folder = own(tmp_path, str(toy.engine.options.model), sized(tensors(2)), "deepseek")
    llm = LLM(folder, dtype="float32", speculative_config={"method": "mtp"})
    assert (llm.engine.drafter.depth, llm.engine.drafter.needs.lookbehind) == (2, 2)
    params, prompt = SamplingParams(max_tokens=20, temperature=0.0), {"prompt_token_ids": [3, 4, 5]}
    got, plain = llm.generate(prompt, params)[0].outputs[0], toy.generate(prompt, params)[0].outputs[0]
    assert got.token_ids == plain.token_ids and got.speculation.drafted > 0
    assert detect(folder) == "draft_model"  # a whole model is a draft by itself


def test_mimo_is_a_target_without_code_of_its_own(tmp_path: Path) -> None:
    """MiMo is Qwen2 with prediction layers; transformers does not know it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": V,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(tmp_path / "qwen")
    mimo = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    }
    folder = own(tmp_path / "mimo", str(tmp_path / "qwen"), sized(tensors(bias=True)), "mimo", **mimo)
    params, prompt = (
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        {"prompt_token_ids": [3, 4, 5]},
    )
    plain = LLM(str(tmp_path / "qwen"), dtype="float32").generate(prompt, params)[0].outputs[0]
    llm = LLM(folder, dtype="float32", speculative_config={"method": "mtp"})
    assert type(llm.engine.decoder).__name__ == "Decoder"
    assert (llm.engine.drafter.depth, llm.engine.drafter.needs.states) == (3, (2,))
    got = llm.generate(prompt, params)[0].outputs[0]
    assert got.token_ids == plain.token_ids and got.speculation.drafted > 0


# ---- training


@pytest.fixture(scope="module", params=["one layer, two levels", "two layers, before the norm"])
def taught(request: pytest.FixtureRequest, toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    alone = request.param.startswith("one")
    network = Network.like(
        toy.engine.target, **({"steps": 2} if alone else {"layers": 2, "prenorm": True})
    ).train()
    teach(
        network, network.loss, samples(toy, network.taps), TargetWeights.of(toy.engine.decoder), steps=STEPS
    )
    exports = Trained.export(network.config(), network.state_dict(), "deepseek" if alone else "mimo")
    return save_head(tmp_path_factory.mktemp("taught"), *exports)


def test_trained_layers_are_mostly_right(toy: LLM, taught: str) -> None:
    """Two levels.  Chance is 1/512; untrained layers, which pass the embedding on, reach 0.08."""
    assert (
        acceptance(toy.engine.options.model, {"model": taught, "tree": "chain", "num_speculative_tokens": 2})
        > 0.18
    )


def test_a_shift_is_caught(toy: LLM, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a state and the token before the one sampled from it."""
    from outrider.heads import layered

    class Shifted(StepInput):
        def chain(self, table: Any, start: int, tokens: Any, shift: int = 0) -> None:
            super().chain(table, start, [7, *list(tokens)[:-1]], shift)

    monkeypatch.setattr(layered, "StepInput", Shifted)
    assert (
        acceptance(toy.engine.options.model, {"model": taught, "tree": "chain", "num_speculative_tokens": 2})
        < 0.06
    )


@pytest.mark.parametrize("layout", ["deepseek", "speculators", "mimo"])
def test_an_export_is_read_back(toy: LLM, tmp_path: Path, layout: str) -> None:
    network = Network.like(toy.engine.target, prenorm=layout == "mimo")
    config, out = Trained.export(network.config(), network.state_dict(), layout)
    folder = save_head(tmp_path, config, out)
    drafter = Mtp(Mtp.Options(model=folder), toy.engine.target)
    assert drafter.net.prenorm == network.prenorm and (
        layout != "mimo" or "model.mtp_layers.0.self_attn.q_proj.bias" in out
    )
    ids, f = [5, 9, 400], torch.randn(3, HIDDEN)
    step_input = StepInput.of_chain(array("i", range(1, 40)), 0, ids)
    with torch.no_grad():
        again, normed = network(TargetWeights.of(toy.engine.decoder).embedding[ids], f)
    o = drafter.net.forward(step_input, drafter.net.stack.pool(64), f)
    assert torch.allclose(drafter.net.from_output(o), again, atol=1e-4) and torch.allclose(
        drafter.net.normed(o), normed, atol=1e-4
    )


def test_an_export_for_other_states_is_refused(toy: LLM) -> None:
    network = Network.like(toy.engine.target)
    with pytest.raises(ConfigError, match=r"after the target's last norm.*'mimo'.*before"):
        Trained.export(network.config(), network.state_dict(), "mimo")
    with pytest.raises(ConfigError, match="Did you mean 'mimo'"):
        Trained.export(network.config(), network.state_dict(), "mino")


def test_the_bytes_of_a_layer() -> None:
    """MiMo-7B's layer: an input projection, attention of 32 heads over 8, and a SwiGLU of 11008."""
    with torch.device("meta"):
        network = Network(Sizes(4096, 11008, 32, 8, 128), 151680, first=36)
    total = sum(tensor.numel() for tensor in network.state_dict().values())
    assert total == 2 * 4096**2 + 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 11008 + 5 * 4096
