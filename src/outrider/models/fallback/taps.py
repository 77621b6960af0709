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
    attended: modules that ran attention or recurrences, in order; some layer of the list contains each
    This excludes lists of experts, norms or attentions, and the layers of a vision tower.
    """

    for modules in body.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) == count:
            layer_of = dict[int, int]()  # id of an inner module -> number of its layer
            for number, layer in enumerate(modules):
                layer_of |= {id(inner): number for inner in layer.modules() if inner is not layer}
            order = [layer_of.get(id(module), -1) for module in attended]
            if order == sorted(order) and -1 not in order:
                return modules
    return None


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

    hooks = [_tap(layers, layer, taps) for layer in taps]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tap(layers: nn.ModuleList, layer: int, taps: dict[int, Tensor]) -> Any:
    """The handle of a hook that copies the input of one layer, or the output of the last, into `taps`."""

    def entering(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden_states = given[0] if given else named["hidden_states"]
        taps[layer] = hidden_states[0].clone()

    def leaving(_: nn.Module, __: Any, out: Any) -> None:
        hidden_states = out[0] if isinstance(out, tuple) else out
        taps[layer] = hidden_states[0].clone()

    if layer == len(layers):
        return layers[-1].register_forward_hook(leaving)
    return layers[layer].register_forward_pre_hook(entering, with_kwargs=True)
