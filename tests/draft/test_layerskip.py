"""Skipped sublayers in both sets of kernels, and the parts of the method that need no engine."""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import requests_of
from safetensors.torch import load_file, save_file

from outrider import LLM, ConfigError
from outrider.backends.base import Chain, Chains
from outrider.checkpoints.hub import Checkpoint
from outrider.core.params import DistributionParams
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule
from outrider.draft.layerskip.chain import ExitThreshold, siblings_at
from outrider.draft.layerskip.options import LayerSkipOptions
from outrider.draft.layerskip.search import Search
from outrider.draft.layerskip.sets import PUBLISHED, Skip, read_set, set_name
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision

LAYERS = 4
SETS = [((1,), ()), ((), (0, 2)), ((0, 3), (3,)), ((1, 2), (1, 2)), ((1, 2, 3), (1, 2, 3)), ((0, 1), (0, 1))]
TABLE = array("i", [*range(20, 32), *range(12)])


Make = Callable[..., Path]
Load = Callable[..., Decoder]


@pytest.fixture(params=["C", "torch"])
def load(request: pytest.FixtureRequest, checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A model of four layers, or one of another folder, on either set of kernels."""
    if request.param == "torch":
        monkeypatch.setenv("OUTRIDER_KERNELS", "torch")

    def read(folder: Path | None = None) -> Decoder:
        folder = folder or checkpoint(num_hidden_layers=LAYERS)
        return Decoder(Checkpoint.open(str(folder)), Precision(torch.float32), torch.device("cpu"), 64)

    return read


@pytest.fixture
def decoder(load: Load) -> Decoder:
    return load()


def plan_of(start: int, tokens: list[int]) -> StepInput:
    return StepInput.of_chain(TABLE, start, tokens)


def silenced(folder: Path, attention: tuple[int, ...], mlp: tuple[int, ...], to: Path) -> Path:
    """The checkpoint with zeros where these sublayers write to the residual stream."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in attention] + [
        f"model.layers.{i}.mlp.down_proj.weight" for i in mlp
    ]
    save_file(
        {**weights, **{name: torch.zeros_like(weights[name]) for name in names}},
        to / "model.safetensors",
        {"format": "pt"},
    )
    return to


@pytest.mark.parametrize("attention, mlp", SETS)
def test_a_skipped_sublayer_is_the_identity_and_has_no_keys(
    attention: tuple[int, ...], mlp: tuple[int, ...], load: Load, checkpoint: Make, tmp_path: Path
) -> None:
    decoder, silent = (
        load(),
        load(silenced(checkpoint(num_hidden_layers=LAYERS), attention, mlp, tmp_path / "silent")),
    )
    tokens, pool = [5, 9, 11, 250, 3], decoder.pool(32)
    pool.data.fill_(7.0)
    got = decoder.forward(plan_of(0, tokens), pool, decoder.skip_sublayers(attention, mlp))
    assert torch.equal(got, silent.forward(plan_of(0, tokens), silent.pool(32)))
    for i, part in itertools.product(range(LAYERS), (0, 1)):
        written = pool.data[i, part, TABLE[: len(tokens)]]
        assert bool((written == 7.0).all()) == (i in attention), (
            "K/V is written where an attention runs, and only there"
        )


def test_skipped_sets_leave_the_model_unchanged(decoder: Decoder) -> None:
    before = decoder.forward(plan_of(0, [5, 9, 11]), decoder.pool(32))
    decoder.skip_sublayers((1,), (0, 2))
    assert torch.equal(decoder.forward(plan_of(0, [5, 9, 11]), decoder.pool(32)), before)


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_two_parts_make_the_whole(layer: int, decoder: Decoder) -> None:
    """Bit for bit: the state behind the first layers, and from there to the end; K/V too."""
    whole, parts = decoder.pool(32), decoder.pool(32)
    expected = decoder.forward(plan_of(0, [5, 9, 11, 8]), whole)
    x = decoder.forward(plan_of(0, [5, 9, 11, 8]), parts, decoder.layer_range(0, layer))
    got = decoder.forward(plan_of(0, [5, 9, 11, 8]), parts, decoder.layer_range(layer, LAYERS), x)
    assert torch.equal(got, expected) and torch.equal(whole.data, parts.data)


