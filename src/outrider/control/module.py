"""The control module: a small trained network that corrects calibrated acceptance.

    odds of acceptance = odds by the bins · exp(network(node, request))

    node      confidence, depth
    request   method, temperature, repetition of the last tokens, luck (accepted beyond what was expected),
              streak (tokens accepted in a row)

SpecDec++ (arXiv 2405.19715) and DISCO (arXiv 2405.04304) predict acceptance by a network alone.  A correction
keeps what the bins learn while serving, and leaves methods alone that it was not fitted to.

The inputs of a request are rounded to few levels.  So the network is evaluated once for a combination of
them, for all depths and cells of confidence together, and a node costs a look-up.

The losses of both are compared on every judged node.  A network that is trusted decides until the bins lead
by `PROOF`, and again once it leads by as much; one that is not begins with the bins.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.control.acceptance import CELLS, DEEP, EDGES, FINE, Calibration
from outrider.core.row import Row
from outrider.errors import ConfigError, saving

log = logging.getLogger("outrider")

DEFAULT = Path(__file__).parent.parent / "builtin" / "control" / "module.safetensors"
PLACES = (DEEP + 1) * CELLS  # depths and cells of a source, in the order of `key_of`
LAST = 64  # tokens whose repetition counts
LUCK_RATE = 0.15  # of a moving average, by judged node
NODE_INPUTS, REQUEST_INPUTS = 4, 5  # the latter without the methods
MOST_TABLES = 1024
MOST_CORRECTION = 3.0  # of the logarithm of the odds
MOST_WEIGHT = 1e4  # of a file; larger ones could give what is no number
FLOATS = ("F16", "F32", "F64")  # types of a file's weights
PROOF = 4.0  # nats by which one has to predict better before the other gives way
KEEP = 0.999  # discount of a comparison, by judged node
ONLY_BINS = "bins"
Array = NDArray[np.float32]


class Request(NamedTuple):
    """Inputs of a request, in levels.  method: place in `Network.methods`."""

    method: int
    temperature: int  # tenths
    repetition: int  # eighths
    luck: int  # eighths, -8 … 8
    streak: int  # 0, 1, 2 … 3, 4 … 7, more

    def inputs(self, methods: int) -> list[float]:
        chosen = [float(i == self.method) for i in range(methods)]
        temperature, repetition = self.temperature / 10, self.repetition / 8
        return [temperature, float(not self.temperature), repetition, self.luck / 8, self.streak / 4, *chosen]


class Judged(NamedTuple):
    """A judged node.  place: depth and cell, as in `key_of`.  probability: by the bins."""

    request: Request
    place: int
    probability: float
    accepted: bool


def node_inputs() -> Array:
    """Inputs of every place, [PLACES, NODE_INPUTS]."""
    ends = [*EDGES[1:], FINE + 2]
    middles = np.array([(low + high) / (2 * FINE + 4) for low, high in zip(EDGES, ends)], np.float32)
    log_odds = np.log(middles / (1 - middles)).clip(-6, 6) / 4
    places = itertools.product(range(DEEP + 1), range(CELLS))
    rows = [(log_odds[cell], middles[cell], depth / DEEP, depth == 1) for depth, cell in places]
    return np.array(rows, np.float32)


@dataclass(frozen=True)
class Network:
    """One hidden layer.

    node [NODE_INPUTS, H], request [REQUEST_INPUTS + methods, H], bias [H], output [H].
    methods: those that it was fitted to, "+" between drafters that proposed the same node.
    about: how it was fitted, for people.
    """

    node: Array
    request: Array
    bias: Array
    output: Array
    methods: Sequence[str]
    about: Mapping[str, str]

    def save(self, file: Path) -> None:
        tensors = {"node": self.node, "request": self.request, "bias": self.bias, "output": self.output}
        with saving("control module", file, SafetensorError):
            save_file(tensors, file, {**self.about, "methods": " ".join(self.methods)})


def load(file: Path) -> Network:
    """Read a file of `Network.save`.  Raises ConfigError."""
    try:
        with safe_open(file.expanduser(), "numpy") as found:
            about = dict(found.metadata() or {})
            names = ("node", "request", "bias", "output")
            if any((kind := found.get_slice(name).get_dtype()) not in FLOATS for name in names):
                raise ConfigError(f"control_module {str(file)!r} has weights of type {kind}: store float32.")
            with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
                parts = [found.get_tensor(name).astype(np.float32) for name in names]
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"control_module {str(file)!r} cannot be read: {error}.  `outrider tune control` makes one."
        ) from error
    methods = about.pop("methods", "").split()
    width = parts[2].shape[0] if parts[2].ndim == 1 else 0
    shapes = [(NODE_INPUTS, width), (REQUEST_INPUTS + len(methods), width), (width,), (width,)]
    fits = width and [part.shape for part in parts] == shapes
    if not fits or not all((np.abs(part) < MOST_WEIGHT).all() for part in parts):  # nor what is no number
        raise ConfigError(f"control_module {str(file)!r} is no such network.")
    node, request, bias, output = parts
    return Network(node, request, bias, output, methods, about)


class Module:
    """A network for the drafters of one controller, and its comparison with the bins.

    names: of the drafters.  trusted: it decides until the bins have shown to predict better; otherwise the
    other way round.  used: whether it decides.  pairs: if set to a list, every judged node is appended.
    """

    def __init__(self, network: Network, names: Sequence[str], trusted: bool) -> None:
        self.network, self.used = network, trusted
        self.methods: dict[int, int] = {}  # source -> place of its method, if the network was fitted to it
        for source in sources(len(names)):
            if (name := method_name(names, source)) in network.methods:
                self.methods[source] = network.methods.index(name)
        self.nodes = node_inputs() @ network.node + network.bias
        self.tables: dict[Request, list[float]] = {}
        self.pairs: list[Judged] | None = None
        self.lead = self.weight = self.bins_loss = self.loss = 0.0  # nats, discounted

    def table(self, request: Request) -> list[float]:
        """Factor of the odds for every place."""
        found = self.tables.get(request)
        if found is None:
            if len(self.tables) >= MOST_TABLES:
                self.tables.clear()
            own = np.array(request.inputs(len(self.network.methods)), np.float32) @ self.network.request
            correction = np.maximum(self.nodes + own, 0) @ self.network.output
            found = np.exp(correction.clip(-MOST_CORRECTION, MOST_CORRECTION)).tolist()
            self.tables[request] = found
        return found

    def compare(self, bins: float, corrected: float, accepted: bool) -> None:
        """Take in a judged node, with the probability that either gave it."""
        if not accepted:
            bins, corrected = 1 - bins, 1 - corrected
        before, after = math.log(bins), math.log(corrected)
        self.weight = KEEP * self.weight + 1
        self.bins_loss, self.loss = KEEP * self.bins_loss - before, KEEP * self.loss - after
        self.lead = max(-2 * PROOF, min(2 * PROOF, self.lead + after - before))
        if abs(self.lead) > PROOF and self.used != (self.lead > 0):
            self.used = self.lead > 0
            self.log()

    def log(self) -> None:
        """Say which one decides from now on."""
        by = "the control module" if self.used else "calibrated bins"
        log.debug("acceptance of drafts is predicted by %s: %s", by, self.report())

    def report(self) -> dict[str, Any]:
        """Which one decides, and the mean losses of both in nats."""
        weight = max(1.0, self.weight)
        return {
            "by": "module" if self.used else "bins",
            "log_loss": {"module": round(self.loss / weight, 4), "bins": round(self.bins_loss / weight, 4)},
        }


def sources(drafters: int) -> range:
    """All sets of so many drafters that propose a node, as bits; a mix of many is not told apart."""
    return range(1, 1 << min(drafters, 4))


def method_name(names: Sequence[str], source: int) -> str:
    return "+".join(sorted(name for k, name in enumerate(names) if source >> k & 1))


def module_for(file: str | None, names: Sequence[str], trusted: bool) -> Module | None:
    """The module of a file, or the built-in one (None), for these drafters; None if it knows none of them.

    trusted: the built-in one was fitted to this very target.
    """
    if file == ONLY_BINS:
        return None
    module = Module(load(DEFAULT if file is None else Path(file)), names, trusted or file is not None)
    if module.methods:
        module.log()
    return module if module.methods else None


class Corrected(Calibration):
    """Acceptance in one request, by the bins and the module."""

    __slots__ = ("estimates", "luck", "module", "repetition", "requests", "row", "streak")

    def __init__(self, above: Calibration, module: Module, row: Row) -> None:
        super().__init__(above)
        self.module, self.row = module, row
        self.luck, self.streak = 0.0, 0
        self.repetition: int | None = None
        # by source, with the table for it, until `refresh`
        self.requests: dict[int, tuple[Request, list[float]]] = {}
        self.estimates: dict[int, tuple[float, float]] = {}  # by the bins, corrected

    def refresh(self) -> None:
        super().refresh()
        self.requests.clear()
        self.estimates.clear()
        self.repetition = None

    def _request(self, source: int) -> tuple[Request, list[float]] | None:
        """Inputs of the request, with their table; None for a method that the network was not fitted to."""
        found = self.requests.get(source)
        if found is None:
            method = self.module.methods.get(source)
            if method is None:
                return None
            if self.repetition is None:
                last = self.row.tokens[-LAST:]
                self.repetition = 8 - 8 * len(set(last)) // len(last)
            temperature = min(20, round(10 * self.row.distribution.temperature))
            luck, streak = round(8 * self.luck), min(4, self.streak.bit_length())
            request = Request(method, temperature, self.repetition, luck, streak)
            found = self.requests[source] = request, self.module.table(request)
        return found

    def _estimate(self, key: int) -> float:
        bins = corrected = super()._estimate(key)
        source, place = divmod(key, PLACES)
        if (found := self._request(source)) is not None:
            odds = bins * found[1][place]
            corrected = odds / (1 - bins + odds)
        self.estimates[key] = bins, corrected
        return corrected if self.module.used else bins

    def learn(self, key: int, accepted: bool) -> None:
        source, place = divmod(key, PLACES)
        self.probability(key)
        bins, corrected = self.estimates[key]
        if (found := self._request(source)) is not None:
            self.module.compare(bins, corrected, accepted)
            if self.module.pairs is not None:
                self.module.pairs.append(Judged(found[0], place, bins, accepted))
        self.luck += LUCK_RATE * (accepted - bins - self.luck)
        self.streak = self.streak + 1 if accepted else 0
        super().learn(key, accepted)
