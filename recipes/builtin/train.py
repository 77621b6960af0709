"""Trainer: Muon for matrices, AdamW for the rest, a schedule counted in tokens, exact resumption.

The learning rate warms up, stays constant, and is brought to zero in a separate decay phase:

    constant.pt   ----o-----------o----------->      continued at any time
                       \\           \\
    decay.pt            `--> 0      `--> 0           started from a copy of constant.pt

A step depends on the saved state alone. A run that is killed and resumed gives the same weights as one
that is not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from .corpus import PAD_ID, Stream
from .model import Shape, build
from .prose import ASSISTANT, BOS, SPECIAL, USER

USER_ID, ASSISTANT_ID, BOS_ID = (SPECIAL.index(x) for x in (USER, ASSISTANT, BOS))


@dataclass(frozen=True)
class Settings:
    """Everything that a run's weights depend on, apart from the token arrays."""

    rows: int = 12  # rows of a step
    micro: int = 4  # rows of one forward
    length: int = 1024
    prose_share: float = 1 / 3
    prompt_weight: float = 0.1  # loss weight of user turns in task rows
    warmup: int = 1_000_000  # tokens
    matrix_rate: float = 0.01
    other_rate: float = 4e-3
    weight_decay: float = 0.05
    teacher_weight: float = 0.7  # share of the loss against the teacher's distribution, if there is a teacher
    seed: int = 1
    checkpoint_seconds: float = 240
    validate_tokens: int = 1_000_000
    validation_rows: int = 4  # of each source


@dataclass
class Counts:
    """Position of a run in its data and schedule."""

    step: int = 0
    tokens: int = 0
    task_rows: int = 0
    prose_rows: int = 0
    validated: int = 0
    decay_start: int | None = None


def rate_factor(tokens: int, warmup: int, decay_start: int | None, decay: int) -> float:
    """Learning rate relative to its constant value."""
    if decay_start is None:
        return min(1.0, (tokens + 1) / warmup)
    return max(0.0, 1 - (tokens - decay_start) / decay)


def loss_weights(rows: np.ndarray, prompt_weight: float) -> np.ndarray:
    """Loss weight of each token: 0 for padding and <|bos|>, `prompt_weight` inside user turns, else 1."""
    places = np.arange(rows.shape[1])
    last_user = np.maximum.accumulate(np.where(rows == USER_ID, places, -1), axis=1)
    last_assistant = np.maximum.accumulate(np.where(rows == ASSISTANT_ID, places, -1), axis=1)
    last_start = np.maximum.accumulate(np.where(rows == BOS_ID, places, -1), axis=1)
    in_prompt = (last_user > last_assistant) & (last_user > last_start)
    weights = np.where(in_prompt, prompt_weight, 1.0).astype(np.float32)
    weights[(rows == PAD_ID) | (rows == BOS_ID)] = 0.0
    return weights


