"""Which sizes get a graph: few, for steps whose rows and levels change, and none at the first use."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE, Rerun, needs_triton

from outrider.backends.base import Chain, Chains
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.clock import one_recording, one_time, working_time
from outrider.core.params import DistributionParams
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.testing import tiny_checkpoint

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
VOCABULARY, SLOTS = 50, 60
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
         "vocab_size": VOCABULARY, "num_hidden_layers": 1}  # fmt: skip


class Seen:
    """What chains were computed: (rows, levels, chains), launched or in a replay."""

    def __init__(self) -> None:
        self.launched, self.replayed = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        self.replaying = False

    def compute(self, job: Any, _: Any) -> tuple[torch.Tensor]:
        """In place of the kernels."""
        step, levels, count = job.padded
        (self.replayed if self.replaying else self.launched).append((step.rows, levels, count))
        return (torch.zeros(levels, count, 1, dtype=torch.float64, device=DEVICE),)

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def replay() -> Any:
            self.replaying = True
            try:
                return run()
            finally:
                self.replaying = False

        return replay

    def reserved(self) -> int:
        return 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    from outrider.backends.triton.fused import _Chain

    made = Seen()
    monkeypatch.setattr(_Chain, "compute", lambda job, flat: made.compute(job, flat))
    return made


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "triton")
        patch.setattr("outrider.backends.triton.attention.BLOCK", 16)
        patch.setattr("outrider.backends.triton.attention.SPLIT", 16)
        path = tiny_checkpoint(Path(tmp_path_factory.mktemp("sizes")) / "llama", **SIZES)
        yield Decoder(Checkpoint.open(path), Precision(torch.float32), DEVICE, 64)


@pytest.fixture
def pool(decoder: Decoder) -> Pool:
    return decoder.pool(SLOTS * 32)


def graphs_of(decoder: Decoder, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from outrider.backends.triton.graphs import Graphs

    made = Graphs(recorder)
    monkeypatch.setattr(decoder.backend, "graphs", made)
    return made


def drafted(decoder: Decoder, pool: Pool, tokens: list[int], levels: list[int]) -> list[list[int]]:
    """Chains of these levels, each behind so many tokens that the draft model has not read."""
    step, chains = StepInput(), []
    for i, (count, own) in enumerate(zip(tokens, levels)):
        step.chain(array("i", range(SLOTS * i, SLOTS * (i + 1))), 2, [*range(3, 3 + count)])
        chains.append(Chain(step.length - 1, own, DistributionParams(0.9), 7 + i))
    return decoder.draft_chain(step.build(), pool, Chains(chains, VOCABULARY))[0]


def random_chains(rng: random.Random, most: int, deepest: int) -> tuple[list[int], list[int]]:
    """Tokens and levels of up to so many chains; the deepest of them differs from step to step."""
    depth, count = rng.randint(1, deepest), rng.randint(1, most)
    levels = [depth, *(rng.randint(1, depth) for _ in range(count - 1))]
    return [rng.randint(1, 1 + depth) for _ in range(count)], levels


def test_few_graphs_serve_random_rows_and_levels(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 32 chains of up to 1 to 5 levels: 300 steps recorded 88 graphs when each size had its own."""
    own, rng = graphs_of(decoder, seen, monkeypatch), random.Random(0)
    needed = 0
    for _ in range(300):
        tokens, levels = random_chains(rng, 32, 5)
        drafted(decoder, pool, tokens, levels)
        needed += max(levels)
    counts = own.counts
    assert counts.recorded == len(own.graphs) <= 25 and counts.launched <= 60
    assert counts.replayed + counts.launched == 300 and not counts.dropped
    assert sum(levels for _, levels, _ in seen.replayed) <= 1.25 * needed