def test_a_chain_tells_its_states_and_stops_at_its_floor(checkpoint: Make) -> None:
    """Chains of three rows, one of which stops after its first token: the others do not change."""
    decoder = Decoder(
        Checkpoint.open(str(checkpoint(num_hidden_layers=LAYERS))),
        Precision(torch.float32),
        torch.device("cpu"),
        64,
    )
    tables = [array("i", range(20 * i, 20 * i + 20)) for i in range(3)]
    distribution, blocks = DistributionParams(temperature=0.0), decoder.skip_sublayers((1,), (2,))

    def run(which: list[int], floors: list[float]) -> tuple[list[list[int]], torch.Tensor]:
        step_input, pool = StepInput(), decoder.pool(64)
        for i in which:
            step_input.chain(tables[i], 0, [5, 9, 30 + i])
        states = torch.zeros(len(which), 4, decoder.spec.hidden)
        chains = [
            Chain(3 * at + 2, 4 - i, distribution, 0, floor)
            for at, (i, floor) in enumerate(zip(which, floors))
        ]
        found = decoder.draft_chain(step_input.build(), pool, Chains(chains, 300, StopRule(), states), blocks)
        return found[0], states

    free, states = run([0, 1, 2], [0.0] * 3)
    assert [len(tokens) for tokens in free] == [4, 3, 2]
    for i in range(3):
        alone, state = run([i], [0.0])
        assert alone == free[i : i + 1] and torch.equal(state[0, : 4 - i], states[i, : 4 - i])
    stopped, _ = run([0, 1, 2], [0.0, 1.0, 0.0])
    assert stopped == [free[0], free[1][:1], free[2]]
    output = decoder.logits(states.flatten(0, 1), [0, 1, 2, 3, 4, 5, 6, 8, 9]).argmax(-1).tolist()
    assert output == [*free[0], *free[1], *free[2]]


def test_a_plan_of_some_rows() -> None:
    other, adapter = array("i", range(40, 60)), object()
    whole = StepInput()
    whole.chain(TABLE, 2, [5, 6])
    whole.node(TABLE, 4, [9, 11], 7)
    whole.chain(other, 0, [1, 2, 3])
    whole.adapt(3, adapter)
    whole.build()
    part = whole.only([1, 2, 4])
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "path_lens"):
        assert [*getattr(part, name)] == [getattr(whole, name)[row] for row in (1, 2, 4)], name
    assert requests_of(part) == [(TABLE, 0, 2), (other, 2, 1)] and part.adapters == [(2, 1, adapter)]
    assert [*part.path_slots] == [0, 0, 9, 11, 0, 0]


# ---- sets


def test_published_sets_are_sets_of_their_models() -> None:
    for name, found in PUBLISHED.items():
        layers = found["layers"]
        skip = read_set(name, layers, name)
        assert [*skip.attention] == found["skip_attention"] and [*skip.mlp] == found["skip_mlp"]
        assert 0.1 * layers < len(skip.attention) < layers


@pytest.mark.parametrize(
    ("name", "layers", "ratio"),
    [
        ("llama-2-13b_cnndm", 40, 0.45),
        ("llama-2-13b_chat_cnndm", 40, 0.45),
        ("codellama-13b_humaneval", 40, 0.45),
        ("codellama-34b_humaneval", 48, 0.5),
        ("llama-2-70b_cnndm", 80, 0.5),
    ],
)
def test_what_swift_found_has_the_size_it_looked_for(name: str, layers: int, ratio: float) -> None:
    """A share of the sublayers between the first and the last layer."""
    skip = read_set(name, layers, name)
    assert len(skip.attention) + len(skip.mlp) == round(ratio * 2 * (layers - 2))
    assert {*skip.attention, *skip.mlp} <= set(range(1, layers - 1))


def test_a_model_is_known_by_its_name() -> None:
    assert set_name("meta-llama/Llama-2-13b-chat-hf", 40) == "llama-2-13b-chat"
    assert set_name("/models/CodeLlama-13b-hf/", 40) == "codellama-13b"
    assert set_name("builtin", 8) == "builtin"
    assert set_name("mine", 8) is set_name("/models/builtin", 8) is set_name("llama-2-13b", 2) is None


