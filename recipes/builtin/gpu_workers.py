"""The processes of gpu.py: they answer prompts and keep the target's states, or train a head.

WORK/shard-K/texts.json     [[tokens of the prompt, ids], …]
WORK/shard-K/states.bin     states of the layers `kept`, complete once done.json names all texts
WORK/out/NAME               the run of a head
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import shutil
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.checkpoints.hub import Checkpoint
from outrider.config import options
from outrider.core.step import FINAL
from outrider.train.answers import Text, answered
from outrider.train.base import replace_text
from outrider.train.data import Item, Source
from outrider.train.evaluate import drafted
from outrider.train.features import Features, States, gathered, needed_states
from outrider.train.methods import method
from outrider.train.options import TrainOptions
from outrider.train.processes import Processes
from outrider.train.report import Report
from outrider.train.run import Prepared, Supervision, Texts, fit, new_method
from recipes.builtin.heads import SIZES, TRAINED_ON_GPU

TAPS, OF = (2, 4, 5), 8  # layers whose inputs the shipped EAGLE-3 and DFlash read, of the shipped target
LENGTH, ANSWER = 512, 128  # tokens
TEMPERATURES = (0.0, 0.8, 0.0, 0.8, 1.0)
SEED = 26
CALLERS, CALL = 3, 256  # threads that ask, so that one call's last answers do not leave the batch empty
HELD, LATE = 64, 20.0
ANY_SIZE = 1e15  # bytes
SHIPPED = Path(__file__).resolve().parents[2] / "src/outrider/builtin"


def taps(llm: LLM) -> tuple[int, ...]:
    """The layers that correspond to TAPS in a target that was grown from the shipped one."""
    return tuple(tap * llm.engine.decoder.spec.layers // OF for tap in TAPS)


def kept(llm: LLM) -> tuple[int, ...]:
    return tuple(sorted({*taps(llm), FINAL}))


def engine(given: argparse.Namespace, sequences: int, share: int) -> LLM:
    """share: how often the keys and values of all sequences, in bfloat16, fit into the memory for them."""
    torch.set_num_threads(1)
    spec = Checkpoint.open(given.target).spec
    place = 2 * 2 * spec.layers * spec.kv_heads * spec.head_dim
    return LLM(
        given.target,
        device=given.device,
        speculative_config=None,
        max_model_len=LENGTH,
        max_num_seqs=sequences,
        max_num_batched_tokens=8 * sequences,
        max_decode_slowdown=50.0,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=share * sequences * LENGTH * place,
    )


def told(given: argparse.Namespace, text: str) -> None:
    print(f"{time.time() - given.began:6.1f} s  {text}", flush=True)


# ---- answers


def answer(given: argparse.Namespace, part: int) -> None:
    """Answer every n-th prompt until the time is over, then compute the states of the texts."""
    llm = engine(given, given.sequences, 1)
    told(given, f"engine: {llm.engine.decoder.backend.name}")
    with gzip.open(given.prompts, "rt", encoding="utf-8") as file:
        lines = enumerate(file)
        todo = [(i, Item(json.loads(line), [])) for i, line in lines if i % given.answering == part]
    settings = TrainOptions(
        data=("-",), out="-", temperatures=TEMPERATURES, answer_tokens=ANSWER, length=LENGTH, seed=SEED
    )
    found: dict[int, list[int]] = {}
    lock, items = threading.Lock(), dict(todo)

    def ask() -> None:
        asked = False
        while not asked or time.time() - given.began < given.answers:
            asked = True
            with lock:
                some, todo[:] = todo[:CALL], todo[CALL:]
            if not some:
                return
            made = answered(llm, dict(some), settings)
            with lock:
                found.update(made)

    began = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as pool:
        for call in [pool.submit(ask) for _ in range(CALLERS)]:
            call.result()
    seconds, count = time.perf_counter() - began, sum(map(len, found.values()))
    told(given, f"{len(found)} answers, {count} tokens, {count / seconds:.0f} tokens/s")
    texts = [Text(items[i].prompt + ids, len(items[i].prompt)) for i, ids in sorted(found.items())]
    texts = [text for text in texts if text.usable]
    folder = given.work / f"shard-{part}"
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "texts.json", json.dumps([[text.prompt, text.ids] for text in texts]))
    States(llm.engine.decoder, texts, kept(llm), folder, ANY_SIZE).fill(lambda _: None)
    replace_text(folder / "complete", "")
    told(given, f"states of {len(texts)} texts, {sum(len(text.ids) for text in texts)} tokens")


class Shards:
    """States of the texts of all shards, as `States`.  kept: some of theirs, neighbours there."""

    def __init__(self, shards: Sequence[States], kept: Sequence[int], hidden: int) -> None:
        self.shards, self.kept = shards, tuple(kept)
        every = shards[0].kept
        first = every.index(self.kept[0])
        assert every[first : first + len(self.kept)] == self.kept
        self.columns = slice(first * hidden, (first + len(self.kept)) * hidden)
        self.places = [(shard, i) for shard in shards for i in range(len(shard.texts))]

    def of(self, numbers: Sequence[int]) -> Tensor:
        parts = []
        for shard, i in map(self.places.__getitem__, numbers):
            assert shard.store is not None
            parts.append(shard.store[shard.starts[i] : shard.starts[i + 1], self.columns])
        return gathered(parts, self.shards[0].model.device)


def complete(given: argparse.Namespace) -> list[Path]:
    """The folders of the shards: of all, or of those that are complete LATE seconds after half of them."""
    folders = [given.work / f"shard-{part}" for part in range(given.answering)]
    latest = given.seconds - given.reserve
    while True:
        done = [folder for folder in folders if (folder / "complete").exists()]
        now = time.time() - given.began
        if len(done) == len(folders) or now > latest:
            return done
        if 2 * len(done) >= len(folders):
            latest = min(latest, now + LATE)
        time.sleep(0.1)


def shards_of(given: argparse.Namespace, llm: LLM) -> tuple[list[States], list[Source]]:
    """The shards, once they are complete."""
    states, sources = [], []
    for folder in complete(given):
        content = (folder / "texts.json").read_bytes()
        texts = [Text(ids, prompt) for prompt, ids in json.loads(content)]
        states.append(States(llm.engine.decoder, texts, kept(llm), folder, ANY_SIZE))
        states[-1].fill(lambda _: None)
        name = f"{given.prompts.name}, {folder.name}"
        sources.append(Source(name, hashlib.sha256(content).hexdigest(), len(texts)))
    if not states:
        raise SystemExit("no shard of answers was complete in time")
    return states, sources


# ---- heads


def settings_of(given: argparse.Namespace, name: str, llm: LLM) -> Any:
    """Options of a run: sizes and bits of the shipped head, and what `TRAINED_ON_GPU` says."""
    asked = {**TRAINED_ON_GPU["all"], **SIZES.get(name, {}), **TRAINED_ON_GPU.get(name, {})}
    asked |= {"data": ["-"], "out": str(given.work / "out" / name), "init": initial(given, name, llm)}
    if name in ("eagle3", "dflash"):
        asked["taps"] = taps(llm)
    asked |= {"length": LENGTH, "answer_tokens": ANSWER, "temperatures": TEMPERATURES, "seed": SEED}
    left = given.seconds - given.reserve - (time.time() - given.began)
    asked |= {"schedule": "minutes", "minutes": max(left, 1.0) / 60}
    asked |= {"batch": given.batch, "checkpoint_every": given.checkpoint_every}
    return options(method(name).Options, asked, "training option")


def shipped(name: str) -> str:
    return str(SHIPPED / ("draft" if name == "draft_model" else f"heads/{name}"))


def initial(given: argparse.Namespace, name: str, llm: LLM) -> str:
    """The shipped head.  MTP's layers are numbered from the target's number of layers on."""
    layers, folder = llm.engine.decoder.spec.layers, given.work / "init"
    if name != "mtp" or layers == OF:
        return shipped(name)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(Path(shipped(name)) / "model.safetensors")
    renamed = {key.replace(f"layers.{OF}.", f"layers.{layers}."): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    shutil.copy(Path(shipped(name)) / "config.json", folder)
    return str(folder)


def evaluator(given: argparse.Namespace, llm: LLM, name: str) -> LLM:
    """The engine of evaluations, with its kernels compiled: another on the CPU if drafting fails on the
    device, for that must not end the training.
    """
    config = {"model": shipped(name), "num_speculative_tokens": 2, **method(name).drafts}
    try:
        drafted(llm, [[1, 40 + i, 50] for i in range(HELD)], 8, config)
    except Exception:
        traceback.print_exc()
        given = argparse.Namespace(**{**vars(given), "device": "cpu"})
        llm = engine(given, HELD, 2)
    told(given, f"evaluations on {llm.engine.decoder.backend.name}")
    return llm


def train(given: argparse.Namespace, name: str) -> None:
    llm = engine(given, HELD, 2)
    told(given, f"engine: {llm.engine.decoder.backend.name}")
    evaluating = evaluator(given, llm, name)
    states, sources = shards_of(given, llm)
    every = [text for shard in states for text in shard.texts]
    order = list(range(len(every)))
    random.Random(SEED).shuffle(order)
    held = max(1, min(HELD, len(order) // 10))
    key = hashlib.sha256("".join(source.sha256 for source in sources).encode()).hexdigest()[:16]
    texts = Texts(every, order[:held], sorted(order[held:]), sources, key)
    told(given, f"{len(states)} shards with {len(every)} texts")
    asked = settings_of(given, name, llm)
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    made, model = new_method(llm, name, asked, texts), llm.engine.decoder
    needed = needed_states(made.wanted, made.logits)
    features = Features(model, every, made.logits, Shards(states, needed, model.spec.hidden))
    deadline = time.perf_counter() + 60 * asked.minutes
    supervision = Supervision(Report(Console(width=160)), deadline, Processes())
    fit(evaluating, name, Prepared(texts, made, features), supervision)
    told(given, "done")
