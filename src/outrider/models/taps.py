"""What enters the layers of somebody else's model, kept on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.errors import ModelError


@contextmanager
def tapping(body: nn.Module, layers: int, taps: dict[int, Tensor]) -> Iterator[None]:
    """While it lasts, a forward of [1, n, hidden] puts into taps[j] the states [n, hidden] that enter layer j; j = layers: those that
    leave the last one.  Raises ModelError where the layers cannot be told."""
    if not taps:
        yield
        return
    found = next((m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), None)
    if found is None:
        raise ModelError(f"{type(body).__name__} has no list of its {layers} layers: the states between them cannot be seen.")

    def entering(layer: int) -> Any:
        def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            taps[layer] = (given[0] if given else named["hidden_states"])[0].clone()

        return keep

    def leaving(_: nn.Module, __: Any, out: Any) -> None:
        taps[layers] = (out[0] if isinstance(out, tuple) else out)[0].clone()

    hooks = [
        found[layer].register_forward_pre_hook(entering(layer), with_kwargs=True)
        if layer < layers
        else found[-1].register_forward_hook(leaving)
        for layer in taps
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