def test_without_a_set_every_second_layer_in_the_middle() -> None:
    assert Skip.alternating(8) == Skip((1, 3, 5), (1, 3, 5))
    assert Skip.alternating(3) == Skip((1,), (1,))
    assert Skip.alternating(2) == Skip((1,), (1,))
    with pytest.raises(ConfigError, match="every attention and every MLP"):
        Skip.alternating(1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"skip_attention": [4]}, "layers 0 … 3: got 4"),
        ({"skip_mlp": [-1]}, "layers 0 … 3: got -1"),
        ({"skip_mlp": 2}, "skip_mlp must be a list of layers.*got 2"),
        ({"skip_attention": "12"}, "skip_attention must be a list of layers.*got '12'"),
        (
            {"skip_attention": range(4), "skip_mlp": range(4)},
            "every attention and every MLP .* would be skipped",
        ),
        ({"layers": "lama-2-13b"}, "Did you mean 'llama-2-13b'"),
        ({"layers": "llama-2-13b"}, "model of 40 layers, and .* has 4"),
        ({"layers": 3}, "name of a set or a file"),
        ({"early_exit": 4}, "early_exit must be in 1 … 3"),
        ({"early_exit": 0}, "early_exit must be in 1 … 3"),
        ({"early_exit": 2, "layers": "llama-2-13b"}, "layers / early_exit: give one of these"),
        ({"early_exit": 2, "search": True}, "give it no early_exit"),
        ({"search": 1}, "search must be True or False"),
        ({"search": True, "skip_ratio": 0.05}, "none of the 4 sublayers"),
        ({"skip_ratio": 2}, "skip_ratio must be a number in"),
        ({"context_window": 0}, "context_window must be a whole number"),
        ({"exit_threshold": "atuo"}, 'a number in .0, 1. or "auto" or None'),
        ({"siblings": 0}, 'in 1 … 64 or "confidence"'),
        ({"skip_atention": [1]}, "Did you mean 'skip_attention'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, checkpoint: Make) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint(num_hidden_layers=LAYERS)), speculative_config={"method": "layerskip", **options})


def test_transformers_own_code_refuses_by_name(checkpoint: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"layers can be skipped in .*LlamaForCausalLM.* only: OPTForCausalLM"
    ):
        LLM(
            str(checkpoint("OPT", word_embed_proj_dim=64, ffn_dim=96)),
            speculative_config={"method": "layerskip"},
        )


def test_files_of_the_tuner(tmp_path: Path) -> None:
    file, good = (
        tmp_path / "set.json",
        {"layers": 4, "skip_attention": [2, 1], "skip_mlp": [], "num_speculative_tokens": 3},
    )
    file.write_text(json.dumps(good))
    assert read_set(str(file), 4, "m") == Skip((1, 2), (), 3)
    for broken in (
        {**good, "skip_mlp": [9]},
        {**good, "num_speculative_tokens": 0},
        {"layers": 4},
        [],
        {**good, "layers": 5},
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(ConfigError):
            read_set(str(file), 4, "m")


# ---- thresholds


def test_a_threshold_moves_as_published() -> None:
    row = ExitThreshold(0.5, True, depth=4)
    row.learn(drafted=2, accepted=1)  # m = 0.25 < 0.9: wanted 0.51
    assert row.accepted == 0.25 and row.value == pytest.approx(0.9 * 0.5 + 0.1 * 0.51)
    row.accepted, before = 1.0, row.value
    row.learn(4, 4)  # right, and at its longest: it stays
    assert row.value == pytest.approx(before)
    row.learn(2, 2)  # right, and stopped early: less strict
    assert row.value == pytest.approx(0.9 * before + 0.1 * (before - 0.01))
    fixed = ExitThreshold(0.5, False, depth=4)
    fixed.learn(2, 0)
    assert fixed.value == 0.5


def test_the_less_sure_the_more_siblings() -> None:
    assert [siblings_at(p, True) for p in (0.99, 0.9, 0.6, 0.2)] == [3, 5, 8, 10]
    assert [siblings_at(p, False) for p in (0.99, 0.9, 0.6, 0.2)] == [1, 3, 5, 10]


# ---- the search


def searching(**given: Any) -> Search:
    options = LayerSkipOptions(search=True, **{"bayes_interval": 5, **given})
    return Search(12, 9, Skip.alternating(12), options)


def worth(search: Search, skip: Skip, value: list[float]) -> float:
    return sum(value[i] for i, on in enumerate(search._switches(skip)) if on) / search.size


def test_candidates_leave_the_outer_layers_alone() -> None:
    search = searching()
    assert search.suggest() == Skip.alternating(12), "first what it begins with"
    for i in range(30):
        search.learn(search.suggest(), i / 100)
    for skip in search.tried[1:]:
        assert len(skip.attention) + len(skip.mlp) == 9
        assert not {0, 11} & {*skip.attention, *skip.mlp}


def test_past_trials_make_better_suggestions_than_chance() -> None:
    """Sublayers are worth something each: a suggestion after 60 random trials beats nearly all of them."""
    rng, search = random.Random(3), searching(bayes_interval=1000)
    value = [rng.random() for _ in range(24)]
    for _ in range(60):
        skip = search.suggest()
        search.learn(skip, worth(search, skip, value))
    suggested = sorted(worth(search, search._bayesian(), value) for _ in range(9))[4]
    assert sum(score < suggested for score in search.scores) > 50


def test_it_keeps_the_best_and_stops_as_published() -> None:
    search = searching(max_tolerance_iter=3)
    search.learn(Skip((1,), ()), 0.5)
    search.learn(Skip((2,), ()), 0.5)
    assert search.best == Skip((1,), ()) and search.idle == 1
    search.learn(Skip((3,), ()), 0.6)
    assert search.best == Skip((3,), ()) and not search.done
    for _ in range(3):
        search.learn(Skip((4,), ()), 0.1)
    assert search.done
    good, long = searching(), searching(max_opt_iter=2)
    good.learn(Skip((1,), ()), 0.96)
    for _ in range(2):
        long.learn(Skip((1,), ()), 0.1)
    assert good.done and long.done


def test_a_copy_goes_on_alike() -> None:
    search = searching()
    search.learn(search.suggest(), 0.1)
    twin = copy.deepcopy(search)
    assert [search.suggest() for _ in range(3)] == [twin.suggest() for _ in range(3)]
