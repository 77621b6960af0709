"""Compiler flags for the kernels of NEON on x86-64."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "backends" / "emulated"
DEFINED = ("__ARM_NEON", "__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC")
CALLED = "-DEMULATED=static __attribute__((noinline, unused))"  # instructions are calls: compiles faster
EMULATED = [f"-I{FOLDER}", CALLED, *(f"-D{name}" for name in DEFINED)]
