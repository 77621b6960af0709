"""ctypes bindings made from headers: a struct class for a typedef, a signature for a prototype.

A pointer to a struct takes an instance, an array or None.  Every other pointer takes an address or None.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADERS = [Path(__file__).parent / "csrc" / name for name in ("kernels.h", "recurrent.h", "runs.h")]
_SCALARS = ("char", "int", "int8_t", "int32_t", "int64_t", "uint64_t", "float", "double")
NUMBERS: dict[str, Any] = {name: getattr(ctypes, f"c_{name.removesuffix('_t')}") for name in _SCALARS}
NUMBERS["void"] = None
_STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
_FUNCTION = re.compile(r"^(\w+) \*?(\w+)\(([^;{]*)\);", re.MULTILINE)
_DECLARATION = re.compile(r"(?:const )?(\w+) (.*)", re.DOTALL)


def _declared(text: str, types: dict[str, Any], separate: str) -> Iterator[tuple[str, Any]]:
    """Name and type of what C declares, for example `const float *a, *b; int64_t rank`."""
    for declaration in filter(None, (part.strip() for part in text.split(separate))):
        found = _DECLARATION.fullmatch(declaration)
        assert found and found[1] in types, f"no binding of {declaration!r} in the headers"
        for name in found[2].split(","):
            stars, base = name.count("*"), types[found[1]]
            if stars:
                one = stars == 1 and found[1] not in NUMBERS and separate == ","
                base = ctypes.POINTER(base) if one else ctypes.c_void_p
            yield name.replace("const", "").strip(" *"), base


def _parse(text: str) -> tuple[dict[str, Any], dict[str, tuple[Any, dict[str, Any]]]]:
    """The structs, and of every function its result type and its arguments by name."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    types = dict(NUMBERS)
    for body, name in _STRUCT.findall(text):
        types[name] = type(name, (ctypes.Structure,), {"_fields_": [*_declared(body, types, ";")]})
    functions = {
        name: (types[result], dict(_declared("" if arguments == "void" else arguments, types, ",")))
        for result, name, arguments in _FUNCTION.findall(text)
    }
    return {name: made for name, made in types.items() if name not in NUMBERS}, functions


STRUCTS, FUNCTIONS = _parse("\n".join(path.read_text(encoding="utf-8") for path in HEADERS))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the argument and result types of all functions of the headers."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [*arguments.values()], result
    return library
