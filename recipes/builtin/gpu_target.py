"""Train the target on one GPU in a few minutes, in the time that is given.

    python recipes/builtin/gpu_target.py --corpus CORPUS --out OUT [--seconds 300] [--init builtin]
        [--shape deep]

CORPUS holds tokenizer.json, prose.npy and val-*.npy (stages `tokenizer` and `corpus` of make.py).  Processes
generate task rows ahead (`corpus.build_shard`) while the model is trained; the same shards, losses and
optimizers as in train.py, but with compiled layers, and a rate that ends with the time.  Validation follows.
A checkpoint that is smaller than the shape is grown, and computes the same before the first step: two new
layers follow each of its eight, and the outputs of all that is new are zero.

    OUT/model/       the newest weights in bfloat16, with the tokenizer
    OUT/log.jsonl    loss, rate and tokens per second
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider.checkpoints.hub import Checkpoint  # noqa: E402 - behind the path
from outrider.core.quantized import QuantizedWeight  # noqa: E402
from recipes.builtin.corpus import SHARD_ROWS, Stream, build_shard, shard_path  # noqa: E402
from recipes.builtin.model import DEEP, TARGET, Shape, build, export  # noqa: E402
from recipes.builtin.train import Settings, loss_weights, mean_loss, optimizers  # noqa: E402

WARM, STEADY = 0.01, 0.35  # shares of the time until the full rate, and until the rate begins to fall
SAVED_EVERY = 90.0  # seconds
AHEAD = 4  # batches
CHECKED_EVERY = 2.0  # seconds without a batch
VALIDATED = 16  # rows of a source
SHAPES = {"target": TARGET, "deep": DEEP}
LAYER = re.compile(r"(?<=^model\.layers\.)\d+")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", help="model folder to begin from; otherwise seeded weights")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the run, without validation")
    parser.add_argument("--rows", type=int, default=256, help="rows of 1,024 tokens of a step")
    parser.add_argument("--micro", type=int, default=64, help="rows of one forward")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=4e-3)
    parser.add_argument("--prose-share", type=float, default=0.2, help="of the rows")
    parser.add_argument("--generators", type=int, default=8, help="processes that write task rows")
    parser.add_argument("--first-shard", type=int, default=0)
    parser.add_argument("--shard-rows", type=int, default=SHARD_ROWS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--generator", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def generate(given: argparse.Namespace) -> None:
    """Write every n-th shard until the time is over."""
    torch.set_num_threads(1)
    shard = given.first_shard + given.generator
    while time.time() - given.began < given.seconds:
        build_shard(given.corpus, shard, Settings.length, given.shard_rows)
        shard += given.generators


class Batches:
    """Token ids and loss weights of steps, made ahead by a thread.

    running: processes that write the shards; if one ends before its time, or the thread fails, `parts` raises
    RuntimeError.
    """

    def __init__(self, given: argparse.Namespace, running: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.given, self.running, self.queue = given, running, queue.Queue[tuple[Tensor, Tensor]](AHEAD)
        self.stream = Stream(given.corpus, Settings.length, given.shard_rows)
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()

    def _fill(self) -> None:
        given = self.given
        prose_count, prompt_weight = max(1, round(given.rows * given.prose_share)), Settings.prompt_weight
        task_count, at = given.rows - prose_count, given.first_shard * given.shard_rows
        for step in itertools.count():
            first = at + step * task_count
            for shard in (first // given.shard_rows, (first + task_count - 1) // given.shard_rows):
                while not shard_path(given.corpus, shard).exists():
                    time.sleep(0.02)
            task = self.stream.task_rows(first, task_count)
            prose = self.stream.prose_rows(step * prose_count, prose_count)
            weights = np.concatenate([loss_weights(task, prompt_weight), loss_weights(prose, 1.0)])
            ids = np.concatenate([task, prose]).astype(np.int32)
            order = np.random.RandomState(step).permutation(len(ids))
            self.queue.put((torch.from_numpy(ids[order]), torch.from_numpy(weights[order])))

    def _next(self) -> tuple[Tensor, Tensor]:
        while True:
            try:
                return self.queue.get(timeout=CHECKED_EVERY)
            except queue.Empty:
                ended = [process.args for process in self.running if process.poll() is not None]
                if ended or not self.thread.is_alive():
                    raise RuntimeError(
                        f"no more task rows: {ended or 'the rows could not be read'}"
                    ) from None

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The next step, `micro` rows at a time, on the device."""
        ids, weights = self._next()
        total = weights[:, 1:].sum()
        for first in range(0, len(ids), self.given.micro):
            some = slice(first, first + self.given.micro)
            yield (
                ids[some].to(self.given.device, non_blocking=True).long(),
                (weights[some] / total).to(self.given.device, non_blocking=True),
            )


