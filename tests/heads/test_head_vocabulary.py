"""d2t and t2d: offsets, ids, and tables that make no sense."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider import ModelError
from outrider.checkpoints.heads import Head
from outrider.heads.vocabulary import target_ids

V, USED = 20, torch.tensor([1, 2, 5, 9, 10, 18])
OFFSET = USED - torch.arange(6)
MASK = torch.zeros(V, dtype=torch.bool).index_fill(0, USED, True)


def ids(**tensors: Tensor) -> Tensor | None:
    return target_ids(Head.of("a head", {}, tensors), V)


@pytest.mark.parametrize(
    "tensors",
    [{"d2t": OFFSET, "t2d": MASK}, {"d2t": USED, "t2d": MASK}, {"d2t": OFFSET}, {"d2t": USED}, {"t2d": MASK}],
)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_both_readings_of_d2t(tensors: dict[str, Tensor], kind: torch.dtype) -> None:
    found = ids(**{name: tensor.to(kind) if name == "d2t" else tensor for name, tensor in tensors.items()})
    assert found is not None and found.dtype == torch.int32
    assert found.tolist() == USED.tolist()


@pytest.mark.parametrize(
    ("table", "known"),
    [
        ([0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 6]),  # ascends: ids, although they are low enough for offsets
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([0, 2, 4], [0, 2, 4]),
        ([5], [5]),
        ([0, 0, 0], [0, 1, 2]),
        ([0, 0, 1], [0, 1, 3]),
        ([0, 1, 1], [0, 2, 3]),
        ([14, 14, 14, 14, 14, 14], [14, 15, 16, 17, 18, 19]),
    ],
)
def test_a_list_of_ids_ascends_and_offsets_repeat(table: list[int], known: list[int]) -> None:
    found = ids(d2t=torch.tensor(table))
    assert found is not None and found.tolist() == known


def test_a_mask_decides_what_a_list_that_ascends_is() -> None:
    """Every other token: as offsets 0, 1, 2, … they ascend, too."""
    mask = torch.zeros(V, dtype=torch.bool).index_fill(0, torch.arange(0, 12, 2), True)
    found = ids(d2t=torch.arange(6), t2d=mask)
    assert found is not None and found.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"d2t": torch.zeros(V, dtype=torch.int64)},
        {"t2d": torch.ones(V, dtype=torch.bool)},
        {"d2t": torch.arange(V)},
    ],
)
def test_all_tokens_are_their_own(tensors: dict[str, Tensor]) -> None:
    assert ids(**tensors) is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": OFFSET + 1, "t2d": MASK}, "contradict"),
        ({"d2t": OFFSET[:4], "t2d": MASK}, "contradict each other: 4 and 6 tokens"),
        ({"d2t": torch.tensor([3, 25, 7])}, "neither"),
        ({"d2t": torch.tensor([5, 3, 5])}, "neither"),
        ({"d2t": torch.tensor([-1, 0, 0])}, "neither"),
        ({"d2t": OFFSET.float()}, "float32"),
        ({"t2d": torch.ones(V + 4, dtype=torch.bool)}, "reaches token 23, the target has 20"),
    ],
)
def test_invalid_vocabulary_tables_are_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ids(**tensors)
