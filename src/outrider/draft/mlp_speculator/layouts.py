"""Published files of MLP speculators.  Ours number modules in a row, whether there are several or one.

    IBM, Arctic MLP   emb.{i} proj.{i} ln.{i} head.{i}, with or without "speculator." in front
    Arctic sum_rnn    emb.{i}.{j} proj.{i}.{j} ln.{i}.{j} head.{i}: norms (each before a GELU) and linears
    Arctic sum_lstm   forget_emb.0 input_emb.0 output_emb.0 cell_emb.0, forget_proj.{0,1} … cell_proj.{0,1},
                      cell_ln.0 state_ln.0 head.{i}; or projs.{0,1}, the four side by side, as ArcticInference
                      runs them

i is the step.  Where steps share their weights, the file holds them once or under all names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.validate import is_whole
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.layouts import HeadFormat, Layout, numbers, unchanged

KINDS = ("emb", "proj", "ln", "head")
GATES = ("forget", "input", "output", "cell")  # side by side in this order
PREFIX = "speculator."
EXPORTED = ("reference", "vllm", "arctic")
ROWS = (
    *((f"{kind}.{{i}}.{{kind}}", f"{kind}.{{i}}.0.{{kind}}") for kind in KINDS[:3]),
    *unchanged(*(f"{kind}.{{i}}.{{j}}.{{kind}}" for kind in KINDS[:3]), "head.{i}.weight"),
    *unchanged(*(f"{gate}_{part}.{{i}}.weight" for gate in GATES for part in ("emb", "proj"))),
    *unchanged("projs.{i}.weight", "cell_ln.0.{kind}", "state_ln.0.{kind}"),
)


@dataclass(frozen=True)
class Steps:
    """The steps of a head.

    count: n_predict, the number of steps trained.  tied: they share their weights.
    found: kind of weights -> the steps that have some in the file.
    """

    count: int
    tied: bool
    found: Mapping[str, set[int]]

    @staticmethod
    def of(head: Head) -> Steps:
        """Steps of a head under our names.  Raises ModelError for an incomplete file."""
        kinds = KINDS[3:] if is_lstm(head) else KINDS
        found = {kind: numbers(head, f"{kind}.{{i}}.{{rest}}") for kind in kinds}
        stored = 1 + max((i for steps in found.values() for i in steps), default=-1)
        whole = all(steps == set(range(stored)) for steps in found.values())
        tied = is_lstm(head) or (found["emb"] == found["ln"] == {0} and found["proj"] == {0, 1})
        tied = tied or head.config.get("tie_weights") is True
        if not (tied or whole):
            kind, i = next(
                (kind, i) for kind, steps in found.items() for i in range(stored) if i not in steps
            )
            raise ModelError(f"{head.name!r} has weights for {stored} steps, but no {kind}.{i}.")
        if not tied or stored > 2 or (whole and stored == 2):
            return Steps(stored, tied, found)
        announced: Any = head.config.get("n_predict")
        if not is_whole(announced, 1):
            raise ModelError(
                f"{head.name!r} holds one set of weights for all steps, "
                f"and its n_predict does not say for how many: {announced!r}."
            )
        return Steps(int(announced), tied, found)

    def place(self, kind: str, step: int) -> int:
        """The number of the weights of a step.

        The first projection is never shared: the target's states may be wider.
        """
        first = min(step, 1) if kind == "proj" else 0
        return min((i for i in self.found[kind] if i >= first), default=first) if self.tied else step


def is_lstm(head: Head) -> bool:
    """Whether a head under our names is Arctic's sum_lstm, not sum_rnn, of which IBM's is a case."""
    return any(name.startswith(("projs.", "forget_")) for name in head)


def _refused(head: Head) -> str:
    if head.config.get("speculators_model_type") == "mlp":
        return "it is of the type 'mlp' of speculators 0.1; take one with IBM's names"
    announced = head.config.get("method", "sum_rnn")
    known = announced in ("sum_rnn", "sum_lstm")
    return "" if known else f"it is of the method {announced!r}; only sum_rnn and sum_lstm are"


def _complete(head: Head) -> Head:
    Steps.of(head)
    return head


FORMAT = HeadFormat(
    (
        Layout("Arctic sum_lstm", ("projs.0.weight", "forget_proj.0.weight"), ROWS, (PREFIX,)),
        Layout("Arctic sum_rnn", ("proj.0.0.weight",), ROWS, (PREFIX,)),
        Layout("IBM", ("proj.0.weight",), ROWS, (PREFIX,)),
    ),
    hidden=(("projs.0.weight", 1), ("forget_proj.0.weight", 1), ("proj.0.0.weight", 1)),
    vocabulary=("head.0.weight",),
    numbered=("emb.{i}.{rest}",),
    kinds="mlp_speculator|mlp",
    refused=_refused,
    finish=_complete,
)


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a network in the layout "reference" (the authors'), "vllm" or "arctic".

    ArcticInference also needs the architecture of the target in the config: `base_model_archs`.
    """
    if layout not in EXPORTED:
        raise ConfigError(unknown("layout", layout, EXPORTED))
    mlp = layout == "arctic" and "method" not in config  # Arctic's own methods keep their architecture
    named = {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]} if mlp else {}
    prefix = PREFIX if layout == "vllm" else ""
    return {**config, **named}, {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
