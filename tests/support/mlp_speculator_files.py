"""Files of MLP speculators in every published layout, and their network in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toys import HIDDEN, V, save_head

INNER, STEPS = 96, 3
GATES = ("forget", "input", "output", "cell")
TOP_K, KEPT = (4, 3, 2), 5


# ---- the network in float64, from the names in a file


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@dataclass(frozen=True)
class Case:
    """tensors: all names of the published network; stored: what the file holds."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    stored: dict[str, Tensor]
    file: str = "model.safetensors"

    def norm(self, name: str, x: Tensor) -> Tensor:
        return gelu(rms(x) * self.tensors[f"{name}.weight"].double() + self.tensors[f"{name}.bias"].double())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].double().T

    def embed(self, name: str, token: int) -> Tensor:
        return self.tensors[f"{name}.weight"][token].double()

    def logits(self, f: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits after the tokens `ids`, the first of which was sampled from the state f."""
        sw = 0.5 ** (0.5 / STEPS)
        share = math.sqrt((1 - sw * sw) * INNER / 2) / sw
        s, cell = f.double(), torch.zeros(INNER, dtype=torch.float64)
        s = rms(s) / math.sqrt(2) if self.config.get("scale_input") else s
        for i, token in enumerate(ids):
            if "forget_emb.0.weight" in self.tensors:
                gate = {
                    name: self.linear(f"{name}_proj.{min(i, 1)}", s)
                    + share * self.embed(f"{name}_emb.0", token)
                    for name in GATES
                }
                cell = (
                    cell * gate["forget"].sigmoid()
                    + self.norm("cell_ln.0", gate["cell"]) * gate["input"].sigmoid()
                )
                s = self.norm("state_ln.0", cell) * gate["output"].sigmoid()
            elif "emb.0.0.weight" in self.tensors:
                s = self.stacked(i, s, share, token)
            else:
                s = self.norm(f"ln.{i}", self.linear(f"proj.{i}", s) + share * self.embed(f"emb.{i}", token))
        return self.linear(f"head.{len(ids) - 1}", s)

    def stacked(self, i: int, s: Tensor, share: float, token: int) -> Tensor:
        one, two = (0, min(i, 1)) if self.config["tie_weights"] else (i, i)
        z, s = self.embed(f"emb.{one}.0", token), self.linear(f"proj.{two}.0", s)
        deep = "." in self.config["inner_dim"]
        if deep:
            z = self.linear(f"emb.{one}.3", self.norm(f"emb.{one}.1", z))
            s = self.linear(f"proj.{two}.3", self.norm(f"proj.{two}.1", s))
        s = self.norm(f"ln.{one}.0", s + share * z)
        return self.norm(f"ln.{one}.3", self.linear(f"ln.{one}.2", s)) if deep else s

    def write(self, folder: Path) -> str:
        return save_head(folder, self.config, self.stored, self.file)


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def norm_of(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": 1 + 0.3 * torch.randn(INNER), f"{name}.bias": 0.3 * torch.randn(INNER)}


def ibm(tied: bool = False, **config: Any) -> Case:
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for i in range(STEPS):
        if i == 0 or not tied:
            tensors |= {
                f"emb.{i}.weight": torch.randn(V, INNER),
                f"head.{i}.weight": 3 * matrix(V, INNER),
                **norm_of(f"ln.{i}"),
            }
        else:
            tensors |= {
                name.replace(".0.", f".{i}."): tensor
                for name, tensor in list(tensors.items())
                if ".0." in name
            }
        tensors[f"proj.{i}.weight"] = (
            tensors["proj.1.weight"] if tied and i > 1 else matrix(INNER, INNER if i else HIDDEN)
        )
    settings = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": HIDDEN,
        "inner_dim": INNER,
        "n_predict": STEPS,
        "top_k_tokens_per_head": list(TOP_K),
        "n_candidates": KEPT,
        **config,
    }
    if tied:
        settings.setdefault("tie_weights", True)
    return Case(settings, tensors, {f"speculator.{name}": tensor for name, tensor in tensors.items()})


def once(case: Case) -> Case:
    """Tied weights under their first names only, and without a prefix."""
    names = {id(tensor): name for name, tensor in reversed(case.tensors.items())}
    return replace(
        case, stored={name: tensor for name, tensor in case.tensors.items() if names[id(tensor)] == name}
    )


def arctic(case: Case, **config: Any) -> Case:
    sizes = {name: str(INNER) for name in ("inner_dim", "emb_dim", "proj_dim")}
    settings = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "input_hidden_dim": HIDDEN,
        "n_predict": STEPS,
        "top_k_tokens_per_head": [1] * STEPS,
        "n_candidates": STEPS,
        "scale_input": True,
        **sizes,
        **config,
    }
    return replace(case, config=settings, stored=case.stored or case.tensors, file="pytorch_model.bin")


def rnn(deep: bool, tied: bool) -> Case:
    torch.manual_seed(4)
    head = 3 * matrix(V, INNER)
    tensors = {f"head.{i}.weight": head if tied else 3 * matrix(V, INNER) for i in range(STEPS)}
    for i in range(1 if tied else STEPS):
        tensors |= {f"emb.{i}.0.weight": torch.randn(V, INNER), **norm_of(f"ln.{i}.0")}
        if deep:
            tensors |= {**norm_of(f"emb.{i}.1"), f"emb.{i}.3.weight": matrix(INNER, INNER)}
            tensors |= {f"ln.{i}.2.weight": matrix(INNER, INNER), **norm_of(f"ln.{i}.3")}
    for i in range(2 if tied else STEPS):
        tensors[f"proj.{i}.0.weight"] = matrix(INNER, INNER if i else HIDDEN)
        if deep:
            tensors |= {**norm_of(f"proj.{i}.1"), f"proj.{i}.3.weight": matrix(INNER, INNER)}
    size = f"{INNER}.{INNER}" if deep else str(INNER)
    sizes = dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), size)
    return arctic(Case({}, tensors, {}), method="sum_rnn", tie_weights=tied, tie_lstm_embs=False, **sizes)


def lstm(tied: bool) -> Case:
    torch.manual_seed(5)
    table, head = torch.randn(V, INNER), 3 * matrix(V, INNER)
    tensors = {f"{gate}_emb.0.weight": table if tied else torch.randn(V, INNER) for gate in GATES}
    tensors |= {
        f"{gate}_proj.{i}.weight": matrix(INNER, (HIDDEN, INNER)[i]) for gate in GATES for i in range(2)
    }
    tensors |= {f"head.{i}.weight": head for i in range(STEPS)} | norm_of("cell_ln.0") | norm_of("state_ln.0")
    return arctic(Case({}, tensors, {}), method="sum_lstm", tie_weights=True, tie_lstm_embs=tied)


def unsaid(case: Case) -> Case:
    """With a config that leaves out what the tensors tell."""
    return replace(
        case, config={key: case.config[key] for key in ("tie_weights", "scale_input", "inner_dim")}
    )


def joined(case: Case) -> Case:
    """The projections side by side, and what is tied once."""
    gone = ("input_", "output_", "cell_emb", "cell_proj", "forget_proj", "head.1", "head.2")
    stored = {name: tensor for name, tensor in case.tensors.items() if not name.startswith(gone)}
    for i in range(2):
        stored[f"projs.{i}.weight"] = torch.cat([case.tensors[f"{gate}_proj.{i}.weight"] for gate in GATES])
    return replace(case, stored=stored, file="model.safetensors")


CASES = {
    "ibm": ibm(),
    "ibm, scaled": ibm(scale_input=True, tie_weights=False),
    "ibm, a wrong n_predict": ibm(n_predict=7),
    "ibm, no prefix": replace(ibm(), stored=ibm().tensors),
    "ibm, tied": ibm(True, scale_input=True),
    "ibm, tied, aliases": replace(ibm(True), file="pytorch_model.bin"),
    "ibm, tied, once": once(ibm(True)),
    "ibm, tied, once, unsaid": once(ibm(True, tie_weights=None)),
    "arctic mlp": replace(
        ibm(scale_input=True, architectures=["ArcticMLPSpeculatorPreTrainedModel"]),
        stored=ibm().tensors,
        file="pytorch_model.bin",
    ),
    "rnn": rnn(False, False),
    "rnn, tied": rnn(False, True),
    "rnn, deep": rnn(True, False),
    "rnn, deep, tied": rnn(True, True),
    "rnn, tied, unsaid": unsaid(rnn(False, True)),
    "lstm, unsaid": unsaid(lstm(False)),
    "lstm": lstm(False),
    "lstm, tied": lstm(True),
    "lstm, joined": joined(lstm(True)),
}
