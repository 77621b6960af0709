"""Instruction sets that the C kernels are compiled for, and those that this processor has."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class Target(NamedTuple):
    """An instruction set: its compiler flags, and the features of /proc/cpuinfo that it needs."""

    flags: tuple[str, ...]
    needs: frozenset[str]


def _x86_64(level: str, *features: str) -> Target:
    """A level of x86-64, and features beyond it: -mavx512bf16, -mamx-bf16."""
    beyond = tuple(f"-m{feature.replace('_', '-' if feature in AMX else '')}" for feature in features)
    return Target((f"-march=x86-64-{level}", *beyond), LEVELS[level] | set(features))


AMX = frozenset(("amx_bf16", "amx_tile"))
AVX2 = frozenset(("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
LEVELS = {"v3": AVX2, "v4": AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}}
X86_64 = {
    "avx2": _x86_64("v3"),
    "avx_vnni": _x86_64("v3", "avx_vnni"),
    "avx512": _x86_64("v4"),
    "avx512_vnni": _x86_64("v4", "avx512_vnni"),
    "avx512_bf16": _x86_64("v4", "avx512_vnni", "avx512_bf16"),
    "amx": _x86_64("v4", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
}
DOTPROD = "-march=armv8.2-a+dotprod"
ARM64 = {  # a compiler takes the last -march
    "neon_dotprod": Target((DOTPROD,), frozenset(("asimddp",))),
    "neon_bf16": Target((DOTPROD, f"{DOTPROD}+bf16"), frozenset(("asimddp", "bf16"))),
}
OPTIONAL_FLAGS = ("-mavx", "-mamx", DOTPROD)
TARGETS = {  # the best one last; `portable` has NEON on arm64, where every processor does
    "portable": Target((), frozenset()),
    **(ARM64 if platform.machine().lower() in ("aarch64", "arm64") else X86_64),
}
if (
    platform.system() == "Windows"
):  # is not asked for tiles, and gcc passes their strides as a long of 32 bits
    TARGETS.pop("amx", None)
CPUINFO = Path("/proc/cpuinfo")
TORCH_NAMES = {  # of features in torch.cpu.get_capabilities, where they differ from those of Linux
    **{f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "cd", "dq", "vl")},
    "abm": "lzcnt", "asimddp": "dot", "bmi1": "bmi", "fma": "fma3",
    "movbe": "bmi2",  # not listed; every processor with AVX2 and bmi2 has it
}  # fmt: skip


def available() -> list[str]:
    """The instruction sets that this processor has, the best one last."""
    features = processor()
    return [name for name, target in TARGETS.items() if target.needs <= features]


def processor() -> frozenset[str]:
    """Features of this processor that this process may use; none where the system does not list them."""
    if platform.system() == "Windows":
        return torch_features()
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset(("asimddp", *(("bf16",) if _sysctl("hw.optional.arm.FEAT_BF16") else ())))
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):  # of x86-64, of arm64
                features = frozenset(line.split())
                return features if features.isdisjoint(AMX) or _allows_tiles() else features - AMX
    return frozenset()


def torch_features() -> frozenset[str]:
    """The features that torch finds by cpuid and xgetbv, by their names in /proc/cpuinfo.

    AMX is none of them: a process has to ask its system for tiles, and only Linux is asked.
    Older versions of torch know AVX2 and AVX-512, nothing beyond.
    """
    import torch  # not where a wheel is built

    read: Any = getattr(torch.cpu, "get_capabilities", None)
    if read is None:
        levels = {"AVX2": LEVELS["v3"], "AVX512": LEVELS["v4"]}
        return levels.get(torch.backends.cpu.get_cpu_capability(), frozenset())
    listed: Mapping[str, Any] = read()
    known = frozenset[str]().union(*(target.needs for target in TARGETS.values())) - AMX
    return frozenset(feature for feature in known if listed.get(TORCH_NAMES.get(feature, feature)))


def _sysctl(name: str) -> int:
    """A number that macOS tells of the machine; 0 for names that it does not know."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    by_name = ctypes.CDLL(None).sysctlbyname
    by_name(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value


def _allows_tiles() -> bool:
    """Ask Linux for AMX tiles, which it gives to a process and those that it forks.

    It refuses where the signal stack of a thread is too small to save them, or by a filter of system calls.
    """
    arch_prctl, request_permission, tile_data = map(ctypes.c_long, (158, 0x1023, 18))
    system = ctypes.CDLL(None).syscall
    system.restype = ctypes.c_long
    return bool(system(arch_prctl, request_permission, tile_data) == 0)
