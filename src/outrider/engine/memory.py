"""Size of the K/V cache, and of the longest sequence in it."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.cache.pages import Cache
from outrider.cache.snapshots import Snapshots
from outrider.checkpoints.spec import Facts
from outrider.config import EngineOptions
from outrider.core.block_table import PAGE
from outrider.core.step_input import StepInput
from outrider.drafting.base import Drafter
from outrider.errors import CapacityError, ConfigError
from outrider.models.base import Model

log = logging.getLogger("outrider")
SNAPSHOTS = 4  # of recurrent states, for each request that may run
NO_BYTES: Mapping[torch.device, int] = {}


@dataclass(frozen=True)
class Memory:
    """The page allocator with the pools of target and drafter, and the drafter's own allocators.

    max_num_seqs: requests that run at once; fewer than the option where recurrent states leave no memory
    """

    cache: Cache
    drafter_caches: Sequence[Cache]
    max_num_seqs: int


def build_cache(
    target: Model, drafter: Drafter, max_len: int, max_nodes: int, options: EngineOptions
) -> Memory:
    """Plan the K/V memory and allocate it.

    max_nodes: of the largest draft tree.
    Raises CapacityError if one full request does not fit.
    """
    slot_bytes = target.footprint + drafter.footprint(target.device)
    working = working_bytes(target, max_len, max_nodes, options)
    own, one = target.state_bytes(max_nodes), target.state_bytes(0)
    each = own + drafter.state_bytes(target.device)
    request = Counter({device: -(-max_len // PAGE) * PAGE * size for device, size in slot_bytes.items()})
    rows = plan_rows(each, request + working, options)
    states = rows if own else 0
    all_states = Counter({device: rows * size for device, size in each.items()})
    taken = all_states.total() + request.total() + working.total()
    num_snapshots = plan_snapshots(one, states, taken, options)
    all_states += Counter({device: num_snapshots * size for device, size in one.items()})
    num_pages = plan_pages(slot_bytes, max_len, max_nodes, options, working, all_states)
    snapshots = Snapshots(range(states, states + num_snapshots), drafter.needs.lookbehind)
    capacity = max_len + max_nodes + PAGE
    cache = Cache(num_pages, capacity, options.enable_prefix_caching, states, snapshots)
    pool = target.pool(num_pages * PAGE)
    if pool.states is not None:
        pool.states.grow(states + num_snapshots)
    storage = drafter.allocate(num_pages * PAGE, pool)
    cache.pools = [pool, *storage.pools]
    for drafter_cache in storage.caches:
        drafter_cache.prefix_caching = cache.prefix_caching
    return Memory(cache, storage.caches, rows)


def plan_pages(
    slot_bytes: Counter[torch.device],
    max_len: int,
    max_nodes: int,
    options: EngineOptions,
    working: Mapping[torch.device, int] = NO_BYTES,
    states: Mapping[torch.device, int] = NO_BYTES,
) -> int:
    """Number of pages that the K/V memory holds, at most the number that max_num_seqs full requests need.

    slot_bytes: bytes of one token position, by device.
    max_nodes: draft nodes of a row; they use free pages only, so the minimum does not count them.
    working: bytes to leave free for what a step computes, by device (`working_bytes`).
    states: bytes of the states of recurrent layers, by device; they are a part of the K/V memory.
    Raises CapacityError if one full request does not fit.
    """
    minimum = -(-max_len // PAGE)
    enough = -(-(max_len + max_nodes) // PAGE) * options.max_num_seqs
    limit, size, recurrent = options.kv_cache_memory_bytes, slot_bytes.total(), sum(states.values())
    working = Counter(working) + Counter(states)
    if limit:
        pages = max(0, limit - recurrent) // (size * PAGE)
        _check_limit(limit, pages, slot_bytes, working)
    else:
        limit, size = _tightest(slot_bytes, options.gpu_memory_utilization, working)
        pages = min(limit // (size * PAGE), enough)
    if pages < minimum:
        beside = f" beside {recurrent:,} bytes of recurrent states" if recurrent else ""
        raise CapacityError(
            f"K/V memory of {limit:,} bytes holds {pages * PAGE} tokens{beside}, one request of "
            f"max_model_len {max_len} needs {minimum * PAGE} ({minimum * PAGE * size:,} bytes): "
            "raise kv_cache_memory_bytes or lower max_model_len."
        )
    return pages


def plan_rows(each: Counter[torch.device], others: Mapping[torch.device, int], options: EngineOptions) -> int:
    """Requests that run at once: max_num_seqs, as far as their states fit in half of the K/V memory.

    each: bytes of the recurrent states of one request, of target and draft together, by device.
    others: bytes of the K/V of a full request, and of what a step computes, for which there must be room too.
    """
    limit, share, rows = options.kv_cache_memory_bytes, options.gpu_memory_utilization, options.max_num_seqs
    if limit and each:
        rows = min(rows, _half(limit, sum(others.values())) // each.total())
    elif not limit:
        for device, size in each.items():
            rows = min(rows, _half(free_memory(device, share), others.get(device, 0)) // size)
    rows = max(1, rows)
    if rows < options.max_num_seqs:
        log.warning(
            "%d requests run at once, not %d (max_num_seqs): recurrent states take %s bytes for each, and "
            "those of all may take half of the K/V memory",
            rows,
            options.max_num_seqs,
            f"{each.total():,}",
        )
    return rows


def _half(memory: int, others: int) -> int:
    """Half of the memory, or less if that leaves no room for the others."""
    return max(0, min(memory // 2, memory - others))


def plan_snapshots(one: Counter[torch.device], states: int, taken: int, options: EngineOptions) -> int:
    """Snapshots of recurrent states: some for each request, as far as they fit in half of the memory left.

    one: bytes of a snapshot.  taken: bytes of the states of all requests, the K/V of a full one, and what a
    step computes.
    """
    if not one or not options.enable_prefix_caching:
        return 0
    limit, share = options.kv_cache_memory_bytes, options.gpu_memory_utilization
    snapshots = SNAPSHOTS * states
    for device, size in one.items():
        memory = limit or free_memory(device, share)
        snapshots = max(0, min(snapshots, (memory - taken) // 2 // size))
    if not snapshots:
        log.warning(
            "prompts share no K/V: no memory is left for snapshots of recurrent states; lower max_num_seqs "
            "or raise kv_cache_memory_bytes"
        )
    return snapshots


def _check_limit(
    limit: int, pages: int, slot_bytes: Counter[torch.device], working: Mapping[torch.device, int]
) -> None:
    """Raise CapacityError for a kv_cache_memory_bytes, of so many pages, that a device does not have."""
    if any(device.type == "cpu" for device in slot_bytes) and limit > (most := _memory()):
        raise CapacityError(
            f"kv_cache_memory_bytes {limit:,} is more than the {most:,} bytes of this machine: lower it."
        )
    for device, each in slot_bytes.items():
        needed = pages * PAGE * each + working.get(device, 0)
        if device.type == "cuda" and needed > (most := _free_on_gpu(device)[0]):
            raise CapacityError(
                f"kv_cache_memory_bytes {limit:,} needs {needed:,} bytes on {device} with what a step "
                f"computes, and {most:,} are free: lower it."
            )


def _tightest(
    slot_bytes: Counter[torch.device], share: float, working: Mapping[torch.device, int]
) -> tuple[int, int]:
    """(bytes for K/V, bytes of a slot) of the device that holds the fewest slots by default."""
    rooms = list[tuple[int, int]]()
    for device, size in slot_bytes.items():
        rooms.append((max(0, free_memory(device, share) - working.get(device, 0)), size))
    return min(rooms, key=lambda room: room[0] / room[1])


def free_memory(device: torch.device, share: float) -> int:
    """Bytes that K/V may take by default.

    On a CPU a quarter of the free memory; on a GPU `share` of its memory, less what is in use.
    """
    if device.type == "cuda":
        free, total = _free_on_gpu(device)
        return max(0, int(free - (1 - share) * total))
    try:
        lines = dict(
            line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024 // 4
    except (OSError, KeyError):
        return _memory() // 8


def _free_on_gpu(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that are free, and all."""
    return torch.cuda.mem_get_info(device)


