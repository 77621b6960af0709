"""The published layouts, under one set of names: modules in a row are numbered, whether there are several or one.

    IBM, Arctic MLP   emb.{i} proj.{i} ln.{i} head.{i}, with or without "speculator." in front
    Arctic sum_rnn    emb.{i}.{j} proj.{i}.{j} ln.{i}.{j} head.{i}: norms (a GELU follows each) and linears in a row
    Arctic sum_lstm   forget_emb.0 input_emb.0 output_emb.0 cell_emb.0, forget_proj.{0,1} … cell_proj.{0,1}, cell_ln.0 state_ln.0 head.{i};
                      or projs.{0,1}, the four side by side, as ArcticInference runs them

i is the step.  Where steps share their weights, the file holds them once or under all names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.errors import ConfigError, ModelError, unknown

KINDS = ("emb", "proj", "ln", "head")
GATES = ("forget", "input", "output", "cell")  # side by side in this order
RNN, LSTM = "sum_rnn", "sum_lstm"
NAMES = (
    (r"(emb|proj|ln)\.(\d+)\.(weight|bias)", r"\1.\2.0.\3"),
    (r"(?:emb|proj|ln)\.\d+\.\d+\.(?:weight|bias)", r"\g<0>"),
    (r"head\.\d+\.weight", r"\g<0>"),
    (r"(?:forget|input|output|cell)_(?:emb\.0|proj\.[01])\.weight", r"\g<0>"),
    (r"(?:projs\.[01]\.weight|(?:cell|state)_ln\.0\.(?:weight|bias))", r"\g<0>"),
)
READERS = ("reference", "vllm", "arctic")


def our_name(stored: str) -> str | None:
    name = stored.removeprefix("speculator.")
    return next((found.expand(new) for pattern, new in NAMES if (found := re.fullmatch(pattern, name))), None)


def method_of(head: Head) -> str | None:
    """By its tensors; None where they are of something else."""
    names = set(map(our_name, head))
    if "forget_emb.0.weight" in names:
        return LSTM
    return RNN if {"emb.0.0.weight", "proj.0.0.weight", "ln.0.0.weight", "head.0.weight"} <= names else None


def announced(head: Head) -> bool:
    """Whether its config says that it is one."""
    return (
        head.config.get("model_type") == "mlp_speculator"
        or head.config.get("speculators_model_type") == "mlp"
    )


@dataclass(frozen=True)
class Layout:
    """head: under our names.  steps: what the network was trained for, n_predict.  tied: its steps share their weights."""

    head: Head
    method: str
    steps: int
    tied: bool
    found: Mapping[str, set[int]]  # the steps that have weights of a kind in the file

    @staticmethod
    def of(head: Head) -> Layout:
        """Raises ModelError where the file is not whole, or of something that only looks alike."""
        if head.config.get("speculators_model_type") == "mlp":
            raise ModelError(
                f"{head.name!r} is of the type 'mlp' of speculators 0.1, which nobody published: give one with IBM's names."
            )
        method, said = method_of(head), head.config.get("method")
        if method is None:
            raise ModelError(
                f"{head.name!r} has neither emb, proj, ln and head nor forget_emb: its tensors are {', '.join(sorted(head)[:4])} …"
            )
        if said not in (None, RNN, LSTM):
            raise ModelError(f"{head.name!r} is of the method {said!r}; only {RNN} and {LSTM} are known.")
        head = head.renamed(our_name)
        kinds = KINDS if method == RNN else ("head",)
        found = {
            kind: {int(name.split(".")[1]) for name in head if name.startswith(f"{kind}.")} for kind in kinds
        }
        steps, tied = _steps(head, method, found)
        return Layout(head, method, steps, tied, found)

    def place(self, kind: str, step: int) -> int:
        """Under which number the weights of a step stand.  The first projection is never shared: the target's states may be wider."""
        first = min(step, 1) if kind == "proj" else 0
        return min((i for i in self.found[kind] if i >= first), default=first) if self.tied else step


def _steps(head: Head, method: str, found: Mapping[str, set[int]]) -> tuple[int, bool]:
    """(steps, whether they share weights): the tensors know, unless they are there once for all steps."""
    most = 1 + max((i for steps in found.values() for i in steps), default=-1)
    if most > MOST_STEPS:
        raise ModelError(f"{head.name!r} has tensors of {most} steps; {MOST_STEPS} are read.")
    whole = all(steps == set(range(most)) for steps in found.values())
    once = method == RNN and found["emb"] == found["ln"] == {0} and found["proj"] == {0, 1}
    tied = method == LSTM or once or head.config.get("tie_weights") is True
    if not (tied or whole):
        kind, i = next((kind, i) for kind, steps in found.items() for i in range(most) if i not in steps)
        raise ModelError(f"{head.name!r} has weights for {most} steps, but no {kind}.{i}.")
    if not tied or most > 2 or (whole and most == 2):
        return most, tied
    said = head.config.get("n_predict")
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        raise ModelError(
            f"{head.name!r} holds one set of weights for all steps, and its n_predict does not say for how many: {said!r}."
        )
    return said, tied


def exported(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of a network's own as its authors publish them ("reference"), as "vllm" or as "arctic" (ArcticInference)
    reads them.  ArcticInference also wants to find the architecture of the target in the config: `base_model_archs`."""
    if layout not in READERS:
        raise ConfigError(unknown("layout", layout, READERS))
    arctic = "method" in config
    if layout == "arctic" or (arctic and layout == "reference"):
        names = config["architectures"] if arctic else ["ArcticMLPSpeculatorPreTrainedModel"]
        return {**config, "architectures": names}, dict(tensors)
    if arctic:
        raise ConfigError(
            f"vLLM does not read the method {config['method']!r}; ArcticInference does: choose the layout 'arctic'."
        )
    return dict(config), {f"speculator.{name}": tensor for name, tensor in tensors.items()}
