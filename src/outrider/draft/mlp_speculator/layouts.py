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

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.core.validate import is_whole
from outrider.errors import ConfigError, ModelError, unknown
from outrider.heads.layouts import HeadFormat, Layout

KINDS = ("emb", "proj", "ln", "head")
GATES = ("forget", "input", "output", "cell")  # side by side in this order
RNN, LSTM = "sum_rnn", "sum_lstm"
PREFIX = "speculator."
EXPORTED = ("reference", "vllm", "arctic")


def _unchanged(*patterns: str) -> tuple[tuple[str, str], ...]:
    return tuple((pattern, pattern) for pattern in patterns)


ROWS = (
    *((f"{kind}.{{i}}.{{kind}}", f"{kind}.{{i}}.0.{{kind}}") for kind in KINDS[:3]),
    *_unchanged(*(f"{kind}.{{i}}.{{j}}.{{kind}}" for kind in KINDS[:3]), "head.{i}.weight"),
    *_unchanged(*(f"{gate}_{part}.{{i}}.weight" for gate in GATES for part in ("emb", "proj"))),
    *_unchanged("projs.{i}.weight", "cell_ln.0.{kind}", "state_ln.0.{kind}"),
)
FORMAT = HeadFormat(
    (
        Layout("Arctic sum_lstm", ("projs.0.weight", "forget_proj.0.weight"), ROWS, (PREFIX,)),
        Layout("Arctic sum_rnn", ("proj.0.0.weight",), ROWS, (PREFIX,)),
        Layout("IBM", ("proj.0.weight",), ROWS, (PREFIX,)),
    ),
    hidden=(("projs.0.weight", 1), ("forget_proj.0.weight", 1), ("proj.0.0.weight", 1)),
    vocabulary=("head.0.weight",),
    numbered=("emb.{i}.{rest}",),
)


def method_of(head: Head) -> str | None:
    """The method by our names of tensors: "sum_rnn" (of which IBM's is a case) or "sum_lstm"; None for
    another kind of head.
    """
    if "forget_emb.0.weight" in head:
        return LSTM
    return (
        RNN if all(f"{kind}.0.0.weight" in head for kind in KINDS[:3]) and "head.0.weight" in head else None
    )


def translate(head: Head) -> Head:
    """The head under our names.  Raises ModelError for an incomplete file, or another kind of head."""
    if head.config.get("speculators_model_type") == "mlp":
        raise ModelError(
            f"{head.name!r} is of the type 'mlp' of speculators 0.1, which is not supported: "
            "give one with IBM's names."
        )
    ours, announced = FORMAT.translate(head), head.config.get("method")
    if method_of(ours) is None:
        raise ModelError(
            f"{head.name!r} has neither emb, proj, ln and head nor forget_emb: its tensors are "
            f"{', '.join(sorted(head)[:4])} …"
        )
    if announced not in (None, RNN, LSTM):
        raise ModelError(
            f"{head.name!r} is of the method {announced!r}; only {RNN} and {LSTM} are supported."
        )
    SpeculatorLayout.of(ours)
    return ours


@dataclass(frozen=True)
class SpeculatorLayout:
    """steps: n_predict, the number of steps trained.  tied: the steps share their weights.
    found: the steps that have weights of a kind in the file.
    """

    method: str | None
    steps: int
    tied: bool
    found: Mapping[str, set[int]]

    @staticmethod
    def of(head: Head) -> SpeculatorLayout:
        """head: under our names.  Raises ModelError for an incomplete file."""
        method = method_of(head)
        found = {
            kind: {int(name.split(".")[1]) for name in head if name.startswith(f"{kind}.")}
            for kind in (KINDS if method == RNN else ("head",))
        }
        return SpeculatorLayout(method, *_steps(head, method, found), found)

    def place(self, kind: str, step: int) -> int:
        """The number of the weights of a step.

        The first projection is never shared: the target's states may be wider.
        """
        first = min(step, 1) if kind == "proj" else 0
        return min((i for i in self.found[kind] if i >= first), default=first) if self.tied else step


def _steps(head: Head, method: str | None, found: Mapping[str, set[int]]) -> tuple[int, bool]:
    """(number of steps, whether they share weights).

    The config decides only if the file holds one set of weights.
    """
    stored = 1 + max((i for steps in found.values() for i in steps), default=-1)
    if stored > MOST_STEPS:
        raise ModelError(f"{head.name!r} has tensors of {stored} steps; at most {MOST_STEPS} are supported.")
    whole = all(steps == set(range(stored)) for steps in found.values())
    once = method == RNN and found["emb"] == found["ln"] == {0} and found["proj"] == {0, 1}
    tied = method == LSTM or once or head.config.get("tie_weights") is True
    if not (tied or whole):
        kind, i = next((kind, i) for kind, steps in found.items() for i in range(stored) if i not in steps)
        raise ModelError(f"{head.name!r} has weights for {stored} steps, but no {kind}.{i}.")
    if not tied or stored > 2 or (whole and stored == 2):
        return stored, tied
    announced: Any = head.config.get("n_predict")
    if not is_whole(announced, 1):
        raise ModelError(
            f"{head.name!r} holds one set of weights for all steps, "
            f"and its n_predict does not say for how many: {announced!r}."
        )
    return int(announced), tied


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a network in the layout "reference" (the authors'), "vllm" or "arctic".

    ArcticInference also needs the architecture of the target in the config: `base_model_archs`.
    """
    if layout not in EXPORTED:
        raise ConfigError(unknown("layout", layout, EXPORTED))
    arctic = "method" in config
    if layout == "arctic" or (arctic and layout == "reference"):
        names = config["architectures"] if arctic else ["ArcticMLPSpeculatorPreTrainedModel"]
        return {**config, "architectures": names}, dict(tensors)
    if arctic:
        raise ConfigError(
            f"vLLM does not support the method {config['method']!r}; "
            "ArcticInference does: choose the layout 'arctic'."
        )
    return dict(config), {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
