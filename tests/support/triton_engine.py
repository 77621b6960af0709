"""An engine on the Triton backend that is small enough for the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from interpreted import DEVICE, Rerun

from outrider import LLM
from outrider.testing import tiny_checkpoint


def small_checkpoint(folder: Path) -> str:
    """Two layers with two heads over one.  The interpreter takes a millisecond for ten operations."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_checkpoint(folder / "llama", **sizes)


@contextmanager
def triton_llm(small: str, **options: Any) -> Iterator[LLM]:
    from outrider.backends.triton import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "triton")
        if DEVICE.type == "cpu":
            patch.setattr(attention, "BLOCK", 16)
            patch.setattr(attention, "SPLIT", 16)
            patch.setattr("outrider.engine.engine.bit_exact", lambda decoder: True)  # takes half a minute
        made = LLM(small, device=DEVICE.type, enable_prefix_caching=False, **options)
        assert made.engine.exact and made.engine.decoder.backend.name.startswith("Triton")
        yield made


def graphs_of(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, worth: float = 0.0, rows: tuple[int, ...] = (20,)
) -> Any:
    """New graphs for the target, of these numbers of rows and every shape; `worth`: see graphs.py."""
    from outrider.backends.triton import graphs, jobs

    monkeypatch.setattr(jobs, "ROWS", rows)
    monkeypatch.setattr(graphs, "WORTH", worth)
    monkeypatch.setattr(jobs, "LEAST_KEYS", 32)
    made = graphs.graphs_for(DEVICE) or graphs.Graphs(Rerun())
    monkeypatch.setattr(llm.engine.decoder.backend, "graphs", made)
    return made
