"""Bindings made from kernels.h: the layout of its structs and the types of its functions."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.backends.base import Chain
from outrider.backends.cpu import bindings, fused
from outrider.core.params import DistributionParams

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@pytest.mark.parametrize("compiler", [COMPILER, "x86_64-w64-mingw32-gcc"], ids=["this system", "Windows"])
def test_structs_lie_in_memory_as_the_compiler_lays_them_out(compiler: str | None, tmp_path: Path) -> None:
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no such compiler here")
    checks = [
        f'_Static_assert(sizeof({n}) == {ctypes.sizeof(s)}, "{n}");' for n, s in bindings.STRUCTS.items()
    ]
    for name, made in bindings.STRUCTS.items():
        for field, _ in made._fields_:
            at = getattr(made, field).offset
            checks.append(f'_Static_assert(offsetof({name}, {field}) == {at}, "{name}.{field}");')
    source = tmp_path / "layout.c"
    included = [f'#include "{path}"' for path in bindings.HEADERS]
    source.write_text("\n".join([*included, "#include <stddef.h>", *checks]))
    subprocess.run([compiler, "-fsyntax-only", str(source)], check=True)
    assert len(checks) > 80


def test_every_struct_and_function_of_the_header_is_bound() -> None:
    text = "\n".join(path.read_text() for path in bindings.HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\} (\w+);", text)) == set(bindings.STRUCTS)
    assert set(re.findall(r"(\w+)\(", text)) == set(bindings.FUNCTIONS)


def test_types_of_a_function() -> None:
    result, arguments = bindings.FUNCTIONS["verify_trees"]
    assert result is None and arguments["vocab"] is ctypes.c_int64
    assert arguments["logits"] is arguments["queries"] is ctypes.c_void_p
    assert bindings.FUNCTIONS["stack"][1]["rows"] is ctypes.POINTER(bindings.STRUCTS["Rows"])
    assert bindings.FUNCTIONS["pick"][0] is ctypes.c_int64


def test_a_type_without_a_binding_is_named() -> None:
    with pytest.raises(AssertionError, match="no binding of 'short x'"):
        bindings._parse("void f(short x);")


def test_chains_are_packed_with_stream_numbers_of_64_bits() -> None:
    """A drafter of a mix numbers its streams from an offset of 64 bits, without a sign."""
    most = 2**64 - 1
    packed = fused._chains([Chain(1, 2, DistributionParams(), most, first_node=most, joint_floor=0.25)])
    chain = bindings.STRUCTS["Chain"].from_buffer_copy(packed)
    assert (chain.first_row, chain.max_tokens, chain.stream, chain.first_node) == (1, 2, most, most)
    assert (chain.temperature, chain.top_p, chain.min_joint, chain.probs) == (1.0, 1.0, 0.25, None)
