"""What all trained heads share: files, and draft tokens from logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from outrider import SamplingParams
from outrider.backends.base import Backend
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.backends.torch.sampling import filtered
from outrider.checkpoints.heads import Head
from outrider.core.noise import gumbel, key_of
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.errors import ModelError
from outrider.heads.choose import Chooser
from outrider.heads.reader import Reader
from outrider.sampling.processors import processors_of
from outrider.sampling.sampler import Sampler
from outrider.testing import make_row

CPU = torch.device("cpu")
V, KNOWN = 200, 48  # tokens of the target, and of a head that knows some of them


def saved(folder: Path, tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder / file


# ---- files


def test_head_beside_a_model_is_found(tmp_path: Path) -> None:
    saved(tmp_path, {"model.norm.weight": torch.ones(8)}, "model.safetensors")
    saved(tmp_path, {"0.0.linear.weight": torch.ones(8, 8)}, "medusa_lm_head.safetensors")
    assert set(Head.open(str(tmp_path))) == {"0.0.linear.weight"}


@pytest.mark.parametrize("cut", [4, 60, -40])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "strange.safetensors"]
)
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, file: str, cut: int) -> None:
    path = saved(tmp_path, {"a.weight": torch.randn(64, 8), "b.weight": torch.randn(64)}, file)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=path.stem):
        head = Head.open(str(tmp_path))
        head.get("a.weight", 64, 8), head.get("b.weight", 64)


def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path: Path) -> None:
    nested = {"state_dict": {"a": torch.ones(2)}, "step": torch.ones(1)}
    for thing, reason in (
        (torch.nn.Linear(2, 2), "weights-only"),
        ([torch.ones(2)], "list"),
        (nested, "'state_dict' in it is a dict"),
        ({"a": torch.ones(2), "epoch": 3}, "'epoch' in it is a int"),
        ({0: torch.ones(2)}, "0 in it is a Tensor"),
    ):
        torch.save(thing, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match=reason):
            Head.open(str(tmp_path))


def test_folders_without_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "training_args.bin")
    with pytest.raises(ModelError, match="no weights"):
        Head.open(str(tmp_path))
    with pytest.raises(ModelError, match="nowhere"):
        Head.open(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("[1]")
    saved(tmp_path, {"a": torch.ones(2)}, "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json"):
        Head.open(str(tmp_path))


def test_a_config_is_not_needed(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.ones(2)}, "medusa_lm_head.pt")
    head = Head.open(str(tmp_path))
    assert (dict(head.config), head.shape("a"), list(head)) == ({}, (2,), ["a"])


def test_the_reference_looks_for_names_in_order(tmp_path: Path) -> None:
    saved(tmp_path, {"late": torch.ones(1)}, "other.pt")
    assert "late" in Head.open(str(tmp_path))
    saved(tmp_path, {"bin": torch.ones(1)}, "pytorch_model.bin")
    assert list(Head.open(str(tmp_path))) == ["bin"]
    saved(tmp_path, {"safe": torch.ones(1)}, "model.safetensors")
    assert list(Head.open(str(tmp_path))) == ["safe"]


def test_sharded_files_are_read(tmp_path: Path) -> None:
    for i in (1, 2):
        saved(tmp_path, {f"t{i}": torch.full((2,), float(i))}, f"model-{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}}))
    assert Head.open(str(tmp_path)).get("t2", 2).tolist() == [2.0, 2.0]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        Head.open(str(tmp_path))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_tensor_of_another_shape_is_named(tmp_path: Path, file: str) -> None:
    saved(tmp_path, {"w": torch.ones(4, 2), "ids": torch.ones(4, dtype=torch.int64)}, file)
    head = Head.open(str(tmp_path)).renamed(lambda name: f"new.{name}")
    with pytest.raises(ModelError, match=r"its w is \(4, 2\), and \(2, 4\) is needed"):
        head.get("new.w", 2, 4)
    with pytest.raises(ModelError, match=r"ids.*int64"):
        head.get("new.ids", 4)
    for ask in (head.shape, head.raw):
        with pytest.raises(ModelError, match=r"'new\.other'.*it has 2: new\.ids, new\.w"):
            ask("new.other")


def test_renamed_drops_tensors_and_keeps_first_alias(tmp_path: Path) -> None:
    """A shared module is saved under each of its names: the first counts, and None drops a tensor."""
    weight = torch.randn(4, 2)
    saved(
        tmp_path,
        {"a.0": weight, "a.1": weight, "b.0": torch.ones(1), "gone": torch.ones(1)},
        "pytorch_model.bin",
    )
    head = Head.open(str(tmp_path)).renamed(lambda name: None if name == "gone" else f"x.{name[0]}")
    assert sorted(head) == ["x.a", "x.b"]
    assert torch.equal(head.get("x.a", 4, 2), weight)
    twice = head.renamed(lambda name: name.removeprefix("x."))
    assert sorted(twice) == ["a", "b"] and torch.equal(twice.raw("a"), weight) and "gone" not in twice


def test_fused_linears_with_and_without_bias() -> None:
    """A bias that only some have is zero for the others; int8 is close."""
    torch.manual_seed(0)
    tensors = {"q.weight": torch.randn(64, 32), "k.weight": torch.randn(32, 32), "k.bias": torch.randn(32)}
    x, expected = torch.randn(3, 32), torch.cat([tensors["q.weight"], tensors["k.weight"]])
    full = x @ expected.T + torch.cat([torch.zeros(64), tensors["k.bias"]])
    for bits, error in ((None, 1e-4), (8, 0.2)):
        reader = Reader(Head.of("h", {}, tensors), backend_for(CPU, torch.float32), bits)
        out = reader.backend.linear(x, reader.fused([("q", 64), ("k", 32)], 32))
        assert torch.allclose(out.float(), full, atol=error)
        assert (out - full).abs().max() > 1e-6 or bits is None


# ---- from logits to draft tokens


def both() -> list[Backend]:
    return [backend_for(CPU, torch.float32), TorchBackend(CPU, torch.float32)]


DISTRIBUTIONS = st.builds(
    DistributionParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=120, deadline=None)
@given(
    distribution=DISTRIBUTIONS,
    seed=st.integers(0, 10_000),
    mapped=st.booleans(),
    k=st.integers(1, 12),
    rows=st.integers(1, 4),
)
def test_chooser_maps_the_heads_vocabulary(
    distribution: DistributionParams, seed: int, mapped: bool, k: int, rows: int
) -> None:
    """C, torch and the definition: best of log p plus the noise of the target's token id."""
    random_streams = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, KNOWN, generator=random_streams) * 3
    ids = (
        torch.randperm(V, generator=random_streams)[:KNOWN].sort().values.to(torch.int32) if mapped else None
    )
    keys = [key_of(seed, 0, r) for r in range(rows)]
    tokens = torch.arange(KNOWN) if ids is None else ids.long()
    results = [backend.pick_rows(logits, distribution, keys, k, ids) for backend in both()]
    for r in range(rows):
        scaled = filtered(logits[r], distribution)
        noise = gumbel(keys[r], V)[tokens] if distribution.temperature > 0 else torch.zeros(KNOWN)
        order = (scaled + noise).sort(descending=True, stable=True)
        expected = order.indices[:k][order.values[:k] > float("-inf")].tolist()
        shares = scaled.double().softmax(-1)
        for found, likely in results:
            assert found[r, : len(expected)].tolist() == expected
            assert found[r, len(expected) :].tolist() == [-1] * (k - len(expected))
            assert torch.allclose(likely[r, : len(expected)].double(), shares[expected], atol=1e-5)
            assert not likely[r, len(expected) :].any()


