"""Graphs of jobs: padded steps that are replayed give the bits of steps that are launched."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE, Rerun
from kernel_cases import heads_of, ragged, sampled_row
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.clock import one_recording, record_at_once, working_time
from outrider.core.logprobs import Logprobs
from outrider.core.lora import LowRankUpdate
from outrider.core.params import DistributionParams, SamplingParams
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.tree import DraftTree
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.sampling.processors import processors_of
from outrider.testing import tiny_checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton import attention, graphs, jobs
from outrider.backends.triton.graphs import Graphs
from outrider.backends.triton.plan import PIECE, Plan, Sizes, Tables, columns_of, plan_of, total

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
SLOTS = 256


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "triton")
        patch.setattr(attention, "BLOCK", 16)
        patch.setattr(attention, "SPLIT", 32)
        patch.setattr(jobs, "ROWS", (1, 2, 4, 8))
        patch.setattr(jobs, "LEAST_KEYS", 32)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        path = tiny_checkpoint(Path(tmp_path_factory.mktemp("graphs")) / "llama", **sizes)
        yield Decoder(Checkpoint.open(path), Precision(torch.float32), DEVICE, 64)


@pytest.fixture
def own(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """The graphs of the decoder's backend, each recorded at once."""
    monkeypatch.setattr(graphs, "WORTH", 0.0)
    made = graphs.graphs_for(DEVICE) or Graphs(Rerun())
    monkeypatch.setattr(decoder.backend, "graphs", made)
    return made


def pair(decoder: Decoder) -> list[Pool]:
    pools = [decoder.pool(SLOTS) for _ in range(2)]
    pools[1].data.copy_(pools[0].data.normal_())
    return pools


def step_of(rng: random.Random, lengths: list[int], nodes: int) -> StepInput:
    """A token of each request, and trees."""
    step = StepInput()
    for table, length, paths in ragged(rng, lengths, nodes, SLOTS):
        step.chain(table, length - 1, [rng.randrange(50)])
        if paths:
            step.nodes(table, length, paths, [rng.randrange(50) for _ in paths])
    return step.build()


def eager(decoder: Decoder, step: StepInput, pool: Pool) -> Tensor:
    kept, decoder.backend.graphs = decoder.backend.graphs, None  # type: ignore[attr-defined]
    try:
        return decoder.forward(step, pool)
    finally:
        decoder.backend.graphs = kept  # type: ignore[attr-defined]


def test_replayed_steps_of_random_trees_have_the_bits_of_launched_ones(decoder: Decoder, own: Graphs) -> None:
    """K/V too: rows that pad a step store nothing."""
    torch.manual_seed(0)
    rng, (ours, theirs) = random.Random(1), pair(decoder)
    for _ in range(9):
        step = step_of(rng, [rng.randint(1, 40) for _ in range(rng.randint(1, 3))], 2)
        assert torch.equal(decoder.forward(step, ours), eager(decoder, step, theirs))
        assert torch.equal(ours.data, theirs.data)
    assert own.counts.replayed and own.counts.recorded < 9


def level_of(rng: random.Random, hidden: bool) -> StepInput:
    """Nodes of the second level of two trees; hidden: with paths that only the device knows."""
    step, paths = StepInput(), list[list[int]]()
    for first, count in ((0, 3), (100, 1)):
        table = array("i", range(first, first + 30))
        own = [[first + 40 + rng.randrange(4), first + 50 + i] for i in range(count)]
        paths += own
        shown = [[path[-1]] * 2 for path in own] if hidden else own
        step.nodes(table, 20 + count, shown, [rng.randrange(50) for _ in own])
    step.build()
    if hidden:
        step.device_paths = torch.tensor(paths, dtype=torch.int32, device=DEVICE)
    return step


def test_paths_that_only_the_device_knows_are_read_by_launches_and_graphs(
    decoder: Decoder, own: Graphs
) -> None:
    torch.manual_seed(0)
    ours, theirs = pair(decoder)
    for seed in range(4):
        step = level_of(random.Random(seed), True)
        found = decoder.forward(step, ours)
        assert torch.equal(found, eager(decoder, level_of(random.Random(seed), False), theirs))
        assert torch.equal(found, eager(decoder, level_of(random.Random(seed), True), theirs))
    assert own.counts.replayed


