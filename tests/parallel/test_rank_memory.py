"""Memory of ranks: each holds its slices of the weights only, also while it loads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from outrider import LLM
from outrider.testing import tiny_checkpoint

SMALL = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 21}
INTERVAL = 0.003  # seconds between two looks at the ranks
PYTHON = 15e6  # bytes: a rank of a tiny model takes 12 million
# Memory goes back to the system when it is freed. Otherwise the heap keeps, by chance, some of what packing
# took.
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def private_bytes(pid: int) -> int:
    """Memory that a process has written to and shares with no other: mapped files do not count."""
    found = re.search(r"Private_Dirty: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peaks_while_loading(folder: str, parts: int) -> list[int]:
    """The most private memory of each rank; of rank 0, what this process gains."""
    own = os.getpid()
    before, peaks, over, began = {*children(own)}, Counter[int](), threading.Event(), private_bytes(own)

    def watch() -> None:
        while not over.wait(INTERVAL):
            with contextlib.suppress(OSError, AssertionError):  # a process that has just ended
                peaks[own] = max(peaks[own], private_bytes(own))
                for launcher in {*children(own)} - before:
                    for rank in children(launcher):
                        peaks[rank] = max(peaks[rank], private_bytes(rank))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        llm = LLM(folder, tensor_parallel_size=parts, **SMALL)
        ranks = children(llm.engine.decoder.group.ranks.process.pid)
    finally:
        over.set()
        watching.join()
    found = [max(peaks[rank], private_bytes(rank)) for rank in ranks]
    llm.engine.decoder.close()
    return [peaks[own] - began, *found]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="needs Linux")
@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_has_its_part_of_the_weights_in_memory(parts: int, tmp_path: Path) -> None:
    """And two linears more, while it packs one."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=12, intermediate_size=1536, **sizes)
    share = (tmp_path / "model.safetensors").stat().st_size / parts
    assert share * parts > 120e6
    # in a process of its own: what other tests have left in the heap would count as rank 0's
    command = [sys.executable, __file__, folder, str(parts)]
    out = subprocess.run(command, env={**os.environ, **NOTHING_KEPT}, capture_output=True, text=True)
    peaks = json.loads(out.stdout.splitlines()[-1])
    assert len(peaks) == parts
    assert all(peak < 1.4 * share + PYTHON for peak in peaks) and all(peak > share for peak in peaks[1:])


if __name__ == "__main__":
    print(json.dumps(peaks_while_loading(sys.argv[1], int(sys.argv[2]))))
