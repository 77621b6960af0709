"""Grown checkpoints: the logits of the small one bit for bit, at the cost of more weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import text_logits

from outrider.checkpoints.grown import INNER, LAYERS
from outrider.checkpoints.hub import GROWN, Checkpoint
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision

CPU = torch.device("cpu")
TOKENS = [(7 * i + 3) % 300 for i in range(24)]


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return text_logits(Decoder(checkpoint, Precision(torch.float32), CPU, 64), TOKENS)


@pytest.mark.parametrize(("layers", "inner"), [(2, 160), (5, 96), (6, 128)])
def test_a_grown_model_has_the_same_logits_bit_for_bit(tiny: Path, layers: int, inner: int) -> None:
    small = Checkpoint.open(str(tiny))
    large = small.grown(layers, inner)
    assert (large.spec.layers, large.spec.inner) == (layers, inner)
    assert torch.equal(logits(large), logits(small))


def test_added_weights_compute_and_add_nothing(tiny: Path) -> None:
    """Output projections are zero with random signs, so that no two are equal to a converter."""
    large = Checkpoint.open(str(tiny)).grown(4, 128)
    source, hidden = large.tensors(), large.spec.hidden
    gate = source.linear("model.layers.0.mlp.gate_proj", 128, hidden)
    assert (
        gate[96:].std() > 0.01
        and (source.linear("model.layers.0.mlp.down_proj", hidden, 128)[:, 96:] == 0).all()
    )
    downs = [source.linear(f"model.layers.{i}.mlp.down_proj", hidden, 128) for i in (2, 3)]
    assert all((down == 0).all() for down in downs)
    assert not torch.equal(downs[0].signbit(), downs[1].signbit())
    assert source.linear("model.layers.3.self_attn.q_proj", 64, hidden).std() > 0.01


def test_a_smaller_model_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        Checkpoint.open(str(tiny)).grown(1, 96)


def test_the_built_in_one_has_a_name() -> None:
    large = Checkpoint.open(GROWN)
    assert (large.spec.layers, large.spec.inner, large.name) == (LAYERS, INNER, GROWN)
    assert large.tokenizer is not None and large.ending == Checkpoint.open("builtin").ending