def target_of(backend: Backend) -> Any:
    return SimpleNamespace(vocabulary=V, decoder=SimpleNamespace(backend=backend), sampler=Sampler(backend))


def row_of(temperature: float, **given: Any) -> Row:
    params = SamplingParams(temperature=temperature, max_tokens=50, **given)
    row = make_row([3, 17, 42, 17])
    row.params, row.distribution, row.processors = (
        params,
        params.distribution,
        processors_of(params, 4, V, [], []),
    )
    return row


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mapped", [False, True])
def test_head_with_the_targets_logits_drafts_the_targets_token(temperature: float, mapped: bool) -> None:
    """Its best token is the sampler's pick from the same logits, -inf for tokens the head lacks."""
    ids = torch.arange(0, V, 4, dtype=torch.int32)[:KNOWN] if mapped else None
    for backend in both():
        target = target_of(backend)
        chooser = Chooser(target, ids)
        for asked in (
            {},
            {"top_k": 5},
            {"repetition_penalty": 1.7, "presence_penalty": 0.5},
            {"logit_bias": {17: 3.0, 42: -100.0, 8: 5.0}},
        ):
            row, paths = row_of(temperature, **asked), [[17, 8], [8, 8], [42, 3]]
            logits = torch.randn(3, KNOWN if mapped else V, generator=torch.Generator().manual_seed(7)) * 3
            wide = torch.full((3, V), float("-inf"))
            wide[:, torch.arange(V) if ids is None else ids.long()] = logits
            tokens, shares = chooser.best(row, paths, logits, 4)
            assert tokens.shape == shares.shape == (3, 4)
            for i, path in enumerate(paths):
                assert int(tokens[i, 0]) == target.sampler.pick(row, path, wide[i])
                assert len(set(tokens[i].tolist())) == 4
                distribution, expected = (
                    chooser.distribution(row, path, logits[i]),
                    target.sampler.distribution(row, path, wide[i]),
                )
                assert distribution is not None and torch.equal(distribution, expected)


def test_head_vocabulary_larger_than_the_targets() -> None:
    """Padding of its head is never drafted."""
    backend = backend_for(CPU, torch.float32)
    chooser, logits = Chooser(target_of(backend)), torch.randn(2, V + 56)
    logits[:, V:] = 50.0
    tokens, _ = chooser.best(row_of(0.0), [[1], [2]], logits, 3)
    assert tokens.max() < V and chooser.over_target_tokens(logits).shape == (2, V)


def test_top_k_above_the_head_vocabulary() -> None:
    chooser = Chooser(target_of(backend_for(CPU, torch.float32)), torch.tensor([5, 9], dtype=torch.int32))
    tokens, shares = chooser.best(row_of(0.0), [[1]], torch.tensor([[1.0, 2.0]]), 8)
    assert tokens.tolist() == [[9, 5]] and float(shares.sum()) == pytest.approx(1.0)
