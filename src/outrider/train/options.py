"""Options of a training run that all methods share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.checkpoints.quantize import Quantization
from outrider.core.validate import (
    TEXT,
    Checked,
    Count,
    Flag,
    Kind,
    Natural,
    Positive,
    Text,
    list_of,
    one_of,
    real,
    whole,
)
from outrider.errors import ConfigError

MOST_DEPTH = 64  # draft tokens of a step
LEAST_0 = real("a number of at least 0", lambda value: value >= 0)
TEMPERATURES = list_of("temperatures of at least 0", LEAST_0)
RATE = real("a number above 0 and at most 1", lambda value: 0 < value <= 1)
FOLDER = Kind("a folder", lambda value: isinstance(value, str))
Fraction = Annotated[float, real("a number in [0, 1)", lambda value: 0 <= value < 1)]
Taps = Annotated[Sequence[int], list_of("layers", whole())]
# Options that a resumed run may change: none has an effect on the weights.
CHANGEABLE = (
    "data", "out", "cache", "cache_gb", "checkpoint_every", "minutes", "evaluate_every", "evaluate_prompts",
    "evaluate_tokens", "depth", "quantization", "format",
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions(Checked):
    """Options of a training run.

    data              files with texts or conversations (data.py)
    out               folder of the result
    regenerate        replace the answers by the target's own
    temperatures      of the target's answers, in turn
    prompt_tokens     of a plain text, whose continuation is the answer
    answer_tokens     most tokens of an answer
    length            most tokens of a text
    limit             number of texts; None: all
    held_out          texts for evaluation only, at most a tenth
    steps, epochs     optimizer steps; None: so many passes over the texts
    batch             texts of a step
    optimizer         "adamw", or "muon" for the matrices of layers
    rate              peak learning rate; None: the published one, scaled to the width
    warmup            share of the steps; a cosine to 0 follows
    weight_decay, clip   of the optimizer; largest norm of the gradient
    dtype             of the forward in training; weights and optimizer are float32
    depth             draft tokens of a step in evaluations
    evaluate_every, checkpoint_every   in steps
    evaluate_prompts, evaluate_tokens  held-out prompts, and tokens of their greedy answers
    minutes           start no answers, features or step after this time; the same command goes on later
    schedule          what the rate follows: "steps", or "minutes", at whose end its cosine ends
    init              folder of a head in the layout of `out` to start from
    cache, cache_gb   folder of answers and features, by default in `out`; most gigabytes of features.  Texts
                      beyond are computed again in every pass.
    quantization      of the weights on disk: int8 or int4; None: bfloat16
    format            published layout; None: the reference's
    """

    data: Annotated[Sequence[str], list_of("files", TEXT, least=0)] = ()
    out: Annotated[str, FOLDER] = ""
    regenerate: Flag = True
    temperatures: Annotated[Sequence[float], TEMPERATURES] = (0.0, 0.8)
    prompt_tokens: Count = 32
    answer_tokens: Count = 256
    length: Annotated[int, whole(8)] = 1024
    limit: Count | None = None
    held_out: Count = 64
    steps: Count | None = None
    epochs: Positive = 3.0
    batch: Count = 8
    optimizer: Annotated[str, one_of("adamw", "muon")] = "adamw"
    rate: Annotated[float, RATE] | None = None
    warmup: Fraction = 0.03
    weight_decay: Fraction = 0.0
    clip: Positive = 1.0
    dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    seed: Natural = 0
    depth: Annotated[int, whole(1, MOST_DEPTH)] = 3
    evaluate_every: Count = 250
    evaluate_prompts: Count = 24
    evaluate_tokens: Annotated[int, whole(2)] = 64
    checkpoint_every: Count = 100
    minutes: Positive | None = None
    schedule: Annotated[str, one_of("steps", "minutes")] = "steps"
    init: Text | None = None
    cache: Text | None = None
    cache_gb: Annotated[float, LEAST_0] = 8.0
    quantization: Quantization | None = None
    format: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ConfigError("training needs data: files with texts or conversations, .jsonl or .txt.")
        if not self.out:
            raise ConfigError("training needs out: the folder for the trained weights.")
        if self.schedule == "minutes" and (self.minutes is None or self.steps is not None):
            raise ConfigError('schedule "minutes" needs minutes, and no steps.')

    @property
    def engine(self) -> dict[str, Any]:
        """Engine options that the run needs."""
        return {}

    @property
    def work(self) -> Path:
        """Folder of the checkpoint and the log."""
        return Path(self.out).expanduser() / "work"

    @property
    def decisive(self) -> dict[str, Any]:
        """The options that the weights depend on."""
        return {name: value for name, value in as_json(self).items() if name not in CHANGEABLE}


def as_json(options: TrainOptions) -> dict[str, Any]:
    """All options as JSON values."""
    values = asdict(options).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the values that differ."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
