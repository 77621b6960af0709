"""Training of PARD models: the loss of all rows equals one forward a row, and what is saved drafts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toys import read

from outrider import LLM, ConfigError
from outrider.heads.sample import Sample
from outrider.testing import tiny_checkpoint
from outrider.train.methods.pard import Pard

TOKENS = [(7 * i + 3) % 250 for i in range(24)]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An autoregressive draft model of another family than the target, with tied embeddings."""
    folder = tmp_path_factory.mktemp("draft")
    return tiny_checkpoint(folder, "Qwen2", seed=3, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def made(target: LLM, draft: str) -> Pard:
    return method(target, draft=draft, mask_token=2, depths=4)


def method(target: LLM, **given: Any) -> Pard:
    options = Pard.Options(data=("-",), out="-", **given)
    return Pard(options, target.engine.target, torch.zeros(target.engine.target.vocabulary))


def sample_of(target: LLM) -> Sample:
    """A text whose first five places, and two later ones, do not count."""
    one = read(target.engine.decoder, TOKENS, ())
    mask = torch.ones(len(TOKENS), dtype=torch.bool)
    mask[:5] = mask[8:10] = mask[-1] = False
    return Sample(one.tokens, {}, one.logits, mask)


def slow_loss(made: Pard, sample: Sample, rows: list[tuple[int, int]]) -> Tensor:
    """One forward for each (anchor, depth): the text up to the anchor, and as many masks as it is deep."""
    losses = list[Tensor]()
    assert sample.mask is not None
    for anchor, depth in rows:
        if not sample.mask[anchor + depth]:
            continue
        ids = [*sample.tokens[: anchor + 1].tolist(), *[made.mask] * depth]
        q = made.network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        p = sample.logits[anchor + depth].softmax(-1)
        losses.append(-(p * q).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kept", [1.0, 0.7], ids=["all", "dropped"])
def test_the_loss_equals_one_forward_a_row(target: LLM, made: Pard, kept: float) -> None:
    """And so does its gradient, that of the mask's embedding among them."""
    sample, weight = sample_of(target), made.network.model.embed_tokens.weight
    object.__setattr__(made.options, "kept", kept)
    torch.manual_seed(5)
    anchors, depths = made.rows(sample)
    torch.manual_seed(5)
    fast = made.loss(sample)
    rows = list(zip(anchors.tolist(), depths.tolist()))
    assert len({*rows}) == len(rows) and (0, 0) in rows and max(depths) == 3
    slow = slow_loss(made, sample, rows)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    (ours,), (theirs,) = torch.autograd.grad(fast, weight), torch.autograd.grad(slow, weight)
    assert float(theirs[made.mask].abs().max()) > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_dropped_row_takes_the_deeper_ones_of_its_anchor_along(target: LLM, made: Pard) -> None:
    """All places have depth 0.  The answer's anchors have fewer rows at every depth, least of all a fifth."""
    sample = Sample(torch.arange(200), {}, torch.empty(0), torch.arange(200) >= 100)
    for name, value in {"kept": 0.5, "least": 0.2}.items():
        object.__setattr__(made.options, name, value)
    anchors, depths = made.rows(sample)
    parts = [{*anchors[depths == depth].tolist()} for depth in range(4)]
    assert [len(part) for part in parts] == pytest.approx([200, 50, 25, 20], abs=3)
    assert parts[0] == {*range(200)} and min(parts[1]) >= 100
    assert all(deeper <= part for part, deeper in pairwise(parts))
    assert int((anchors + depths).max()) < 200


def test_what_is_saved_has_the_published_layout_and_drafts(target: LLM, made: Pard, tmp_path: Path) -> None:
    made.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["pard_token"], config["spd_type"]) == ("qwen2", 2, "pard")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape[0] == config["vocab_size"] > 2
    assert "lm_head.weight" not in tensors, "tied"
    drafter: Any = target.variant({"model": str(tmp_path)}).engine.drafter
    assert drafter.one_pass.mask == 2
    assert method(target, draft=str(tmp_path)).mask == 2, "that of the draft"
    assert method(target).mask == target.engine.target.vocabulary - 1, "the last one"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": "{draft}", "layers": 3}, "layers: a given draft has its shape"),
        ({"draft": "{draft}", "mask_token": 300}, "mask_token 300: V of the draft is 300"),
        ({"depths": 1}, "depths must be"),
        ({"draft": "{sliding}"}, "sliding window"),
        ({"draft": "builtin-draft"}, "do not share a tokenizer"),
        ({"draft": "{text}"}, "pard_token of the draft 'abc': V of the draft is 300"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(
    target: LLM, draft: str, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    if given.get("draft") == "{sliding}":
        given = {"draft": tiny_checkpoint(tmp_path, "Mistral", sliding_window=8)}
    if given.get("draft") == "{text}":
        given = {"draft": tiny_checkpoint(tmp_path, "Qwen2", pard_token="abc")}
    if "draft" in given:
        given = {**given, "draft": given["draft"].format(draft=draft)}
    with pytest.raises(ConfigError, match=message):
        method(target, **given)
