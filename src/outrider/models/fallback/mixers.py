"""Modules of transformers' modelling code with recurrences, routed to ours.

The families share the names of the functions for convolutions and recurrences, which are globals of their
modelling files.  A module whose `forward` uses some of them gets a copy of `forward` with other globals, and
outside of a call of ours the copy uses transformers' functions.  Nothing is changed in transformers.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from outrider.models.fallback.recurrences import RECURRENCES
from outrider.models.fallback.recurrent import RecurrentCall

# Layer types without a recurrence, by their names in configs.
STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
CurrentCall = Callable[[nn.Module], RecurrentCall | None]


def route(model: nn.Module, call_of: CurrentCall) -> bool:
    """Route the recurrences of a model; returns False if it has none.

    call_of: the call in which a module runs; None in transformers' own forward
    """
    module: Any
    found = False
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if names := _recurrences_in(forward):
            found = True
            module.forward = functools.partial(_with_globals(forward, names, module, call_of), module)
    return found


def is_stateful(model: Any) -> bool:
    """Whether a transformers model keeps recurrent states.

    A model of a hybrid family does not if its config lists only other layers.
    """
    kinds = getattr(model.config, "layer_types", None)
    return getattr(model, "_is_stateful", False) and not (kinds and STATELESS.issuperset(kinds))


def _recurrences_in(forward: Callable[..., Any]) -> set[str]:
    """Names of the recurrences that a function reads as globals; none for one that is not written in Python.

    The names in its code are also those of attributes.
    """
    if not isinstance(forward, types.FunctionType):
        return set()
    return RECURRENCES.keys() & {*forward.__code__.co_names} & forward.__globals__.keys()


def _with_globals(
    forward: types.FunctionType, names: set[str], module: nn.Module, call_of: CurrentCall
) -> Callable[..., Any]:
    """A copy of `forward` whose globals of these names are ours."""
    scope = dict(forward.__globals__)
    for name in names:
        scope[name] = _choosing(scope[name], RECURRENCES[name], module, call_of)
    copy = types.FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _choosing(
    theirs: Callable[..., Any], ours: Callable[..., Any], module: nn.Module, call_of: CurrentCall
) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        call = call_of(module)
        return theirs(*args, **kwargs) if call is None else ours(call, *args, **kwargs)

    return choose
