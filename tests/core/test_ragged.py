"""Rows of several texts as a padded batch, and back."""

from __future__ import annotations

import pytest
import torch

from outrider.core.ragged import Ragged

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[5], [3, 2], [1, 4, 2], [0, 3, 0, 2]])
def test_rows_come_back_from_a_padded_batch(lengths: list[int]) -> None:
    ragged, rows = Ragged.of(lengths, CPU), torch.randn(sum(lengths), 6)
    entries = ragged.entries(rows)
    assert entries.shape == (len(lengths), max(lengths), 6) and ragged.count == len(lengths)
    assert torch.equal(ragged.rows(entries), rows)
    assert torch.equal(entries[ragged.valid], rows)
    heads = rows.view(-1, 2, 3).transpose(0, 1)
    padded = ragged.pad(heads)
    assert padded.shape == (len(lengths), 2, max(lengths), 3)
    assert torch.equal(ragged.join(padded), rows)


def test_entries_behind_a_text_have_no_gradient() -> None:
    rows = torch.randn(5, 2, requires_grad=True)
    ragged = Ragged.of([3, 2], CPU)
    ragged.rows(ragged.entries(rows)).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, torch.ones(5, 2))
