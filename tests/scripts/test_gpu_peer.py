"""scripts/gpu_peer.py: transformers has the weights of the pair, so that it gives the same texts."""

from __future__ import annotations

import gpu_peer
import torch


def test_transformers_gives_the_same_text_plain_and_with_the_draft_model() -> None:
    found = gpu_peer.peer(torch.device("cpu"), tiny=True)
    assert [*found] == ["outrider", "outrider, draft model", "transformers", "transformers, draft model"]
    assert all(each["same_texts"] == each["texts"] == 1 for each in found.values())
    assert all(len(each["tokens_per_second"]) == 1 for each in found.values())
