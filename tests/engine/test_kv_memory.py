"""K/V memory of a GPU: what a step computes stays free, and errors name the bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, CapacityError
from outrider.config import EngineOptions
from outrider.core.block_table import PAGE
from outrider.engine import memory
from outrider.engine.memory import SNAPSHOTS, largest_step, plan_pages, plan_snapshots, working_bytes

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
TOTAL, FREE, SLOT = 80_000_000, 60_000_000, 1000


@pytest.fixture(autouse=True)
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_on_gpu", lambda device: (FREE, TOTAL))


def options(**given: Any) -> EngineOptions:
    return EngineOptions(model="none", max_num_seqs=100, **given)


def test_pages_leave_room_for_what_a_step_computes() -> None:
    """0.9 of the memory, less what is in use, less the bytes of a step."""
    sizes = Counter({GPU: SLOT})
    room = FREE - TOTAL // 10
    assert plan_pages(sizes, 6400, 4, options()) == room // (SLOT * PAGE)
    assert plan_pages(sizes, 6400, 4, options(), {GPU: 9_000_000}) == (room - 9_000_000) // (SLOT * PAGE)
    assert plan_pages(sizes, 6400, 4, options(), {OTHER: 9_000_000}) == room // (SLOT * PAGE)
    with pytest.raises(CapacityError, match=r"K/V memory of 0 bytes .* needs 6400 \(6,400,000 bytes\)"):
        plan_pages(sizes, 6400, 4, options(), {GPU: room + 1})


def test_snapshots_take_half_of_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    sizes, taken = Counter({GPU: SLOT}), 10 * SLOT
    assert plan_snapshots(sizes, 4, taken, options(kv_cache_memory_bytes=21 * SLOT)) == 5
    assert plan_snapshots(sizes, 4, taken, options(kv_cache_memory_bytes=1000 * SLOT)) == 4 * SNAPSHOTS
    assert plan_snapshots(sizes, 100, FREE - TOTAL // 10 - 9 * SLOT, options()) == 4
    assert not caplog.records
    assert plan_snapshots(sizes, 4, taken, options(kv_cache_memory_bytes=11 * SLOT)) == 0
    assert "no memory is left for snapshots" in caplog.text
    assert plan_snapshots(sizes, 4, 0, options(enable_prefix_caching=False)) == 0
    assert plan_snapshots(Counter(), 0, 0, options()) == 0


def test_more_memory_than_a_gpu_has_is_refused_with_its_bytes() -> None:
    sizes, most = Counter({GPU: SLOT}), FREE // (SLOT * PAGE) * SLOT * PAGE
    asked = options(kv_cache_memory_bytes=most)
    assert plan_pages(sizes, 6400, 4, asked) == most // (SLOT * PAGE)
    with pytest.raises(CapacityError, match=f"needs {most + 90_000:,} bytes on cuda:0 .* {FREE:,} are free"):
        plan_pages(sizes, 6400, 4, asked, {GPU: 90_000})


def test_the_largest_step_has_requests_of_the_longest_length() -> None:
    step = largest_step(70, 32, 9)
    assert step.query_start == [0, 32, 64, 70] and step.length == 70 and step.max_seq_len == 32
    assert step.logits_rows == [*range(61, 70)] and len({*step.slot_mapping}) == 70


def test_a_forward_of_the_largest_step_is_profiled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only; the decoder here says that its K/V is on one."""

    class Meter:
        def __init__(self, gpus: Any) -> None:
            assert gpus == [GPU]

        def read(self) -> Counter[torch.device]:
            assert pools[0]() is None, "its memory would not be free"
            return Counter({GPU: 123})

    engine = LLM(str(tiny), max_model_len=64).engine
    given = options(max_num_batched_tokens=100)
    assert working_bytes(engine.decoder, 64, 4, given) == Counter()
    steps, pools, forward = list[Any](), list[Any](), engine.decoder.forward_step

    def noting(step: Any, pool: Any, *rest: Any) -> Any:
        steps.append(step)
        pools.append(weakref.ref(pool))
        return forward(step, pool, *rest)

    monkeypatch.setattr(memory, "PeakMemory", Meter)
    monkeypatch.setattr(type(engine.decoder), "footprint", Counter({GPU: SLOT}))
    monkeypatch.setattr(engine.decoder, "forward_step", noting)
    assert working_bytes(engine.decoder, 64, 4, given) == Counter({GPU: 123})
    (step,) = steps
    assert step.length == 100 and len(step.logits_rows) == 100

    def short(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine.decoder, "forward_step", short)
    with pytest.raises(CapacityError, match=r"100 tokens does not fit .* on cuda:0: lower max_num_batched"):
        working_bytes(engine.decoder, 64, 4, given)
