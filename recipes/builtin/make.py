"""Make the built-in models in stages: data, tokenizer, corpus, target, draft, heads, eval.

Every stage resumes where it was stopped.

python recipes/builtin/make.py --data DATA --out OUT [stage ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STAGES = ("data", "tokenizer", "corpus", "target", "draft", "heads", "eval")
VOCABULARY = 8192
TOKENIZER_TASKS = 20_000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stages",
        nargs="*",
        default=[],
        metavar="stage",
        help=f"any of {', '.join(STAGES)}; all if none is given",
    )
    parser.add_argument("--data", type=Path, help="folder of the public data sets (stage data)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of token arrays, checkpoints and models"
    )
    parser.add_argument(
        "--tokens", type=float, default=200e6, help="tokens of the constant phase; raise it to train on"
    )
    parser.add_argument("--decay", type=float, default=30e6, help="tokens of the decay phase")
    parser.add_argument("--rows", type=int, default=12, help="rows of 1,024 tokens of a step")
    parser.add_argument("--micro", type=int, default=4, help="rows of one forward")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop training after this time")
    parser.add_argument("--shards", type=int, default=2, help="task shards written ahead by stage corpus")
    parser.add_argument("--workers", type=int, default=1, help="processes that write shards")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts that heads learn from")
    parser.add_argument("--head-steps", type=int, default=20_000, help="steps of 8 texts of every head")
    parser.add_argument("--per-kind", type=int, default=20, help="tasks of each kind and split (stage eval)")
    options = parser.parse_args()
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stage {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
    options.stages = [s for s in STAGES if s in options.stages] if options.stages else list(STAGES)
    return options


def prepare(options: argparse.Namespace, stage: str) -> None:
    """Stages data, tokenizer and corpus; each is skipped if its last file is there."""
    from recipes.builtin import corpus
    from recipes.builtin.train import Settings

    out = options.out / "corpus"
    if stage == "data" and not (out / "train.jsonl").exists():
        if options.data is None:
            raise SystemExit("stage data needs --data, the folder of the public data sets")
        corpus.prepare_documents(options.data, out)
    if stage == "tokenizer" and not (out / "tokenizer.json").exists():
        corpus.train_tokenizer(out, VOCABULARY, TOKENIZER_TASKS)
    if stage == "corpus":
        if not (out / "prose.npy").exists():
            corpus.build_prose(out, Settings.length)
        corpus.build_shards(out, options.shards, Settings.length, options.workers)


def train(options: argparse.Namespace, stage: str) -> None:
    """Constant phase, decay phase and export of the target or the draft."""
    import torch
    from transformers import LlamaForCausalLM

    from recipes.builtin import model
    from recipes.builtin.train import Settings, Trainer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(options.threads)
    teacher = None
    if stage == "draft":
        if not (options.out / "target").exists():
            raise SystemExit(f"stage draft needs {options.out / 'target'}; run stage target first")
        teacher = LlamaForCausalLM.from_pretrained(options.out / "target", dtype=torch.float32)
    trainer = Trainer(
        options.out / f"{stage}-run",
        options.out / "corpus",
        model.TARGET if stage == "target" else model.DRAFT,
        Settings(rows=options.rows, micro=options.micro),
        teacher,
        device,
    )
    seconds = options.minutes * 60
    if not trainer.constant(int(options.tokens), seconds) or not trainer.decay(int(options.decay), seconds):
        print(
            f"{stage}: stopped at {trainer.counts.tokens / 1e6:.1f} M tokens; run the same command to go on"
        )
        raise SystemExit(3)
    model.export(trainer.model.cpu(), options.out / "corpus/tokenizer.json", options.out / stage)


def heads(options: argparse.Namespace) -> None:
    """Every head, on the target's own answers."""
    import torch

    from recipes.builtin.heads import train_heads

    if not (options.out / "target").exists():
        raise SystemExit(f"stage heads needs {options.out / 'target'}; run stage target first")
    torch.set_num_threads(options.threads)
    if not train_heads(options.out, options.prompts, options.head_steps, 60 * options.minutes):
        print("heads: stopped; run the same command to go on")
        raise SystemExit(3)


def main() -> None:
    options = parse()
    for stage in options.stages:
        print(f"stage {stage}", flush=True)
        if stage in ("data", "tokenizer", "corpus"):
            prepare(options, stage)
        elif stage in ("target", "draft"):
            train(options, stage)
        elif stage == "heads":
            heads(options)
        else:
            from recipes.builtin import evaluate

            evaluate.evaluate(options.out, options.per_kind)


if __name__ == "__main__":
    main()
