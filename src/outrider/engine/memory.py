"""Size of the K/V cache, and of the longest sequence in it."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from outrider.checkpoints.spec import Facts
from outrider.config import EngineOptions
from outrider.core.block_table import PAGE
from outrider.errors import CapacityError, ConfigError

log = logging.getLogger("outrider")


def plan_pages(
    slot_bytes: Counter[torch.device], max_len: int, max_nodes: int, options: EngineOptions
) -> int:
    """Number of pages that the K/V memory holds, at most the number that max_num_seqs full requests need.

    slot_bytes: bytes of one token position, by device.
    max_nodes: draft nodes of a row; they use free pages only, so the minimum does not count them.
    Raises CapacityError if one full request does not fit.
    """
    minimum = -(-max_len // PAGE)
    enough = -(-(max_len + max_nodes) // PAGE) * options.max_num_seqs
    limit, size = options.kv_cache_memory_bytes, slot_bytes.total()
    if limit:
        if any(device.type == "cpu" for device in slot_bytes) and limit > (most := _memory()):
            raise CapacityError(
                f"kv_cache_memory_bytes {limit:,} is more than the {most:,} bytes of this machine: lower it."
            )
        pages = limit // (size * PAGE)
    else:
        rooms = [
            (free_memory(device, options.gpu_memory_utilization), each) for device, each in slot_bytes.items()
        ]
        limit, size = min(rooms, key=lambda room: room[0] / room[1])
        pages = min(limit // (size * PAGE), enough)
    if pages < minimum:
        raise CapacityError(
            f"K/V memory of {limit:,} bytes holds {pages * PAGE} tokens, one request of max_model_len "
            f"{max_len} needs {minimum * PAGE} ({minimum * PAGE * size:,} bytes): "
            "raise kv_cache_memory_bytes or lower max_model_len."
        )
    return pages


def free_memory(device: torch.device, share: float) -> int:
    """Bytes that K/V may take by default.

    On a CPU a quarter of the free memory; on a GPU `share` of its memory, less what is in use.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - share) * total))
    try:
        lines = dict(
            line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024 // 4
    except (OSError, KeyError):
        return _memory() // 8


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
