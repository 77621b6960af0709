"""Compiles both kinds of programs of the attention for a CUDA device, and compares how they are laid out.

`python triton_layouts.py 90`.  The order of a sum over a tile is that of its layout.  Where layouts differ, a
key adds other bits in the path of a node than in a table.  Prints "same" or the first difference of a shape.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime import driver, jit

from outrider.backends.triton import attention

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
SHAPES = ((32, 8, 128), (6, 2, 64), (8, 8, 64))
OPERATIONS = ('"tt.reduce"', "warp_group_dot ", "tt.dot ", "math.exp")
found: dict[bool, str] = {}


def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of a launch."""
    backend = make_backend(TARGET)
    binder = jit.create_function_from_signature(self.signature, self.params, backend)
    bound, kinds, options = binder(*args, **named)
    parsed, signature, constants, attributes = self._pack_args(backend, named, bound, kinds, options)
    source = ASTSource(self, signature, constants, attributes)
    found[named["OWN"]] = compile(source, target=TARGET, options=parsed.__dict__).asm["ttgir"]


def laid_out(code: str) -> list[str]:
    """The operations that depend on layouts, with theirs, in order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    lines, operations = code.split("\n"), list[str]()
    for at, line in enumerate(lines):
        if any(name in line for name in OPERATIONS):
            typed = next(line for line in lines[at:] if "tt.reduce" not in line and "tensor<" in line)
            typed = re.sub(r" loc\(.*", "", typed.split(":", 1)[1])
            operations.append(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), typed))
    return operations


def main() -> None:
    jit.JITFunction.run = compiled
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))  # asked while a kernel compiles
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, head_dim in SHAPES:
            attention._same_with_paths(heads, kv_heads, head_dim, torch.device("cpu"), dtype)
            shared, own = (laid_out(found[kind]) for kind in (False, True))
            different = [pair for pair in zip(shared, own) if pair[0] != pair[1]]
            same = not different and len(shared) == len(own) >= 6
            print(dtype, heads, kv_heads, head_dim, "same" if same else different[:1])


if __name__ == "__main__":
    main()
