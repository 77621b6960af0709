"""Hidden states at the inputs of the layers of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.errors import ModelError


def layers_of(body: nn.Module, count: int, attended: Sequence[nn.Module]) -> nn.ModuleList | None:
    """The list of a body's decoder layers; None if it is not found.

    count:    number of layers
    attended: modules that ran attention, in order; every layer must contain at least one
    This excludes lists of experts, norms or attentions, and the layers of a vision tower.
    """

    def holds_them(found: nn.ModuleList) -> bool:
        owners = {
            id(inner): i for i, layer in enumerate(found) for inner in layer.modules() if inner is not layer
        }
        order = [owners.get(id(module), -1) for module in attended]
        return order == sorted(order) and set(order) == set(range(count))

    lists = (m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(filter(holds_them, lists), None)


@contextmanager
def tapping(layers: nn.ModuleList | None, taps: dict[int, Tensor]) -> Iterator[None]:
    """Copy the layer inputs of a forward of [1, n, hidden] into `taps`, within the context.

    taps: layer j -> states [n, hidden] at its input; the number of layers: output of the last one.
    Raises ModelError if `layers` is None.
    """
    if not taps:
        yield
        return
    if layers is None:
        raise ModelError(
            "the modules that are the layers of this model cannot be recognized, nor the states between them."
        )

    def entering(layer: int) -> Any:
        def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            taps[layer] = (given[0] if given else named["hidden_states"])[0].clone()

        return keep

    def leaving(_: nn.Module, __: Any, out: Any) -> None:
        taps[len(layers)] = (out[0] if isinstance(out, tuple) else out)[0].clone()

    hooks = [
        layers[layer].register_forward_pre_hook(entering(layer), with_kwargs=True)
        if layer < len(layers)
        else layers[-1].register_forward_hook(leaving)
        for layer in taps
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
