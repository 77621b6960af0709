"""Train the shipped heads further, all at once, on one GPU and in a few minutes.

    python recipes/builtin/gpu.py --prompts prompts.jsonl.gz --out OUT [--seconds 270] [--target FOLDER]

prompts.jsonl.gz: the token ids of a prompt a line.

    0 s            processes answer prompts, until `--answers` seconds; each keeps the target's states
    then           one process a head trains until `--reserve` seconds before the end, beside the others
    every 10 s     OUT/heads.tar, OUT/draft.tar and OUT/logs.tar are replaced
    end            OUT/summary.json: tokens per step before and after on held-out prompts, and answer tokens

Everything starts from the shipped heads, also for another target of the same width and vocabulary.  A head
is in the tar from its first checkpoint on, so a run that is cut off leaves the newest ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from recipes.builtin.heads import SIZES  # noqa: E402 - behind the path

DRAFT = "draft_model"
EARLY = 15.0  # seconds that a training process needs before it can read answers
TAR_EVERY = 10.0
ROOM = 4e10  # bytes: 120,000 texts take 34 GB
FILES = ("config.json", "model.safetensors", "training.json", "work/log.jsonl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of answers, states and runs, tens of GB")
    parser.add_argument("--target", default="builtin", help="a folder, or a name that is shipped")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=270.0, help="of the whole run")
    parser.add_argument("--answers", type=float, default=55.0, help="seconds after which no answer begins")
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds for the last evaluations")
    parser.add_argument("--answering", type=int, default=12, help="processes that answer")
    parser.add_argument("--sequences", type=int, default=512, help="answers at once in each")
    parser.add_argument("--batch", type=int, default=256, help="texts of a step")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--heads", nargs="+", default=[*SIZES, DRAFT], choices=[*SIZES, DRAFT])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.own = given.work is None
    if given.own:
        memory = _free("/dev/shm") > ROOM
        folder = "/dev/shm" if memory else max(("/dev/shm", "/tmp"), key=_free)
        given.work = Path(tempfile.mkdtemp(prefix="heads-", dir=folder))
    return given


def _free(folder: str) -> float:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0.0
    return found.f_bavail * found.f_frsize


# ---- the parent


class Children:
    """The processes of a run, each with its log."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.running = given, dict[str, subprocess.Popen[bytes]]()
        self.logs = given.work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def start(self, worker: str) -> None:
        fixed = {"--worker": worker, "--began": str(self.given.began), "--work": str(self.given.work)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        log = self.logs / f"{worker.replace(':', '-')}.log"
        command = [sys.executable, "-u", *sys.argv, *[part for pair in fixed.items() for part in pair]]
        with log.open("wb") as file:
            self.running[worker] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def poll(self) -> None:
        """Forget and name those that have ended."""
        for worker, process in list(self.running.items()):
            if (status := process.poll()) is not None:
                del self.running[worker]
                say(self.given, f"{worker} ended with {status}")

    def stop(self) -> None:
        for worker, process in self.running.items():
            say(self.given, f"{worker} is stopped")
            process.kill()
            process.wait()


def say(given: argparse.Namespace, text: str) -> None:
    print(f"{time.time() - given.began:6.1f} s  {text}", flush=True)


def pack(given: argparse.Namespace) -> None:
    """Replace the archives by the newest files."""
    runs = given.work / "out"
    heads = [path for name in given.heads if name != DRAFT for path in _made(runs / name)]
    archive(given.out / "heads.tar", runs, heads)
    archive(given.out / "draft.tar", runs, _made(runs / DRAFT))
    archive(given.out / "logs.tar", given.work, sorted((given.work / "logs").glob("*.log")))


def _made(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / name).exists()]


def archive(path: Path, root: Path, files: list[Path]) -> None:
    temporary = path.with_suffix(".tmp")
    with tarfile.open(temporary, "w") as tar:
        for file in files:
            tar.add(file, file.relative_to(root))
    temporary.replace(path)


def summarize(given: argparse.Namespace) -> None:
    """summary.json, also printed: of every head that has finished its run."""
    found: dict[str, Any] = {}
    for name in given.heads:
        path = given.work / "out" / name / "training.json"
        if not path.exists():
            continue
        told = json.loads(path.read_text())
        first, last = told["evaluations"][0], told["evaluations"][-1]
        seen = told["answer tokens seen"]
        found[name] = {"steps": told["steps"], "texts": told["texts"], "tokens": told["answer tokens"]}
        found[name] |= {"seen": seen, "before": first, "after": last}
        rise = f"{first['tokens_per_step']:.3f} -> {last['tokens_per_step']:.3f} tokens per step"
        say(given, f"{name}: {told['steps']} steps, {seen:,} answer tokens, {rise}")
    (given.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")


def main(given: argparse.Namespace) -> None:
    for folder in (given.out, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    if any(given.work.iterdir()):
        raise SystemExit(
            f"{given.work} is not empty: states of other texts would be taken for those of new ones"
        )
    say(given, f"{given.work}: {_free(str(given.work)) / 1e9:.0f} GB free")
    children = Children(given)
    try:
        run(given, children)
    finally:
        children.stop()
        pack(given)
        summarize(given)
        if given.own:
            shutil.rmtree(given.work, ignore_errors=True)


def run(given: argparse.Namespace, children: Children) -> None:
    """Start the processes, and archive what they make until all have ended or the time is over."""

    def now() -> float:
        return time.time() - given.began

    for part in range(given.answering):
        children.start(f"answer:{part}")
    training, packed = False, 0.0
    while (children.running or not training) and now() < given.seconds:
        if not training and (now() > given.answers - EARLY or not children.running):
            training = True
            for name in given.heads:
                children.start(f"train:{name}")
        time.sleep(0.5)
        children.poll()
        if training and now() - packed > TAR_EVERY:
            packed = now()
            pack(given)


if __name__ == "__main__":
    asked = parse()
    if asked.worker is None:
        main(asked)
    else:
        from recipes.builtin import gpu_workers

        kind, which = asked.worker.split(":")
        gpu_workers.answer(asked, int(which)) if kind == "answer" else gpu_workers.train(asked, which)