def layer_forward(x: Tensor, layer: Any, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """One layer of a Llama, x [rows, length, h] in bfloat16."""
    attention, mlp = layer.self_attn, layer.mlp
    rows, length, hidden = x.shape

    def heads(weight: Tensor, y: Tensor) -> Tensor:
        return _linear(y, weight).view(rows, length, -1, cos.shape[-1]).transpose(1, 2)

    y = F.rms_norm(x, (hidden,), layer.input_layernorm.weight.bfloat16(), eps)
    q, k, v = (heads(part.weight, y) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, -1)
    x = x + _linear(y, attention.o_proj.weight)
    y = F.rms_norm(x, (hidden,), layer.post_attention_layernorm.weight.bfloat16(), eps)
    inner = F.silu(_linear(y, mlp.gate_proj.weight)) * _linear(y, mlp.up_proj.weight)
    return x + _linear(inner, mlp.down_proj.weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.bfloat16())


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def output_loss(
    x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor, eps: float
) -> Tensor:
    """The weighted sum of cross-entropies of x [rows, length, h]."""
    x = F.rms_norm(x, (x.shape[-1],), norm.bfloat16(), eps)
    logits = _linear(x[:, :-1].flatten(0, 1), embedding)
    losses = F.cross_entropy(logits.float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


class Loss:
    """The loss of a `LlamaForCausalLM` whose weights are float32, computed in bfloat16."""

    def __init__(self, model: Any, length: int, device: str) -> None:
        self.model, self.eps = model.model, model.config.rms_norm_eps
        head_size, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        angles = torch.arange(length)[:, None] * inverse[None, :]
        both = torch.cat([angles, angles], -1).to(device)
        self.cos, self.sin = both.cos().bfloat16(), both.sin().bfloat16()
        compiled = device == "cuda"
        self.layer = torch.compile(layer_forward, dynamic=False) if compiled else layer_forward
        self.output = torch.compile(output_loss, dynamic=False) if compiled else output_loss

    def __call__(self, ids: Tensor, weights: Tensor) -> Tensor:
        embedding = self.model.embed_tokens.weight
        x = F.embedding(ids, embedding).bfloat16()
        for layer in self.model.layers:
            x = self.layer(x, layer, self.cos, self.sin, self.eps)
        return self.output(x, self.model.norm.weight, embedding, ids[:, 1:], weights[:, 1:], self.eps)


def rate_at(share: float) -> float:
    """The rate, relative to its highest, after a share of the time."""
    if share < WARM:
        return max(share / WARM, 0.05)
    return 1.0 if share < STEADY else max(0.0, (1 - share) / (1 - STEADY))


def initial_model(init: str | None, shape: Shape = TARGET) -> nn.Module:
    """A model with seeded weights, or with those of a checkpoint, which may be quantized, grown to the shape.

    Layer i of a checkpoint of L layers becomes layer i * layers / L.  What is new keeps its seeded weights,
    and adds nothing to the residual stream: of new layers o_proj and down_proj are zero, of a wider MLP the
    new columns of down_proj.
    """
    model = build(shape, Settings.seed)
    if init is None:
        return model
    checkpoint = Checkpoint.open(init)
    weights, inner = checkpoint.tensors(), checkpoint.spec.inner
    every, rest = divmod(shape.layers, checkpoint.spec.layers)
    if rest:
        raise SystemExit(f"{init} has {checkpoint.spec.layers} layers, which do not divide {shape.layers}.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = LAYER.search(name)
            number = int(found[0]) if found else 0
            if number % every:
                continue
            name, old = LAYER.sub(str(number // every), name), parameter
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                old = parameter[:inner]
            elif name.endswith("down_proj.weight"):
                old = parameter[:, :inner]
            if parameter.ndim == 1:
                old.copy_(weights.get(name, *old.shape))
            else:
                weight = weights.linear(name.removesuffix(".weight"), *old.shape)
                old.copy_(weight.dense() if isinstance(weight, QuantizedWeight) else weight)
    return model


class Run:
    """One training run with its model, optimizers and log."""

    def __init__(self, given: argparse.Namespace, running: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        torch.set_float32_matmul_precision("high")
        self.given, shape = given, SHAPES[given.shape]
        self.model = initial_model(given.init, shape).to(given.device).train()
        self.batches = Batches(given, running)
        rates = Settings(matrix_rate=given.matrix_rate, other_rate=given.other_rate)
        self.optimizers = optimizers(self.model, rates)
        self.highest = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.loss_of = Loss(self.model, Settings.length, given.device)
        self.log = given.out / "log.jsonl"
        self.log.write_text("")

    def train(self) -> None:
        """Steps until the time is over.  The rate's time begins after the first step, which compiles."""
        given = self.given
        end = given.began + given.seconds
        self._step(rate_at(0.0))
        began = saved = time.time()
        for step in itertools.count(1):
            now = time.time()
            if now >= end:
                break
            rate = rate_at((now - began) / (end - began))
            loss = self._step(rate)
            if step % 20 == 0:
                tokens, seconds = step * given.rows * Settings.length, time.time() - began
                self._log_line(
                    seconds=round(now - given.began, 1),
                    step=step,
                    tokens=tokens,
                    loss=round(loss.item(), 4),
                    rate=round(rate, 4),
                    tokens_per_second=round(tokens / seconds),
                )
            if now - saved > SAVED_EVERY:
                self._export()
                saved = now
        self._export()

    def _step(self, factor: float) -> Tensor:
        for optimizer, rates in zip(self.optimizers, self.highest):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
        total = torch.zeros((), device=self.given.device)
        for ids, weights in self.batches.parts():
            loss = self.loss_of(ids, weights)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _export(self) -> None:
        export(self.model, self.given.corpus / "tokenizer.json", self.given.out / "model")

    def validate(self) -> None:
        """Mean loss of the first rows of every source."""
        self.model.eval()
        found = {}
        for file in sorted(self.given.corpus.glob("val-*.npy")):
            rows = np.load(file)[:VALIDATED]
            found[file.stem.removeprefix("val-")] = mean_loss(self.model, rows, self.given.device)
        self._log_line(validation=found)

    def _log_line(self, **values: Any) -> None:
        print(values, flush=True)
        with self.log.open("a") as file:
            file.write(json.dumps(values) + "\n")


def main(given: argparse.Namespace) -> None:
    """Begin with the generators.  Their shards go to memory, beside links to the rest of the corpus."""
    given.out.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        used = [given.corpus / name for name in ("tokenizer.json", "prose.npy")]
        for path in (*used, *given.corpus.glob("val-*.npy")):
            (Path(folder) / path.name).symlink_to(path.resolve())
        given.corpus = Path(folder)
        command = [sys.executable, *sys.argv, "--corpus", folder, "--began", str(given.began)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        running = [
            subprocess.Popen([*command, "--generator", str(part)], env=environment)
            for part in range(given.generators)
        ]
        try:
            run = Run(given, running)
            run.train()
            run.validate()
        finally:
            for process in running:
                process.kill()
                process.wait()


if __name__ == "__main__":
    asked = parse()
    main(asked) if asked.generator is None else generate(asked)