def working_bytes(
    decoder: Model, max_len: int, max_nodes: int, options: EngineOptions
) -> Counter[torch.device]:
    """Bytes that the largest step takes besides weights and K/V, by GPU: those of a forward that is profiled.

    It has `max_num_batched_tokens` tokens, and as many rows of logits as all requests with full draft trees.
    The first forward also compiles kernels.
    Raises CapacityError if it does not fit beside the weights.
    """
    gpus = [device for device in decoder.footprint if device.type == "cuda"]
    if not gpus or not decoder.in_process:
        return Counter()
    tokens = options.max_num_batched_tokens
    step_input = largest_step(tokens, max_len, min(tokens, options.max_num_seqs * (1 + max_nodes)))
    try:
        pool, meter = decoder.pool(tokens), PeakMemory(gpus)
        decoder.forward_step(step_input, pool, {})
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"a step of {tokens} tokens does not fit beside the weights on {', '.join(map(str, gpus))}: "
            "lower max_num_batched_tokens and max_num_seqs."
        ) from error
    del pool  # before `read`, which returns its memory to the device
    return meter.read()


def largest_step(tokens: int, max_len: int, rows: int) -> StepInput:
    """A built step of prompts of at most max_len tokens, with logits after the last `rows` of all tokens."""
    step_input = StepInput()
    for first in range(0, tokens, max_len):
        count = min(max_len, tokens - first)
        step_input.chain(array("i", range(first, first + count)), 0, [0] * count)
    step_input.logits_rows = [*range(tokens - rows, tokens)]
    return step_input.build()


class PeakMemory:
    """Most bytes that tensors took on each GPU since it was made, beyond those that were there."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        self.before = Counter({gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus})

    def read(self) -> Counter[torch.device]:
        taken = {gpu: torch.cuda.max_memory_allocated(gpu) - n for gpu, n in self.before.items()}
        torch.cuda.empty_cache()  # what the allocator keeps is not free
        return Counter(taken)


def _memory() -> int:
    """Bytes of this machine's memory."""
    if sys.platform == "win32":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX, which begins with its size
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return status[1]  # ullTotalPhys
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def longest(options: EngineOptions, spec: Facts) -> int:
    """The longest sequence, in tokens.  Raises ConfigError beyond the model's context."""
    length = options.max_model_len
    if length is None:
        return spec.unscaled
    if length > spec.context:
        raise ConfigError(
            f"max_model_len {length} exceeds the {spec.context} positions of {options.model!r}: "
            f"give at most {spec.context}."
        )
    if length > spec.unscaled:
        log.warning(
            "RoPE of %s is scaled for texts of %d tokens, whatever the length of a request; transformers "
            "does not scale up to %d tokens. For its short texts set max_model_len to at most that.",
            options.model,
            length,
            spec.unscaled,
        )
    return length