def optimizers(model: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [
        torch.optim.Muon(
            matrices, lr=settings.matrix_rate, momentum=0.95, weight_decay=settings.weight_decay
        ),
        torch.optim.AdamW(rest, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@dataclass
class Trainer:
    """One run in its folder: constant.pt or decay.pt, settings.json, log.jsonl."""

    folder: Path
    corpus: Path
    shape: Shape
    settings: Settings = field(default_factory=Settings)
    teacher: LlamaForCausalLM | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        self.model = build(self.shape, self.settings.seed).to(self.device).train()
        if self.teacher is not None:
            self.teacher = self.teacher.to(self.device).eval()
        self.optimizers = optimizers(self.model, self.settings)
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.counts = Counts()
        self.stream = Stream(self.corpus, self.settings.length)
        self.validation = self._validation_rows()

    def _check_settings(self) -> None:
        """Keep the settings of the first start; only what does not change the weights may differ."""
        path = self.folder / "settings.json"
        now = {"shape": asdict(self.shape), "settings": asdict(self.settings)}
        if not path.exists():
            path.write_text(json.dumps(now, indent=1))
        before = json.loads(path.read_text())
        changed = {k for part in now for k in now[part] if now[part][k] != before[part].get(k)}
        if changed & {*asdict(self.shape), "length", "seed"}:
            raise ValueError(f"{path} has other values of {', '.join(sorted(changed))}; use a new folder")

    def _validation_rows(self) -> dict[str, np.ndarray]:
        files = sorted(self.corpus.glob("val-*.npy"))
        return {f.stem.removeprefix("val-"): np.load(f)[: self.settings.validation_rows] for f in files}

    # -- checkpoints

    def load(self, name: str) -> bool:
        """Restore weights, optimizers, random state and counts; False if there is no such checkpoint."""
        path = self.folder / name
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"].cpu())
        self.counts = Counts(**state["counts"])
        return True

    def save(self, name: str) -> None:
        """Write the checkpoint beside the old one, then replace it in one step."""
        temporary = self.folder / f"{name}.tmp"
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "random": torch.get_rng_state(),
            "counts": asdict(self.counts),
        }
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)

    def _log(self, **values: Any) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.counts.step, "tokens": self.counts.tokens, **values}) + "\n")

    # -- phases

    def constant(self, tokens: int, seconds: float = float("inf")) -> bool:
        """Train at a constant rate up to a number of tokens; False if the time ran out before."""
        self.load("constant.pt")
        return self._run("constant.pt", tokens, 1, seconds)

    def decay(self, tokens: int, seconds: float = float("inf")) -> bool:
        """Bring the rate to zero over `tokens`, starting from constant.pt or resuming decay.pt."""
        if not self.load("constant.pt"):
            raise ValueError(f"{self.folder} has no constant.pt; run the constant phase first")
        start = self.counts.tokens
        if not (self.load("decay.pt") and self.counts.decay_start == start):
            self.load("constant.pt")
            self.counts.decay_start = start
        return self._run("decay.pt", start + tokens, tokens, seconds)

    def _run(self, name: str, until: int, decay: int, seconds: float) -> bool:
        begin = saved = time.monotonic()
        while self.counts.tokens < until:
            now = time.monotonic()
            if now - begin > seconds:
                self.save(name)
                return False
            if now - saved > self.settings.checkpoint_seconds:
                self.save(name)
                saved = now
            self._step(decay)
            if self.counts.tokens - self.counts.validated >= self.settings.validate_tokens:
                self.counts.validated = self.counts.tokens
                self._log(validation=self.validate())
        self.save(name)
        return True

    # -- steps

    def _batch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Token ids and loss weights of a step, `micro` rows at a time."""
        s, c = self.settings, self.counts
        prose_count = round(s.rows * s.prose_share)
        prose = self.stream.prose_rows(c.prose_rows, prose_count)
        task = self.stream.task_rows(c.task_rows, s.rows - prose_count)
        weights = np.concatenate([loss_weights(task, s.prompt_weight), loss_weights(prose, 1.0)])
        ids = np.concatenate([task, prose]).astype(np.int64)
        c.prose_rows += prose_count
        c.task_rows += s.rows - prose_count
        # Every micro-batch holds rows of both sources.
        for part in range(-(-s.rows // s.micro)):
            chosen = slice(part, None, -(-s.rows // s.micro))
            yield (
                torch.from_numpy(ids[chosen]).to(self.device),
                torch.from_numpy(weights[chosen]).to(self.device),
            )

    def _step(self, decay: int) -> None:
        started = time.monotonic()
        c, s = self.counts, self.settings
        factor = rate_factor(c.tokens, s.warmup, c.decay_start, decay)
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
        parts = list(self._batch())
        total = sum(float(w[:, 1:].sum()) for _, w in parts)
        loss = 0.0
        for ids, weights in parts:
            part = self._loss(ids, weights) / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        c.step += 1
        c.tokens += s.rows * s.length
        if c.step % 10 == 0 or c.step < 5:
            speed = s.rows * s.length / (time.monotonic() - started)
            self._log(loss=round(loss, 4), rate=round(factor, 4), tokens_per_second=round(speed))

    def _loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of cross-entropies; with a teacher, mixed with the cross-entropy against it."""
        targets, weights = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
        logits = self._logits(self.model, ids)
        losses = F.cross_entropy(logits, targets, reduction="none")
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self._logits(self.teacher, ids).softmax(-1)
            against = F.cross_entropy(logits, wanted, reduction="none")
            losses = torch.lerp(losses, against, self.settings.teacher_weight)
        return (losses * weights).sum()

    def _logits(self, model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        return next_logits(model, ids, self.device)

    def validate(self) -> dict[str, float]:
        self.model.eval()
        result = {n: mean_loss(self.model, rows, self.device) for n, rows in self.validation.items()}
        self.model.train()
        return result


def next_logits(model: LlamaForCausalLM, ids: Tensor, device: str) -> Tensor:
    """Logits [rows * (length - 1), vocabulary] of the token after each but the last."""
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids).logits[:, :-1]
    return logits.flatten(0, 1).float()


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, rows: np.ndarray, device: str) -> float:
    """Mean cross-entropy in nats of all tokens but padding and <|bos|>."""
    total, count = 0.0, 0
    for start in range(0, len(rows), 4):
        ids = torch.from_numpy(rows[start : start + 4].astype(np.int64)).to(device)
        targets = ids[:, 1:].reshape(-1)
        targets = targets.masked_fill((targets == PAD_ID) | (targets == BOS_ID), -100)
        total += F.cross_entropy(next_logits(model, ids, device), targets, reduction="sum").item()
        count += int((targets != -100).sum())
    return round(total / count, 4)