def test_a_size_is_launched_without_padding_until_its_graph_is_worth_recording(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of a size that will have a graph are one-time work."""
    own = graphs_of(decoder, seen, monkeypatch)
    monkeypatch.setattr("outrider.backends.triton.graphs.WORTH", 3 * 7.0)
    for _ in range(3):
        before, worked = one_time(), working_time()
        drafted(decoder, pool, [1, 4, 2], [3, 2, 1])
        assert one_time() > before and working_time() > worked
    assert seen.launched == [(7, 3, 3)] * 3 and not own.counts.recorded
    for _ in range(2):
        drafted(decoder, pool, [1, 4, 2], [3, 2, 1])
    assert own.counts.recorded == 1 and seen.launched[3:] == [(16, 3, 4)]  # before it is recorded
    assert seen.replayed == [(16, 3, 4)] * 2


def test_a_draft_is_recorded_at_its_second_use(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches take eight times as long as a replay."""
    own = graphs_of(decoder, seen, monkeypatch)
    for recorded in (0, 1, 1):
        drafted(decoder, pool, [1, 4, 2], [3, 2, 1])
        assert own.counts.recorded == recorded
    assert own.counts.launched == 1 and len(seen.replayed) == 2


def test_a_larger_graph_serves_where_padding_costs_less_than_launches(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the levels that are wasted are worth a graph.  One level is launched: sixteen cost more."""
    own = graphs_of(decoder, seen, monkeypatch)
    for _ in range(3):
        drafted(decoder, pool, [2] * 4, [16] * 4)
    for _ in range(3):
        drafted(decoder, pool, [2] * 3, [8] * 3)
    assert seen.replayed[2:] == [(128, 16, 4)] * 3 and own.counts.padded == 3
    drafted(decoder, pool, [2] * 3, [1] * 3)
    assert seen.launched[-1] == (6, 1, 3)
    for _ in range(8):
        drafted(decoder, pool, [2] * 3, [8] * 3)
    assert seen.replayed[-1] == (64, 8, 4) and own.counts.recorded == 2


def test_three_chains_have_the_graph_of_four(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of levels, although tokens of three chains would fit into fewer rows."""
    own = graphs_of(decoder, seen, monkeypatch)
    for levels in range(1, 9):
        for chains in (4, 4, 3):
            drafted(decoder, pool, [1] * chains, [levels] * chains)
    assert own.counts.recorded == 8 and not own.counts.padded


def test_chains_behind_long_texts_have_the_graph_of_those_behind_short_ones(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has no room for runs before it, as after a rest of the drafts."""
    own = graphs_of(decoder, seen, monkeypatch)
    for _ in range(4):
        drafted(decoder, pool, [2] * 4, [2] * 4)
    launched = len(seen.launched)
    for tokens in ([40, 1, 2, 2], [3, 3, 20, 1]):
        drafted(decoder, pool, tokens, [2] * 4)
        assert seen.replayed[-1] == (16, 2, 4)
    assert len(seen.launched) == launched and len(own.graphs) == 1


def test_many_chains_have_a_graph_of_as_many_rows_as_there_are(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = graphs_of(decoder, seen, monkeypatch)
    for module in ("jobs", "sizes"):
        monkeypatch.setattr(f"outrider.backends.triton.{module}.ROWS", (16, 32, 64))
    for _ in range(6):
        drafted(decoder, pool, [1] * 20, [5] * 20)
    assert own.counts.recorded == 1 and seen.replayed[-1] == (64, 5, 32)
    drafted(decoder, pool, [4] * 20, [5] * 20)  # 80 rows, of which the last three of each have room
    assert len(own.graphs) == 1 and seen.replayed[-1] == (64, 5, 32)


def test_one_graph_is_recorded_in_a_step(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other size is launched once more, and recorded in the next step."""
    own = graphs_of(decoder, seen, monkeypatch)
    monkeypatch.setattr("outrider.backends.triton.graphs.WORTH", 0.0)
    for recorded in (1, 2, 2):
        with one_recording:
            drafted(decoder, pool, [2] * 4, [2] * 4)
            drafted(decoder, pool, [2] * 4, [5] * 4)
        assert own.counts.recorded == recorded
    assert own.counts.launched == 1 and own.counts.replayed == 5


def test_recordings_are_counted_over_all_backends(
    decoder: Decoder, pool: Pool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.backends.triton.graphs import counts_of_all

    monkeypatch.setattr("outrider.backends.triton.graphs.WORTH", 0.0)
    reserved = iter(range(0, 1000, 50))
    monkeypatch.setattr(seen, "reserved", lambda: next(reserved))
    kept, before = [graphs_of(decoder, seen, monkeypatch)], counts_of_all()
    drafted(decoder, pool, [1], [2])
    kept.append(graphs_of(decoder, seen, monkeypatch))
    drafted(decoder, pool, [1], [3])
    found = counts_of_all()
    assert found.recorded - before.recorded == 2 and found.bytes - before.bytes == 100
    assert found.seconds > before.seconds and [own.counts.bytes for own in kept] == [50, 50]


def test_chains_have_the_same_tokens_by_launches_by_their_graph_and_by_a_larger_one(
    decoder: Decoder, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and levels change from step to step; K/V too: surplus rows and levels store nothing."""
    from outrider.backends.triton import jobs

    monkeypatch.setattr(jobs, "ROWS", (2, 16))
    monkeypatch.setattr(jobs, "LEAST_KEYS", 32)
    monkeypatch.setattr("outrider.backends.triton.graphs.WORTH", 2.0)
    own, rng, other = graphs_of(decoder, Rerun(), monkeypatch), random.Random(1), decoder.pool(SLOTS * 32)
    for _ in range(16):
        chains = random_chains(rng, 3, 3)
        monkeypatch.setattr(decoder.backend, "graphs", own)
        ours = drafted(decoder, pool, *chains)
        monkeypatch.setattr(decoder.backend, "graphs", None)
        assert ours == drafted(decoder, other, *chains)
        assert torch.equal(pool.data, other.data)
    assert own.counts.launched and own.counts.padded and own.counts.replayed > own.counts.padded