def test_a_recording_that_fails_leaves_its_sizes_without_a_graph(
    decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is computed, others are recorded, and there is one warning.  Later it is tried again."""
    record = own.recorder.record
    short: list[object] = []

    def fail(run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        if len(short) < 2:
            short.append(run)
            raise torch.OutOfMemoryError("out of memory")
        return record(run)

    monkeypatch.setattr(own.recorder, "record", fail)
    monkeypatch.setattr(graphs, "RETRY", 4 * (graphs.LAUNCHED - 1))
    rng, (ours, theirs) = random.Random(10), pair(decoder)
    for length, recorded in ((5, 0), (5, 0), (40, 0), (40, 0), (5, 0), (5, 0), (5, 1)):
        step = step_of(rng, [length], 0)
        assert torch.equal(decoder.forward(step, ours), eager(decoder, step, theirs))
        assert own.counts.recorded == recorded
    assert torch.equal(ours.data, theirs.data)
    assert (
        own.counts.failed == 2 and len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    )


def answered(decoder: Decoder, step: StepInput, tree: DraftTree, pool: Pool) -> tuple[list[Tensor], Any]:
    """Logits and hidden states of a step, and the verified path of the tree after its first row."""
    verifier, states = decoder.backend.verifier, {0: Tensor(), 1: Tensor(), FINAL: Tensor()}
    assert verifier is not None
    queries = verifier.queries("match")
    queries.add(7, sampled_row([1], DistributionParams(0.8, top_k=30)), tree, 0)
    logits = decoder.forward_step(step, pool, states, queries).clone()
    return [logits, *states.values()], dict(queries.read())


def test_steps_of_a_whole_model_have_the_bits_and_the_answers_of_launched_ones(
    decoder: Decoder, own: Graphs
) -> None:
    """Logits of some rows, states between the layers and after the last norm, and verified trees."""
    torch.manual_seed(0)
    ours, theirs = pair(decoder)
    for seed in range(8):
        step, rng = StepInput(), random.Random(seed)
        table, length = array("i", range(60)), rng.choice((20, 21, 50))
        step.chain(table, length - 2, [rng.randrange(50), rng.randrange(50)])
        tree = DraftTree([rng.randrange(3) for _ in range(3)], [-1, 0, -1], [0.5] * 3)
        step.nodes(table, length, [[length], [length, length + 1], [length + 2]], tree.tokens)
        step.logits_rows = [1, 2, 3, 4]
        found, paths = answered(decoder, step.build(), tree, ours)
        kept, decoder.backend.graphs = own, None  # type: ignore[attr-defined]
        expected, their_paths = answered(decoder, step.build(), tree, theirs)
        decoder.backend.graphs = kept  # type: ignore[attr-defined]
        assert all(map(torch.equal, found, expected)) and paths == their_paths
        assert torch.equal(ours.data, theirs.data)
    assert own.counts.recorded < 4 and own.counts.replayed > 3


def test_a_graph_with_room_serves_fewer_edits_and_values(
    decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and log-probabilities of one row, then less of both; each with the bits of launches."""
    torch.manual_seed(0)
    (ours, theirs), verifier = pair(decoder), decoder.backend.verifier
    assert verifier is not None
    kept = decoder.backend.graphs  # type: ignore[attr-defined]
    for count, long, nodes in ((9, True, 3), (2, False, 1), (0, False, 3)):
        tree, step = DraftTree([1, 2, 1][:nodes], [-1, 0, -1][:nodes], [0.5] * nodes), StepInput()
        step.chain(table := array("i", range(60)), 19, [7])
        step.nodes(table, 20, [[20], [20, 21], [22]][:nodes], tree.tokens)
        step.logits_rows = [*range(step.length)]
        found = list[Any]()
        for pool, graphs_used in ((ours, kept), (theirs, None)):
            decoder.backend.graphs = graphs_used  # type: ignore[attr-defined]
            bias = dict.fromkeys(range(200 if long else 2), 0.5)
            asked = SamplingParams(presence_penalty=2.0, logit_bias=bias)
            row = sampled_row(
                [1, 2, 3], DistributionParams(0.8), processors=processors_of(asked, 1, 100, [], [])
            )
            row.logprobs = Logprobs("raw_logprobs", count, None)
            queries = verifier.queries("match")
            queries.add(7, row, tree, 0)
            decoder.forward_step(step.build(), pool, {}, queries)
            found.append((dict(queries.read()), queries.values(7, [-1, *range(nodes)])))
        assert found[0] == found[1] and len(found[0][1][0].ids) == count
        monkeypatch.setattr(graphs, "WORTH", 9.0)  # the first is recorded at once, no other
    decoder.backend.graphs = kept  # type: ignore[attr-defined]
    assert own.counts.recorded == 1 and own.counts.replayed == 3


def test_steps_with_adapters_and_states_have_the_updates_of_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same step by the operations of a model one after another."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "SPLIT", 32)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = tiny_checkpoint(tmp_path / "llama", num_hidden_layers=3, **sizes)
    model = Decoder(Checkpoint.open(path), Precision(torch.float32), DEVICE, 64)
    torch.manual_seed(0)
    adapter = model.pack_adapter(
        [{"o": LowRankUpdate(torch.randn(2, 32), torch.randn(32, 2), 0.5)} for _ in range(3)]
    )
    step, found = step_of(random.Random(12), [9, 5], 2), list[list[Tensor]]()
    step.adapt(0, adapter)
    step.logits_rows = [*range(step.length)]
    for forward in (model.forward_step, super(Decoder, model).forward_step):
        states = {1: Tensor(), 2: Tensor(), FINAL: Tensor()}
        logits = forward(step, model.pool(SLOTS), states)
        found.append([logits, *states.values()])
    assert all(map(torch.equal, *found))


def test_results_of_earlier_steps_stay(decoder: Decoder, own: Graphs) -> None:
    rng, (pool, _) = random.Random(2), pair(decoder)
    results = [decoder.forward(step_of(rng, [5], 0), pool) for _ in range(4)]
    kept = [result.clone() for result in results]
    decoder.forward(step_of(rng, [6], 0), pool)
    assert own.counts.replayed == 5
    assert all(map(torch.equal, results, kept))


def test_a_long_step_has_no_graph(decoder: Decoder, own: Graphs) -> None:
    rng, (pool, _) = random.Random(3), pair(decoder)
    for _ in range(2):
        decoder.forward(step_of(rng, [3] * (jobs.ROWS[-1] + 1), 0), pool)
    assert not own.graphs and not own.counts.recorded


def test_recording_is_no_working_time(decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller sees what a step takes again."""
    record = own.recorder.record

    def slow(run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        time.sleep(2)
        return record(run)

    monkeypatch.setattr(own.recorder, "record", slow)
    rng, (pool, _) = random.Random(11), pair(decoder)
    began, worked = time.perf_counter(), working_time()
    decoder.forward(step_of(rng, [5], 0), pool)
    assert time.perf_counter() - began > 2 > working_time() - worked
    assert own.counts.recorded == own.counts.replayed == 1


def test_each_pool_and_each_choice_of_layers_has_its_own_graph(decoder: Decoder, own: Graphs) -> None:
    rng, pools = random.Random(4), pair(decoder)
    less = decoder.skip_sublayers([0], [1])
    step = step_of(rng, [5], 0)
    expected = decoder.forward(step, pools[0], less).clone()
    for _ in range(3):
        for pool in pools:
            decoder.forward(step, pool)
        assert torch.equal(decoder.forward(step, pools[0], less), expected)
    assert len(own.graphs) == 3


def test_graphs_go_with_their_pool(decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, pools = random.Random(5), pair(decoder)
    monkeypatch.setattr(own.recorder, "record", lambda run: lambda: (torch.zeros(1, 32),))  # keeps nothing
    for pool in pools * 2:
        decoder.forward(step_of(rng, [5], 0), pool)
    assert len(own.graphs) == 2
    del pools[0], pool
    gc.collect()
    assert len(own.graphs) == 1


def test_graphs_go_with_their_layers(decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only with the pool: heads take new weights while their pool stays."""
    rng, (pool, _) = random.Random(9), pair(decoder)
    monkeypatch.setattr(own.recorder, "record", lambda run: lambda: (torch.zeros(1, 32),))  # keeps nothing
    blocks = [decoder.parts, decoder.skip_sublayers([0], [1])]
    for used in blocks * 2:
        decoder.forward(step_of(rng, [5], 0), pool, used)
    assert len(own.graphs) == 2
    del blocks, used
    gc.collect()
    assert len(own.graphs) == 1


def test_the_graph_that_was_used_longest_ago_goes(
    decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    rng, (pool, _) = random.Random(6), pair(decoder)
    for length in (5, 5, 40, 40, 5, 60, 60):  # keys: 32, 64, 32, 64
        decoder.forward(step_of(rng, [length], 0), pool)
    decoder.forward(step_of(rng, [5, 5], 0), pool)
    decoder.forward(step_of(rng, [5, 5], 0), pool)
    assert [(Sizes(*key.sizes).rows, Sizes(*key.sizes).keys) for key in own.graphs] == [(1, 64), (2, 32)]


def test_sizes_in_turn_do_not_drop_each_others_graphs(
    decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph goes for a size that comes often enough while that graph is not used."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    monkeypatch.setattr(graphs, "WORTH", 2 * (graphs.LAUNCHED - 1))
    rng, (pool, _) = random.Random(8), pair(decoder)
    for length in (5, 40) * 8:
        decoder.forward(step_of(rng, [length], 0), pool)
    assert (own.counts.recorded, own.counts.replayed, own.counts.launched) == (1, 6, 10)
    for length in (40,) * 4:
        decoder.forward(step_of(rng, [length], 0), pool)
    assert (own.counts.recorded, own.counts.dropped) == (2, 1)
    assert [Sizes(*key.sizes).keys for key in own.graphs] == [64]


def test_a_size_is_recorded_at_its_first_use_in_a_warm_up(
    decoder: Decoder, own: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several in one step, however rare they are."""
    monkeypatch.setattr(graphs, "WORTH", 100.0)
    rng, (pool, _) = random.Random(8), pair(decoder)
    with one_recording, record_at_once():
        for count in (1, 2, 4):
            decoder.forward(step_of(rng, [5] * count, 0), pool)
    assert (own.counts.recorded, own.counts.launched) == (3, 0)


def test_a_padded_plan_holds_the_numbers_of_the_plan() -> None:
    rng, spec = random.Random(7), heads_of(2, 1, 16, False)
    for _ in range(20):
        step = step_of(rng, [rng.randint(1, 30) for _ in range(rng.randint(1, 2))], 3)
        sizes, exact = jobs.padded(Sizes.of(step), spec), plan_of(step, torch.device("cpu"))
        assert sizes is not None
        flat = torch.zeros(total(sizes), dtype=torch.int32)
        tables = Tables([step])
        numbers = torch.tensor(columns_of(step, sizes, tables) + tables.slots, dtype=torch.int32)
        flat[: len(numbers)] = numbers
        wide, n = Plan.of(flat, sizes), step.length
        for name in ("positions", "contexts", "num_keys", "shifts", "tables"):
            assert torch.equal(getattr(wide, name)[:n], getattr(exact, name))
            assert not getattr(wide, name)[n:].any()
        assert torch.equal(wide.slots[:n], exact.slots) and (wide.slots[n:] == -1).all()
        assert torch.equal(wide.table_slots[: len(exact.table_slots)], exact.table_slots)
        pieces = sum(-(-(end - first) // PIECE) for first, end in pairwise(step.query_start))
        assert torch.equal(wide.pieces[: 3 * pieces], exact.pieces[: 3 * pieces])
        assert not wide.pieces[3 * pieces :].any()
        if step.max_path_len:
            paths = wide.path_slots.view(-1, sizes.path)[:n, : step.max_path_len]
            assert torch.equal(paths, exact.path_slots.view(n, -1))
